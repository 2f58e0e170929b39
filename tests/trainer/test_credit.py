"""From groups to tokens: turns, GAE by token and turn, KL in the reward, groups that dynamic sampling leaves out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from trainer_data import NAN, group_of, make_group, make_trajectory, turns_trajectory

from quintain.agents.outcome import Outcome
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.credit import credit, turn_rewards, turns_of_tokens
from quintain.trainer.gae import gae, whitened


def trained(sample: Any, numbers: Any) -> list[float]:
    return [x for x, m in zip(numbers, sample.loss_mask, strict=True) if m]


def no_values(samples):
    return [[0.0 if m else NAN for m in s.loss_mask] for s in samples]


def values_by_position(samples):
    return [[0.1 * t if m else NAN for t, m in enumerate(s.loss_mask)] for s in samples]


def test_tokens_know_their_turn_in_one_row_and_in_forked_rows() -> None:
    assert turns_of_tokens(turns_trajectory([0.0, 1.0])) == [[-1, -1, 0, 0, -1, -1, 1, 1]]
    forked = turns_trajectory([0.0, 1.0], forked=True)
    assert turns_of_tokens(forked) == [[-1, -1, 0, 0], [-1, -1, -1, -1, -1, -1, 1, 1]]


def test_rows_that_do_not_hold_the_turns_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="trajectory 3/1: its rows don't hold the tokens of its turns"):
        turns_of_tokens(make_trajectory(draw=3, member=1, num_rows=2))


def test_rewards_of_turns_add_up_to_the_effective_reward() -> None:
    trajectory = turns_trajectory([0.25, 0.5])
    assert turn_rewards(trajectory, AlgorithmConfig()) == [0.25, 0.5]
    assert turn_rewards(replace(trajectory, reward=1.0), AlgorithmConfig()) == [0.25, 0.75]
    penalised = AlgorithmConfig(truncated="penalise", truncated_reward=-1.0)
    assert sum(turn_rewards(replace(trajectory, outcome=Outcome.TRUNCATED), penalised)) == -1.0


@pytest.mark.parametrize("forked", [False, True])
def test_a_turn_has_one_advantage_for_all_its_tokens(forked: bool) -> None:
    """C13: a trajectory of several rows is one in the baseline."""
    group = make_group(turns_trajectory([1.0, 0.0], forked=forked), turns_trajectory([0.0, 1.0], member=1))
    given = credit([group], AlgorithmConfig(advantage="turn"))
    mine = [a for s in given.samples if s.member == 0 for a in trained(s, s.advantages)]
    other = [a for s in given.samples if s.member == 1 for a in trained(s, s.advantages)]
    assert mine == [0.0, 0.0, -0.5, -0.5] and other == [0.0, 0.0, 0.5, 0.5]
    assert given.advantages_P_G == [[-0.25, 0.25]]


def test_members_without_a_reward_are_in_no_turns_baseline() -> None:
    """C15"""
    failed = turns_trajectory([5.0, 5.0], member=2, outcome=Outcome.VERIFIER, reward=NAN)
    group = make_group(turns_trajectory([1.0]), turns_trajectory([0.0], member=1), failed)
    for kind in ("turn", "gae"):
        given = credit([group], AlgorithmConfig(advantage=kind), values=no_values)
        assert {s.member for s in given.samples} == {0, 1}
        assert math.isnan(given.advantages_P_G[0][2])
    assert credit([group], AlgorithmConfig(advantage="turn")).advantages_P_G[0][:2] == [0.5, -0.5]


def test_gae_by_token_skips_tool_tokens_and_pays_turns_at_their_last_token() -> None:
    group = make_group(turns_trajectory([0.25, 1.0]), turns_trajectory([0.0, 0.0], member=1))
    config = AlgorithmConfig(advantage="gae", discount=0.9, gae_lambda=0.8)
    given = credit([group], config, values=values_by_position)
    values = [0.1 * t for t in (2, 3, 6, 7)]
    first, first_returns = gae([0.0, 0.25, 0.0, 1.0], values, discount=0.9, lam=0.8)
    second, _ = gae([0.0] * 4, values, discount=0.9, lam=0.8)
    assert given.returns is not None
    assert trained(given.samples[0], given.returns[0]) == pytest.approx(first_returns)
    expected = whitened([*first, *second])
    assert trained(given.samples[0], given.samples[0].advantages) == pytest.approx(expected[:4])
    assert trained(given.samples[1], given.samples[1].advantages) == pytest.approx(expected[4:])


def test_gae_goes_on_from_row_to_row_of_a_forked_trajectory() -> None:
    one = make_group(turns_trajectory([0.25, 1.0]), turns_trajectory([0.0], member=1))
    forked = make_group(turns_trajectory([0.25, 1.0], forked=True), turns_trajectory([0.0], member=1))
    config = AlgorithmConfig(advantage="gae", discount=0.9)
    found = []
    for group in (one, forked):
        given = credit([group], config, values=no_values)
        assert given.returns is not None
        rows = zip(given.samples, given.returns, strict=True)
        found.append([r for s, returns in rows if s.member == 0 for r in trained(s, returns)])
    assert found[0] == found[1] == pytest.approx([0.9 * 0.25 + 0.9**3, 0.25 + 0.9**2, 0.9, 1.0])


def test_gae_by_turn_has_one_target_and_one_advantage_a_turn() -> None:
    group = make_group(turns_trajectory([0.0, 1.0]), turns_trajectory([0.0, 0.0], member=1))
    config = AlgorithmConfig(advantage="gae", credit="turn", discount=0.5)
    given = credit([group], config, values=no_values)
    assert given.returns is not None
    assert trained(given.samples[0], given.returns[0]) == pytest.approx([0.5, NAN, 1.0, NAN], nan_ok=True)
    first = trained(given.samples[0], given.samples[0].advantages)
    assert first[0] == first[1] < first[2] == first[3]


def test_masked_trajectories_stay_in_the_baseline_and_leave_the_samples() -> None:
    truncated = turns_trajectory([1.0], member=1, outcome=Outcome.TRUNCATED)
    group = make_group(turns_trajectory([0.0]), truncated)
    given = credit([group], AlgorithmConfig(advantage="turn", truncated="mask"))
    assert [s.member for s in given.samples] == [0] and trained(given.samples[0], given.samples[0].advantages)[
        0
    ] == -0.5
    assert given.advantages_P_G == [[-0.5, 0.0]]


def reference_at(logprob: float):
    return lambda samples: [[logprob if m else NAN for m in s.loss_mask] for s in samples]


def test_kl_in_the_reward_is_taken_off_the_trajectory_before_the_baseline() -> None:
    """k1 with the sampler's log-probs: 0.1 x (-0.5 - -0.75) x 4 tokens off the first, 0.1 x 0.25 x 2 off the second."""
    group = make_group(turns_trajectory([1.0, 0.0]), turns_trajectory([1.0], member=1))
    config = AlgorithmConfig(advantage="dr_grpo", kl_in="reward", kl_coef=0.1, kl_estimator="k1")
    given = credit([group], config, reference_logprobs=reference_at(-0.75))
    assert given.advantages_P_G[0] == pytest.approx([-0.025, 0.025])
    assert given.kl_penalty_mean == pytest.approx(0.075)


