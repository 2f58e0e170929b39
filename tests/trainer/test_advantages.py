"""Group-relative advantages: values, groups without a signal, members without a reward."""

from __future__ import annotations

import math
import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from trainer_data import group_of, make_group, make_trajectory

from quintain.agents.outcome import Outcome
from quintain.trainer.advantages import (
    dr_grpo_advantages,
    group_advantages,
    grpo_advantages,
    is_informative,
    pass_at_k_advantages,
    rloo_advantages,
)
from quintain.trainer.batch import samples_from_groups
from quintain.trainer.config import AlgorithmConfig

ESTIMATORS = [grpo_advantages, dr_grpo_advantages, rloo_advantages]
rewards_lists = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("estimate", "group_a", "group_b"),
    [(grpo_advantages, 0.707106, 0.707103), (dr_grpo_advantages, 0.5, 0.125), (rloo_advantages, 1.0, 0.25)],
)
def test_advantages_agree_with_independent_implementations(estimate, group_a: float, group_b: float) -> None:
    """Values on which two public packages agree, eps 1e-6, std with ddof = 1."""
    assert estimate([1.0, 0.0]) == pytest.approx([group_a, -group_a], abs=1e-6)
    assert estimate([0.5, 0.25]) == pytest.approx([group_b, -group_b], abs=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1 / 3])
def test_equal_rewards_give_exactly_zero(estimate, reward: float) -> None:
    """C08"""
    for size in range(2, 17):
        assert estimate([reward] * size) == [0.0] * size


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("reward", [1e150, 1e200, -1e200, 1.7e308])
def test_huge_finite_rewards_do_not_end_the_run(estimate, reward: float) -> None:
    advantages = estimate([reward, 0.0, 0.0, reward])
    assert all(math.isfinite(a) for a in advantages) and abs(math.fsum(advantages)) <= 1e-15 * abs(reward)
    assert (advantages[0] > advantages[1]) == (reward > 0)
    assert estimate([reward] * 4) == [0.0] * 4


def test_scaling_huge_rewards_keeps_the_advantages_of_the_same_rewards_of_ordinary_size() -> None:
    assert grpo_advantages([2.0**600, 0.0, 2.0**599]) == pytest.approx(grpo_advantages([1.0, 0.0, 0.5], eps=1e-300))


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_group_of_one_gives_zero(estimate) -> None:
    """C07"""
    assert estimate([1.0]) == [0.0]
    assert estimate([]) == []


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "pass_at_k"])
def test_a_group_that_lost_members_down_to_one_gives_zero_and_leaves_the_loss(kind) -> None:
    """C07, C15"""
    groups = [group_of([1.0, None, None]), group_of([1.0, 0.0], draw=1)]
    config = AlgorithmConfig(advantage=kind)
    advantages_P_G = group_advantages(groups, config)
    assert advantages_P_G[0][0] == 0.0
    assert {s.draw for s in samples_from_groups(groups, advantages_P_G, config)} == {1}


def test_members_without_a_reward_leave_mean_and_std_and_get_nan() -> None:
    """C15"""
    with_failure = group_advantages([group_of([1.0, None, 1.0, 0.0])], AlgorithmConfig())[0]
    without = group_advantages([group_of([1.0, 1.0, 0.0])], AlgorithmConfig())[0]
    assert math.isnan(with_failure[1])
    assert [a for a in with_failure if not math.isnan(a)] == without
    two_valid = group_advantages([group_of([1.0, 1.0, None])], AlgorithmConfig())[0]
    assert two_valid[:2] == [0.0, 0.0]


def test_cancelled_members_leave_the_baseline_too() -> None:
    group = make_group(
        make_trajectory(1.0, member=0),
        make_trajectory(0.0, member=1),
        make_trajectory(0.0, member=2, outcome=Outcome.CANCELLED),
    )
    advantages = group_advantages([group], AlgorithmConfig(advantage="dr_grpo"))[0]
    assert advantages[:2] == [0.5, -0.5] and math.isnan(advantages[2])


def test_baseline_is_taken_over_one_task_draw_in_whatever_order_groups_come() -> None:
    """C14"""
    groups = [group_of([1.0, 0.0, 0.0, 1.0], draw=0), group_of([1.0, 1.0, 1.0, 0.0], draw=1)]
    config = AlgorithmConfig(advantage="dr_grpo")
    advantages_P_G = group_advantages(groups, config)
    assert advantages_P_G == [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75]]
    assert group_advantages(groups[::-1], config) == advantages_P_G[::-1]


def test_a_trajectory_of_several_rows_counts_once_in_the_baseline() -> None:
    """C13"""
    group = make_group(make_trajectory(1.0, member=0, num_rows=5), make_trajectory(0.0, member=1))
    config = AlgorithmConfig(advantage="dr_grpo")
    advantages_P_G = group_advantages([group], config)
    assert advantages_P_G == [[0.5, -0.5]]
    samples = samples_from_groups([group], advantages_P_G, config)
    assert [(s.member, s.advantages[-1]) for s in samples] == [(0, 0.5)] * 5 + [(1, -0.5)]


