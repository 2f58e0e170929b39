"""Parameters that are filled by their annotation and not shown to the model: the box, the trajectory's state, its task.

    def look(self, place: str, box: BlockingSandbox, state: TrajectoryState) -> str        the model is told of `place`

A coroutine gets the box as `Sandbox`, whose calls it awaits; a plain function as `BlockingSandbox`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from quintain.envs.errors import EnvironmentDefinitionError
from quintain.envs.message import Task
from quintain.envs.schema import typed_parameters
from quintain.envs.trajectory_state import TrajectoryState
from quintain.sandbox import BlockingSandbox, Sandbox

Source = Literal["box", "state", "task"]


def injected_parameters(function: Callable[..., Any], *, what: str) -> dict[str, Source]:
    """Which parameters get what. `what` the function is, for errors.

    Raises EnvironmentDefinitionError for the wrong kind of box, two boxes, and as `typed_parameters`.
    """
    where = f"{what} `{function.__qualname__}`"
    is_async = inspect.iscoroutinefunction(function)
    found: dict[str, Source] = {}
    for name, _, annotation in typed_parameters(function, what=what):
        if annotation in (BlockingSandbox, Sandbox):
            if (annotation is Sandbox) != is_async:
                right, reason = (
                    ("Sandbox", "await its calls") if is_async else ("BlockingSandbox", "it is a plain `def`")
                )
                raise EnvironmentDefinitionError(f"{where}: annotate `{name}` with `{right}`: {reason}")
            found[name] = "box"
        elif isinstance(annotation, type) and issubclass(annotation, TrajectoryState):
            found[name] = "state"
        elif annotation is Task:
            found[name] = "task"
    boxes = [name for name, source in found.items() if source == "box"]
    if len(boxes) > 1:
        raise EnvironmentDefinitionError(f"{where} takes {len(boxes)} boxes; there is only one")
    return found


def injected_values(
    injected: Mapping[str, Source], owner: Any, box: BlockingSandbox | None, *, is_async: bool
) -> dict[str, Any]:
    """The arguments to fill in; `owner` is the environment."""
    values: dict[str, Any] = {}
    for name, source in injected.items():
        if source == "box":
            assert box is not None
            values[name] = box.inner if is_async else box
        else:
            values[name] = owner.state if source == "state" else owner.task
    return values
