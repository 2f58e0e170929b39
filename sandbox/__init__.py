"""Boxes that tools run in: start, exec, files, reset, stop. Imports docker only when it is used."""

from quintain.sandbox.base import (
    BackgroundLoopError,
    ExecResult,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxTimeout,
    SandboxUnavailable,
)
from quintain.sandbox.blocking import BlockingSandbox
from quintain.sandbox.pool import SandboxPool
from quintain.sandbox.selection import open_pool

__all__ = [
    "BackgroundLoopError",
    "BlockingSandbox",
    "ExecResult",
    "Sandbox",
    "SandboxDied",
    "SandboxError",
    "SandboxPool",
    "SandboxTimeout",
    "SandboxUnavailable",
    "open_pool",
]
