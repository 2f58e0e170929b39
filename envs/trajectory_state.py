"""What belongs to one trajectory, and how it is forgotten.

`TrajectoryState` is the empty object that tools, rewards and `prepare` share. `Restorer` sees to it that nothing of a
trajectory is left on an environment instance when the next begins.

At the first `restore` the subclass's own attributes are noted, lists, dicts and sets with a shallow copy. Every later
`restore` puts them back and drops attributes that were added since. Class attributes of those three types are copied
onto the instance at construction, so that no two instances share one. What lies deeper (a list in a list) is not
followed: such state belongs into `prepare`.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

_COPIED = (list, dict, set)


class TrajectoryState(SimpleNamespace):
    """What one trajectory keeps: any attributes. Derive a class from it to write them down with their types, and name
    it as the environment's `state_class`; its fields need defaults.
    """


class Restorer:
    """Restores the attributes of one instance; those that exist when this is made (the base class's) are left alone."""

    def __init__(self, instance: Any, *, base: type) -> None:
        self._instance = instance
        # `spec` and the random generator are set from outside or by reset(seed) and outlive trajectories.
        self._kept = set(vars(instance)) | {"_restorer", "spec", "_np_random", "_np_random_seed"}
        self._kept |= {name for name in vars(base) if not name.startswith("__")}
        self._noted: dict[str, Any] | None = None
        for cls in reversed(type(instance).__mro__):
            if issubclass(cls, base) and cls is not base:
                for name, value in vars(cls).items():
                    if type(value) in _COPIED and not name.startswith("__") and name not in self._kept:
                        setattr(instance, name, copy.copy(value))

    def restore(self) -> None:
        """Put the subclass's attributes back to what they were before the first trajectory; `state` becomes empty."""
        attributes = vars(self._instance)
        if self._noted is None:
            self._noted = {name: _copied(value) for name, value in attributes.items() if name not in self._kept}
        for name in [name for name in attributes if name not in self._kept and name not in self._noted]:
            del attributes[name]
        attributes.update({name: _copied(value) for name, value in self._noted.items()})
        attributes["state"] = self._instance.state_class()


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in _COPIED else value
