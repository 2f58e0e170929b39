"""Evaluation: one trajectory for each held-out task, greedy or sampled, with streams that training never uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quintain.agents.scheduler import Draw, RolloutRunner
from quintain.agents.trajectory import Group, Trajectory
from quintain.envs import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """How well the policy does.

    Example: ``EvalResult(success_frac=0.75, reward_mean=0.8, num_tasks=256, num_failed=0, groups=(...))``
    """

    success_frac: float
    """Solved tasks among those that have a reward, 0 to 1; NaN where none has."""
    reward_mean: float
    """Over the same tasks."""
    num_tasks: int
    num_failed: int
    """Tasks without a reward (environment, infrastructure or verifier failures, all attempts used up)."""
    groups: tuple[Group, ...]  # one a task, of one member


def evaluate(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    *,
    greedy: bool,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> EvalResult:
    """Try each task once: greedy, or sampled at the config's temperature. Equal weights and seed give equal results.

    Raises as `RolloutRunner.collect`.
    """
    draws = [Draw(number=number, task=task) for number, task in enumerate(tasks)]
    groups = runner.collect(
        draws,
        group_size=1,
        temperature=0.0 if greedy else None,
        purpose="eval-greedy" if greedy else "eval-sampled",
        on_trajectory=on_trajectory,
    )
    valid = [trajectory for group in groups for trajectory in group.valid]
    return EvalResult(
        success_frac=sum(t.success for t in valid) / len(valid) if valid else math.nan,
        reward_mean=math.fsum(t.reward for t in valid) / len(valid) if valid else math.nan,
        num_tasks=len(draws),
        num_failed=len(draws) - len(valid),
        groups=tuple(groups),
    )
