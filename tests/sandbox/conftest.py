"""Boxes of both kinds for the same suite, and the SDK's client of the real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import docker
import pytest

from quintain.sandbox import BlockingSandbox, SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

BOTH_KINDS = [pytest.param("local"), pytest.param("docker", marks=pytest.mark.docker)]


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
