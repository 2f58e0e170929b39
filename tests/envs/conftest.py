"""Boxes for the environments under test: local ones, and real containers of the test engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintain.sandbox import SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

ENGINE_SCRIPT = Path(__file__).resolve().parents[1] / "testbed" / "engine.sh"


@pytest.fixture(scope="session")
def local_pool() -> Iterator[SandboxPool]:
    with open_pool(SandboxConfig(type="local", pool_size=2), needs_isolation=True, owner="environment tests") as pool:
        yield pool


@pytest.fixture(scope="session")
def docker_pool() -> Iterator[SandboxPool]:
    """Fails, and never skips, where no engine can be had."""
    started = subprocess.run([ENGINE_SCRIPT, "start"], capture_output=True, text=True, timeout=280)
    if started.returncode != 0:
        pytest.fail(f"these tests need a Docker engine: start one, or set DOCKER_HOST\n{started.stderr}")
    line = subprocess.run([ENGINE_SCRIPT, "env"], capture_output=True, text=True, check=True).stdout
    os.environ["DOCKER_HOST"] = line.strip().partition("=")[2]
    with open_pool(SandboxConfig(type="docker", pool_size=2), needs_isolation=True, owner="environment tests") as pool:
        yield pool


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def pool(request: pytest.FixtureRequest) -> SandboxPool:
    """A pool of each kind."""
    return request.getfixturevalue(f"{request.param}_pool")
