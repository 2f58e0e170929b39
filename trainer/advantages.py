"""Group-relative advantages: how much better a trajectory did than the others of its own task draw.

Flow: ``Group -> effective rewards of the valid members -> one advantage a trajectory``. `samples_from_groups` then
gives every trained token of the trajectory that one number.

Invariants: the group key is the task draw, never the batch or the row; a trajectory counts once however many token rows
it has; members without a reward leave mean and standard deviation and get NaN; equal rewards give exactly 0.

Does not do: value functions, GAE, normalising over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quintain.agents.outcome import Outcome
from quintain.agents.trajectory import Group, Trajectory
from quintain.trainer.config import AlgorithmConfig

MIN_VALID_MEMBERS = 2
"""A baseline of a group's own members needs two of them; below that the group teaches nothing."""
LARGEST_PLAIN_EXPONENT = 400
"""Squares of rewards below 2**400, and sums of many, are far from the largest float, 2**1024."""


def has_no_spread(rewards: Sequence[float]) -> bool:
    """True where no member can be better than another: fewer than two rewards, or all of them the same float.

    Decided by comparison before any arithmetic: the mean of twelve 0.7 is not 0.7 in floating point, and the rounding
    error divided by an equally small standard deviation would look like a signal.
    """
    return len(rewards) < MIN_VALID_MEMBERS or max(rewards) == min(rewards)


def scaled_down(rewards: Sequence[float]) -> tuple[list[float], float]:
    """Rewards divided by a scale, and the scale: 1 up to 2**400, so that ordinary rewards keep every bit.

    Beyond, sums and squares would overflow; a power of two divides without rounding.
    """
    exponent = math.frexp(max(map(abs, rewards), default=0.0))[1]
    scale = 2.0 ** (exponent - 1) if exponent > LARGEST_PLAIN_EXPONENT else 1.0
    return [reward / scale for reward in rewards], scale


def grpo_advantages(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` (GRPO, arXiv 2402.03300).

    `r` = rewards, `mean` divides by n, `std` is the sample standard deviation (divides by n - 1), n = len(rewards).
    """
    if has_no_spread(rewards):
        return [0.0] * len(rewards)
    rewards, scale = scaled_down(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
    return [(r - mean) / (math.sqrt(variance) + eps / scale) for r in rewards]


def dr_grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = r_i - mean(r)``, mean over n: no division by the spread (Dr. GRPO, arXiv 2503.20783)."""
    if has_no_spread(rewards):
        return [0.0] * len(rewards)
    rewards, scale = scaled_down(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean) * scale for r in rewards]


def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = r_i - sum(r_j for j != i) / (n - 1)``, the baseline being the others (RLOO, arXiv 2402.14740)."""
    if has_no_spread(rewards):
        return [0.0] * len(rewards)
    rewards, scale = scaled_down(rewards)
    total = math.fsum(rewards)
    return [(r - (total - r) / (len(rewards) - 1)) * scale for r in rewards]


def effective_reward(trajectory: Trajectory, config: AlgorithmConfig) -> float:
    """The reward that enters the baseline: the trajectory's own, or `truncated_reward` where truncation is penalised.

    Raises:
        ValueError: a trajectory that claims to be trainable has no finite reward.
    """
    if trajectory.outcome is Outcome.TRUNCATED and config.truncated == "penalise":
        return config.truncated_reward
    if not math.isfinite(trajectory.reward):
        raise ValueError(
            f"trajectory {trajectory.draw}/{trajectory.member} ended as {trajectory.outcome.value!r} with reward "
            f"{trajectory.reward}; a trajectory whose reward could not be computed must end as 'verifier'"
        )
    return trajectory.reward


def group_advantages(groups: Sequence[Group], config: AlgorithmConfig) -> list[list[float]]:
    """One advantage a trajectory, `[P][G]` in the order given; NaN for members that have no reward.

    A group with fewer than two valid members gets 0 for those it has; `samples_from_groups` leaves such a group out.

    Raises:
        ValueError: a trainable trajectory has a non-finite reward.
    """
    return [_advantages_of(group, config) for group in groups]


def _advantages_of(group: Group, config: AlgorithmConfig) -> list[float]:
    rewards = [effective_reward(t, config) for t in group.valid]
    if config.advantage == "grpo":
        advantages = grpo_advantages(rewards, config.advantage_eps)
    elif config.advantage == "dr_grpo":
        advantages = dr_grpo_advantages(rewards)
    else:
        advantages = rloo_advantages(rewards)
    remaining = iter(advantages)
    return [next(remaining) if t.outcome.is_trainable else math.nan for t in group.trajectories]
