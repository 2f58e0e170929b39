"""Boxes of both kinds for the same suite, and a real Docker engine: the one that answers, else the test engine.

A test that needs an engine and finds none fails; it is never skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from quintain.sandbox import BlockingSandbox, SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

ENGINE_SCRIPT = Path(__file__).resolve().parents[1] / "testbed" / "engine.sh"
BOTH_KINDS = [pytest.param("local"), pytest.param("docker", marks=pytest.mark.docker)]


@pytest.fixture(scope="session")
def engine_url() -> str:
    """DOCKER_HOST of a real engine, set for the whole session."""
    started = subprocess.run([ENGINE_SCRIPT, "start"], capture_output=True, text=True, timeout=280)
    if started.returncode != 0:
        pytest.fail(f"these tests need a Docker engine: start one, or set DOCKER_HOST\n{started.stderr}")
    line = subprocess.run([ENGINE_SCRIPT, "env"], capture_output=True, text=True, check=True).stdout
    os.environ["DOCKER_HOST"] = line.strip().partition("=")[2]
    return os.environ["DOCKER_HOST"]


@pytest.fixture(scope="session")
def engine(engine_url: str) -> docker.APIClient:
    """The SDK's client of the engine, to look at it past our own code."""
    return docker.APIClient(engine_url, version="auto", timeout=60)


@pytest.fixture
def make_pool(request: pytest.FixtureRequest) -> Iterator[Callable[..., SandboxPool]]:
    """Opens pools, `make_pool("docker", pool_size=2)`, and closes them after the test."""
    pools = []

    def make(kind: str, **settings: Any) -> SandboxPool:
        if kind == "docker":
            request.getfixturevalue("engine_url")
        config = SandboxConfig.model_validate({"type": kind, "pool_size": 1, "acquire_timeout_s": 30, **settings})
        pools.append(open_pool(config, needs_isolation=False, owner="tests"))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module", params=BOTH_KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    """One pool of each kind for a module, output capped at 10,000 bytes."""
    if request.param == "docker":
        request.getfixturevalue("engine_url")
    config = SandboxConfig(type=request.param, pool_size=2, acquire_timeout_s=30, max_output_bytes=10_000)
    with open_pool(config, needs_isolation=False, owner="tests") as pool:
        yield pool


@pytest.fixture
def box(pool: SandboxPool) -> Iterator[BlockingSandbox]:
    """A clean box of each kind."""
    with pool.lease() as box:
        yield box
