"""Boxes for the environments under test."""

from collections.abc import Iterator

import pytest

from quintain.sandbox import SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig


@pytest.fixture(scope="session")
def local_pool() -> Iterator[SandboxPool]:
    with open_pool(SandboxConfig(type="local", pool_size=2), needs_isolation=True, owner="environment tests") as pool:
        yield pool
