"""Rewards: named, weighted functions of a finished trajectory.

    total = sum over rewards of weight * value        (weight 0 = a metric: recorded, not added)

A reward that raises, or gives anything but a finite number, is a `VerifierError`: the trajectory then has no reward and
leaves the loss. It is never counted as 0, which would teach the policy that its answer was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar, overload

import numpy as np

from quintain.envs.errors import VerifierError
from quintain.sandbox import SandboxError

F = TypeVar("F", bound=Callable[..., Any])
_WEIGHT = "__quintain_reward_weight__"


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method `(self) -> float` as a reward, as `@reward` or `@reward(weight=0.5)`; its name is the term's name.

    It is called once, when the trajectory has ended. Raises ValueError for a weight that is not a finite number.
    """
    if not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ValueError(f"reward weight {weight!r} is not a finite number")

    def mark(marked: F) -> F:
        setattr(marked, _WEIGHT, float(weight))
        return marked

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward of an environment class, not yet bound to an instance."""

    name: str
    weight: float
    """0 = metric."""
    function: Callable[..., Any]


def rewards_of(cls: type) -> tuple[Reward, ...]:
    """The marked methods of an environment class, in the order written."""
    found: dict[str, Reward] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            weight = getattr(value, _WEIGHT, None)
            if weight is None:
                found.pop(name, None)
            else:
                found[name] = Reward(name=name, weight=weight, function=value)
    return tuple(found.values())


def evaluate_reward(item: Reward, owner: object) -> float:
    """The unweighted value. Raises VerifierError; SandboxError passes through, since then our machinery broke."""
    try:
        value = item.function(owner)
    except (SandboxError, VerifierError):
        raise
    except Exception as error:  # user code: whatever it raises must never become a reward
        raise VerifierError(f"reward `{item.name}` raised {type(error).__name__}: {error}") from error
    if not isinstance(value, (Real, np.bool_)) or not math.isfinite(value):
        raise VerifierError(f"reward `{item.name}` gave {value!r} ({type(value).__name__}); give a finite number")
    return float(value)
