"""Boxes for the environments under test: local ones, and real containers of the test engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quintain.sandbox import SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig


@pytest.fixture(scope="session")
def local_pool() -> Iterator[SandboxPool]:
    with open_pool(SandboxConfig(type="local", pool_size=2), needs_isolation=True, owner="environment tests") as pool:
        yield pool


@pytest.fixture(scope="session")
def docker_pool(engine_url: str) -> Iterator[SandboxPool]:
    with open_pool(SandboxConfig(type="docker", pool_size=2), needs_isolation=True, owner="environment tests") as pool:
        yield pool


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def pool(request: pytest.FixtureRequest) -> SandboxPool:
    """A pool of each kind."""
    return request.getfixturevalue(f"{request.param}_pool")