def test_kl_in_the_reward_counts_at_its_own_token_with_gae_and_at_its_turn() -> None:
    group = make_group(turns_trajectory([0.0, 1.0]), turns_trajectory([0.0, 0.0], member=1))
    settings: dict[str, Any] = {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}
    given = credit(
        [group], AlgorithmConfig(advantage="gae", **settings), values=no_values, reference_logprobs=reference_at(-0.75)
    )
    assert given.returns is not None
    assert trained(given.samples[0], given.returns[0]) == pytest.approx([0.9, 0.925, 0.95, 0.975])
    short = make_group(turns_trajectory([0.0, 1.0]), turns_trajectory([0.0, 0.0], member=1, tokens_per_turn=1))
    given = credit([short], AlgorithmConfig(advantage="turn", **settings), reference_logprobs=reference_at(-0.75))
    assert trained(given.samples[0], given.samples[0].advantages) == pytest.approx([0.475] * 2 + [0.4875] * 2)


def test_groups_without_spread_leave_the_batch_with_dynamic_sampling() -> None:
    groups = [group_of([1.0, 1.0]), group_of([1.0, 0.0], draw=1), group_of([0.5, None], draw=2)]
    config = AlgorithmConfig(advantage="dr_grpo", dynamic_sampling=True)
    given = credit(groups, config)
    assert {s.draw for s in given.samples} == {1}
    assert given.advantages_P_G[:2] == [[0.0, 0.0], [0.5, -0.5]]
    assert given.advantages_P_G[2][0] == 0.0 and math.isnan(given.advantages_P_G[2][1])
    kept = credit(groups, AlgorithmConfig(advantage="dr_grpo"))
    assert {s.draw for s in kept.samples} == {0, 1}


def test_filtered_groups_are_not_in_the_normalisation_of_a_batch() -> None:
    filtered = [group_of([1.0, 1.0]), group_of([1.0, 0.0], draw=1)]
    config = AlgorithmConfig(advantage="reinforce_pp_baseline", dynamic_sampling=True)
    assert credit(filtered, config).advantages_P_G[1] == credit(filtered[1:], config).advantages_P_G[0]


def test_nothing_to_learn_from_gives_no_samples() -> None:
    for kind in ("turn", "gae", "grpo"):
        given = credit([group_of([None, None])], AlgorithmConfig(advantage=kind), values=no_values)
        assert given.samples == [] and all(math.isnan(a) for a in given.advantages_P_G[0])
