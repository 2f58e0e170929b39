"""Which kind of box a run gets: never the host by accident."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import warnings

import pytest

from quintain.sandbox import SandboxUnavailable, open_pool
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.local import IsolationWarning, LocalSandbox


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")


@pytest.mark.docker
@pytest.mark.parametrize("needs_isolation", [True, False])
def test_auto_takes_docker_where_an_engine_answers(engine_url: str, needs_isolation: bool):
    with open_pool(SandboxConfig(), needs_isolation=needs_isolation, owner="tests") as pool:
        assert pool.kind == "docker" and pool.notice is None


def test_auto_falls_back_to_local_only_for_harmless_environments_and_says_so(no_engine: None):
    with open_pool(SandboxConfig(), needs_isolation=False, owner="tests") as pool:
        assert pool.kind == "local" and pool.notice is not None and "isolates nothing" in pool.notice
    with pytest.raises(SandboxUnavailable, match=r"DOCKER_HOST.*sandbox\.type=local"):
        open_pool(SandboxConfig(), needs_isolation=True, owner="tests")


def test_docker_asked_for_without_an_engine_is_an_error(no_engine: None):
    with pytest.raises(SandboxUnavailable, match="no Docker engine answers"):
        open_pool(SandboxConfig(type="docker"), needs_isolation=False, owner="tests")


def test_local_asked_for_is_given_with_a_notice():
    with open_pool(SandboxConfig(type="local"), needs_isolation=True, owner="tests") as pool:
        assert pool.kind == "local" and pool.notice is not None and "isolates nothing" in pool.notice


def test_an_engine_that_never_answers_is_given_up_quickly(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(SandboxUnavailable):
            open_pool(SandboxConfig(), needs_isolation=True, owner="tests")
        assert time.monotonic() - started < 2


def test_an_address_that_is_not_supported_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", "npipe://somewhere")
    with pytest.raises(SandboxUnavailable, match=r"npipe://somewhere.*unix://"):
        open_pool(SandboxConfig(), needs_isolation=True, owner="tests")


def test_a_local_box_made_by_hand_warns():
    with pytest.warns(IsolationWarning, match="isolates nothing"):
        LocalSandbox(SandboxConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalSandbox(SandboxConfig(), acknowledged=True)


def test_the_layer_imports_docker_only_when_it_is_used():
    code = "import sys, quintain.sandbox; sys.exit('docker' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
