"""Credit within a trajectory: generalised advantage estimation, returns of turns, whitening. Pure functions.

Tool tokens don't exist here: sequences are of *trained* tokens (or turns), so the next value and the next advantage are
those of the next trained token. Nothing comes after the last one (its next value is 0), also where a limit ended it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WHITEN_EPS = 1e-8
"""Added to the variance."""


def gae(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, lam: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of one trajectory's actions (arXiv 1506.02438).

    ``delta_t = r_t + discount * V_{t+1} - V_t``, ``A_t = delta_t + discount * lam * A_{t+1}``, ``R_t = A_t + V_t``.
    """
    advantages = [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + discount * next_value - values[t]
        next_advantage = advantages[t] = delta + discount * lam * next_advantage
        next_value = values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whitened(values: Sequence[float]) -> list[float]:
    """``(x - mean) / sqrt(var + eps)``, mean over n, var (ddof = 1) over n - 1 of all the values; 0 without spread."""
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
    return [(x - mean) / math.sqrt(variance + WHITEN_EPS) for x in values]


def turn_advantages(rewards_G_N: Sequence[Sequence[float]], *, discount: float) -> list[list[float]]:
    """``A_{i,n} = G_{i,n} - mean_j G_{j,n}`` with the return ``G_{i,n} = sum_{k >= n} discount^(k-n) r_{i,k}``.

    The mean divides by the members j that reached turn n; a turn that fewer than two reached gets 0, as do turns whose
    returns are all equal.
    """
    returns_G_N = [returns(rewards, discount=discount) for rewards in rewards_G_N]
    advantages = [[0.0] * len(rewards) for rewards in rewards_G_N]
    for turn in range(max(map(len, rewards_G_N), default=0)):
        reached = [i for i, rewards in enumerate(rewards_G_N) if len(rewards) > turn]
        at_turn = [returns_G_N[i][turn] for i in reached]
        if len(at_turn) < 2 or max(at_turn) == min(at_turn):
            continue
        mean = math.fsum(at_turn) / len(at_turn)
        for i, value in zip(reached, at_turn, strict=True):
            advantages[i][turn] = value - mean
    return advantages


def returns(rewards: Sequence[float], *, discount: float) -> list[float]:
    """``G_n = r_n + discount * G_{n+1}``."""
    values, following = [0.0] * len(rewards), 0.0
    for n in reversed(range(len(rewards))):
        values[n] = following = rewards[n] + discount * following
    return values