def test_truncation_can_be_penalised_with_a_reward_of_its_own() -> None:
    group = make_group(make_trajectory(1.0, outcome=Outcome.TRUNCATED), make_trajectory(1.0, member=1))
    assert group_advantages([group], AlgorithmConfig(advantage="dr_grpo")) == [[0.0, 0.0]]
    config = AlgorithmConfig(advantage="dr_grpo", truncated="penalise", truncated_reward=-1.0)
    assert group_advantages([group], config) == [[-1.0, 1.0]]


def test_a_trainable_trajectory_without_a_finite_reward_is_refused_by_name() -> None:
    group = make_group(make_trajectory(math.inf, draw=7, member=1), make_trajectory(1.0, draw=7), draw=7)
    with pytest.raises(ValueError, match=r"trajectory 7/1 ended as 'completed' with reward inf"):
        group_advantages([group], AlgorithmConfig())


@given(rewards_lists)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    """C14"""
    for estimate in ESTIMATORS:
        advantages = estimate(rewards)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
        best = max(range(len(rewards)), key=rewards.__getitem__)
        assert advantages[best] >= max(advantages) - 1e-6


def all_of(advantages_P_G: list[list[float]]) -> list[float]:
    return [a for advantages_G in advantages_P_G for a in advantages_G]


def test_reinforce_pp_is_normalised_over_the_batch() -> None:
    groups = [group_of([1.0, 0.0]), group_of([0.5, 0.25], draw=1)]
    found = all_of(group_advantages(groups, AlgorithmConfig(advantage="reinforce_pp")))
    rewards = [1.0, 0.0, 0.5, 0.25]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert found == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards])


def test_reinforce_pp_with_baseline_takes_the_groups_mean_off_first() -> None:
    groups = [group_of([1.0, 0.0, None]), group_of([0.5, 0.25], draw=1), group_of([9.0, None], draw=2)]
    found = group_advantages(groups, AlgorithmConfig(advantage="reinforce_pp_baseline"))
    centred = [0.5, -0.5, 0.125, -0.125]  # the group of one valid member is in neither mean nor deviation (C07, C15)
    std = statistics.stdev(centred)
    assert found[0][:2] + found[1] == pytest.approx([a / (std + 1e-6) for a in centred])
    assert math.isnan(found[0][2]) and found[2][0] == 0.0


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_of_equal_rewards_gives_exactly_zero(kind) -> None:
    """C08"""
    groups = [group_of([0.7] * 4, draw=draw) for draw in range(3)]
    assert all_of(group_advantages(groups, AlgorithmConfig(advantage=kind))) == [0.0] * 12


def test_reinforce_pp_learns_from_groups_of_one() -> None:
    config = AlgorithmConfig(advantage="reinforce_pp", group_size=1)
    groups = [group_of([1.0]), group_of([0.0], draw=1)]
    advantages_P_G = group_advantages(groups, config)
    assert advantages_P_G[0][0] > 0 > advantages_P_G[1][0]
    assert len(samples_from_groups(groups, advantages_P_G, config)) == 2


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_sets_of_k_tries_that_a_try_is_in(successes: list[float], k: int) -> None:
    """Compared with going through all subsets: reward of a set = whether any try in it succeeded."""
    k = min(k, len(successes))
    sets = [(members, max(successes[i] for i in members)) for members in combinations(range(len(successes)), k)]
    p = statistics.fmean(reward for _, reward in sets)
    found = pass_at_k_advantages(successes, k)
    if p in (0.0, 1.0):
        assert found == [0.0] * len(successes)
        return
    std = math.sqrt(p * (1 - p))
    for i, advantage in enumerate(found):
        mine = [reward for members, reward in sets if i in members]
        assert advantage == pytest.approx((statistics.fmean(mine) - p) / std, abs=1e-9)


def test_pass_at_k_counts_successes_whatever_the_reward() -> None:
    members = [make_trajectory(r, member=m, success=s) for m, (r, s) in enumerate([(0.3, True), (0.9, False)])]
    found = group_advantages([make_group(*members)], AlgorithmConfig(advantage="pass_at_k", pass_k=1, group_size=2))
    assert found[0] == pytest.approx([1.0, -1.0])


def test_penalties_are_taken_off_the_reward_before_the_baseline() -> None:
    config = AlgorithmConfig(advantage="dr_grpo")
    assert group_advantages([group_of([1.0, 1.0], draw=4)], config, {(4, 1): 0.5}) == [[0.25, -0.25]]


def test_a_group_is_informative_where_its_valid_members_differ() -> None:
    config = AlgorithmConfig()
    assert is_informative(group_of([1.0, 0.0, None]), config)
    assert not is_informative(group_of([1.0, 1.0, None]), config)
    assert not is_informative(group_of([1.0, None, None]), config)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"advantage": "pass_at_k", "pass_k": 9}, "at most group_size"),
        ({"advantage": "gae", "dynamic_sampling": True}, "dynamic_sampling = false"),
        ({"credit": "turn"}, "credit = token"),
        ({"kl_in": "reward"}, "set kl_coef"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_remedy(settings, remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        AlgorithmConfig(**settings)
