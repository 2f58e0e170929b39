"""Credit within a trajectory as functions of numbers: GAE, whitening, returns of turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from objective_data import MASK_BT, VALUES_BT

from quintain.trainer.gae import gae, returns, turn_advantages, whitened

REWARDS_B = [1.0, 0.0, 0.5, 0.25]
numbers = st.floats(-5, 5, allow_nan=False)


def rows() -> list[tuple[list[float], list[float]]]:
    """Advantages and returns of the reference input, trained tokens only, the reward on the last of them."""
    found = []
    for mask_T, values_T, reward in zip(MASK_BT, VALUES_BT, REWARDS_B, strict=True):
        values = values_T[mask_T].tolist()
        rewards = [0.0] * (len(values) - 1) + [reward]
        found.append(gae(rewards, values, discount=0.99, lam=0.95))
    return found


def test_returns_agree_with_independent_implementations() -> None:
    """Tool tokens are skipped: over all tokens the first return would be 0.730667."""
    (_, found), *_ = rows()
    assert found == pytest.approx([0.832784, 0.882625, 0.941904, 1.0], abs=1e-6)


def test_whitened_advantages_agree_with_independent_implementations() -> None:
    found = whitened([a for advantages, _ in rows() for a in advantages])
    assert found[:2] == pytest.approx([0.941039, 1.193594], abs=1e-6)
    assert found[3] == pytest.approx(1.570637, abs=1e-6)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.floats(0.5, 1))
def test_lambda_one_is_the_return_minus_the_value_and_lambda_zero_the_next_step(pairs, discount: float) -> None:
    rewards, values = [r for r, _ in pairs], [v for _, v in pairs]
    advantages, targets = gae(rewards, values, discount=discount, lam=1.0)
    assert targets == pytest.approx(returns(rewards, discount=discount), abs=1e-9)
    assert advantages == pytest.approx([t - v for t, v in zip(targets, values, strict=True)], abs=1e-9)
    _, one_step = gae(rewards, values, discount=discount, lam=0.0)
    following = [*values[1:], 0.0]
    assert one_step == pytest.approx([r + discount * v for r, v in zip(rewards, following, strict=True)], abs=1e-9)


def test_whitening_without_spread_is_zero() -> None:
    assert whitened([0.3] * 5) == [0.0] * 5 and whitened([2.0]) == [0.0] and whitened([]) == []


@given(st.lists(numbers, min_size=2, max_size=20))
def test_whitened_values_have_mean_zero_and_deviation_at_most_one(values: list[float]) -> None:
    found = whitened(values)
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)
    assert math.fsum(x * x for x in found) <= (len(values) - 1) * (1 + 1e-6)


def test_a_turn_is_compared_with_the_same_turn_of_those_who_reached_it() -> None:
    advantages = turn_advantages([[0.0, 1.0], [0.5], [0.0, 0.0, 2.0]], discount=1.0)
    assert advantages[0] == pytest.approx([1.0 - 3.5 / 3, 1.0 - 1.5])
    assert advantages[1] == pytest.approx([0.5 - 3.5 / 3])
    assert advantages[2] == pytest.approx([2.0 - 3.5 / 3, 2.0 - 1.5, 0.0])  # nobody else reached turn 2


def test_discount_counts_turns_and_equal_returns_give_exactly_zero() -> None:
    """C08"""
    assert returns([0.0, 0.0, 1.0], discount=0.5) == [0.25, 0.5, 1.0]
    assert turn_advantages([[0.7, 0.1]] * 12, discount=0.9) == [[0.0, 0.0]] * 12


@given(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=2, max_size=5))
def test_advantages_of_a_turn_sum_to_zero_over_the_group(rewards_G_N: list[list[float]]) -> None:
    """C14"""
    advantages = turn_advantages(rewards_G_N, discount=0.9)
    for turn in range(4):
        assert math.fsum(a[turn] for a in advantages if len(a) > turn) == pytest.approx(0, abs=1e-9)
