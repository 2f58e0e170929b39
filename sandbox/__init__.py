"""Boxes that tools run in: start, exec, files, reset, stop. Names are loaded when first used.

The config tree imports this package for its `config` module: a typo in a recipe must not pay for event loops and pools.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_ELSEWHERE = {"BlockingSandbox": "blocking", "SandboxPool": "pool", "open_pool": "selection"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'base')}"), name)
