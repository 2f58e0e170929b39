"""Advantages of trajectories: how much better one did than the others of its own task draw, or of the batch.

Flow: ``Group -> effective rewards of the valid members -> one advantage a trajectory``. `samples_from_groups` then
gives every trained token of the trajectory that one number.

Invariants: the group key is the task draw, never the batch or the row; a trajectory counts once however many token rows
it has; members without a reward leave mean and standard deviation and get NaN; equal rewards give exactly 0.

Does not do: credit within a trajectory (`trainer/gae.py`, `trainer/credit.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

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


def pass_at_k_advantages(successes: Sequence[float], k: int) -> list[float]:
    """Advantage of a try for the success of *some* try among k drawn from the group (arXiv 2508.10751), exactly.

    With n tries, of which f failed, and C(a, b) = ways to choose: ``p = 1 - C(f, k) / C(n, k)`` is the success of k
    tries, ``s = sqrt(p (1 - p))`` its deviation, and ``A_success = (1 - p) / s``,
    ``A_failure = (1 - p - C(f - 1, k - 1) / C(n - 1, k - 1)) / s``. 0 where p is 0 or 1.

    `successes`: 1.0 or 0.0 each. Where failed members left fewer than k tries, k is their number.
    """
    n, num_failed = len(successes), sum(not s for s in successes)
    k = min(k, n)
    if has_no_spread(successes):
        return [0.0] * n
    no_success = math.comb(num_failed, k) / math.comb(n, k)
    deviation = math.sqrt(no_success * (1 - no_success))
    if deviation == 0:
        return [0.0] * n
    others_fail = math.comb(num_failed - 1, k - 1) / math.comb(n - 1, k - 1)
    return [(no_success if s else no_success - others_fail) / deviation for s in successes]


GROUP_ESTIMATORS: dict[str, Callable[[Sequence[float], AlgorithmConfig], list[float]]] = {
    "grpo": lambda rewards, config: grpo_advantages(rewards, config.advantage_eps),
    "dr_grpo": lambda rewards, _: dr_grpo_advantages(rewards),
    "rloo": lambda rewards, _: rloo_advantages(rewards),
    "reinforce_pp": lambda rewards, _: list(rewards),
    "reinforce_pp_baseline": lambda rewards, _: dr_grpo_advantages(rewards),
    "pass_at_k": lambda successes, config: pass_at_k_advantages(successes, config.pass_k),
}
"""By `algorithm.advantage`: the rewards of one group's valid members to as many advantages."""
BATCH_NORMALISED = ("reinforce_pp", "reinforce_pp_baseline")
"""REINFORCE++ (arXiv 2501.03262): what the group gave is normalised over all valid trajectories of the batch."""


def effective_reward(trajectory: Trajectory, config: AlgorithmConfig) -> float:
    """The reward that enters the baseline: the trajectory's own, or `truncated_reward` where truncation is penalised.

    With `pass_at_k` it is 1 for a success and 0 otherwise.

    Raises:
        ValueError: a trajectory that claims to be trainable has no finite reward.
    """
    is_penalised = trajectory.outcome is Outcome.TRUNCATED and config.truncated == "penalise"
    if is_penalised and config.advantage != "pass_at_k":
        return config.truncated_reward
    if not math.isfinite(trajectory.reward):
        raise ValueError(
            f"trajectory {trajectory.draw}/{trajectory.member} ended as {trajectory.outcome.value!r} with reward "
            f"{trajectory.reward}; a trajectory whose reward could not be computed must end as 'verifier'"
        )
    return float(trajectory.success) if config.advantage == "pass_at_k" else trajectory.reward


def is_informative(group: Group, config: AlgorithmConfig) -> bool:
    """Whether its members differ, so that a baseline over them teaches something (dynamic sampling keeps these)."""
    return not has_no_spread([effective_reward(t, config) for t in group.valid])


def group_advantages(
    groups: Sequence[Group], config: AlgorithmConfig, penalties: Mapping[tuple[int, int], float] | None = None
) -> list[list[float]]:
    """One advantage a trajectory, `[P][G]` in the order given; NaN for members that have no reward.

    A group with fewer than two valid members gets 0 for those it has (where the estimator needs two);
    `samples_from_groups` leaves such a group out.

    Args:
        penalties: taken off the reward of trajectory (draw, member); 0 for those that are not in it.

    Raises:
        ValueError: a trainable trajectory has a non-finite reward, or `config.advantage` is of turns or tokens.
    """
    if config.advantage not in GROUP_ESTIMATORS:
        raise ValueError(f"algorithm.advantage = {config.advantage} gives credit within a trajectory, not one number")
    estimate, penalties = GROUP_ESTIMATORS[config.advantage], penalties or {}
    estimated = [
        estimate([effective_reward(t, config) - penalties.get((t.draw, t.member), 0.0) for t in group.valid], config)
        for group in groups
    ]
    if config.advantage in BATCH_NORMALISED:
        usable = [len(group.valid) >= config.min_valid_members for group in groups]
        normalised = iter(
            grpo_advantages(
                [a for advantages, used in zip(estimated, usable, strict=True) if used for a in advantages],
                config.advantage_eps,
            )
        )
        estimated = [
            [next(normalised) if used else 0.0 for _ in advantages]
            for advantages, used in zip(estimated, usable, strict=True)
        ]
    return [_with_nan(group, advantages) for group, advantages in zip(groups, estimated, strict=True)]


def _with_nan(group: Group, advantages: Sequence[float]) -> list[float]:
    remaining = iter(advantages)
    return [next(remaining) if t.outcome.is_trainable else math.nan for t in group.trajectories]
