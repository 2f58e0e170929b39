"""Boxes of both kinds for the same suite, and the SDK's client of the real engine."""

from __future__ import annotations

import os
import tarfile
import tempfile
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


@pytest.fixture(scope="session")
def bare_image(engine: docker.APIClient) -> Iterator[str]:
    """The default image without python3."""
    with open_pool(SandboxConfig(type="docker", pool_size=1), needs_isolation=True, owner="tests") as pool:
        full = engine.inspect_container(pool.acquire().id)["Image"]
    container = engine.create_container(full, ["x"])["Id"]
    with tempfile.TemporaryFile() as whole, tempfile.NamedTemporaryFile(suffix=".tar") as bare:
        for chunk in engine.export(container):
            whole.write(chunk)
        whole.seek(0)
        with tarfile.open(fileobj=whole) as source, tarfile.open(fileobj=bare, mode="w") as sink:
            for member in source:
                if "python" not in member.name and not member.isdev():
                    sink.addfile(member, source.extractfile(member) if member.isreg() else None)
        bare.flush()
        name, tag = "quintain-test-bare", str(os.getpid())  # another session may use this engine, too
        engine.import_image(bare.name, repository=name, tag=tag, changes=["ENV PATH=/usr/bin:/bin"])
    engine.remove_container(container, force=True)
    yield f"{name}:{tag}"
    engine.remove_image(f"{name}:{tag}", force=True)


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
