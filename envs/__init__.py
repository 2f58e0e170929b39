"""Environments: tasks, tools, rewards, and the Gymnasium classes that join them.

Names are loaded when first used, because the config tree imports this package and must stay light. Importing it tells
Gymnasium of our environments at once where Gymnasium is loaded already, else when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quintain.envs.errors import NoTasksError, ToolError, UnknownEnvironmentError, VerifierError
    from quintain.envs.message import Message, Task, ToolCall, ToolSpec
    from quintain.envs.registry import env_class, make_env, registered_environments
    from quintain.envs.rewards import reward
    from quintain.envs.tool_env import ToolEnv
    from quintain.envs.tools import tool
    from quintain.envs.trajectory_state import TrajectoryState

__all__ = [
    "Message",
    "NoTasksError",
    "Task",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolSpec",
    "TrajectoryState",
    "UnknownEnvironmentError",
    "VerifierError",
    "env_class",
    "make_env",
    "registered_environments",
    "reward",
    "tool",
]

_MODULES = {
    "errors": ("NoTasksError", "ToolError", "UnknownEnvironmentError", "VerifierError"),
    "message": ("Message", "Task", "ToolCall", "ToolSpec"),
    "registry": ("env_class", "make_env", "registered_environments"),
    "rewards": ("reward",),
    "tool_env": ("ToolEnv",),
    "tools": ("tool",),
    "trajectory_state": ("TrajectoryState",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    _register_if_loaded()
    return value


def _register_if_loaded() -> None:
    if "gymnasium" in sys.modules:
        importlib.import_module(f"{__name__}.registry").register_environments()


_register_if_loaded()
