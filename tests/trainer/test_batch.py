"""From groups to tensors: masks, the shift to next-token form, denominators, refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_data import NAN, group_of, make_group, make_sample, make_trajectory, mixed_samples

from quintain.agents.outcome import Outcome
from quintain.agents.trajectory import TokenRow
from quintain.trainer.advantages import group_advantages
from quintain.trainer.batch import (
    Batch,
    EmptyBatchError,
    make_batches,
    next_token_view,
    samples_from_groups,
    split_minibatches,
)
from quintain.trainer.config import AlgorithmConfig


def samples_of(*groups, config: AlgorithmConfig | None = None):
    config = config or AlgorithmConfig()
    return samples_from_groups(groups, group_advantages(groups, config), config)


def test_exactly_the_sampled_tokens_are_trained_with_their_own_ids_and_logprobs() -> None:
    samples = samples_of(group_of([1.0, 0.0], draw=5))
    first = samples[0]
    assert first.token_ids == (1, 2, 10, 11, 12)
    assert first.loss_mask == (False, False, True, True, True)
    assert first.rollout_logprobs[2:] == (-0.5, -0.5, -0.5) and math.isnan(first.rollout_logprobs[0])
    assert first.advantages[:2] == (0.0, 0.0) and first.advantages[2] == pytest.approx(0.7071, abs=1e-4)
    assert first.policy_versions == (-1, -1, 0, 0, 0)
    assert [(s.draw, s.member) for s in samples] == [(5, 0), (5, 1)]


def test_token_zero_is_never_trained_even_where_it_was_sampled() -> None:
    row = TokenRow(token_ids=(4, 5), sampled=(True, True), logprobs=(-1.0, -1.0), policy_versions=(0, 0))
    group = make_group(replace(make_trajectory(1.0), rows=(row,)), replace(make_trajectory(0.0, member=1), rows=(row,)))
    assert [s.loss_mask for s in samples_of(group)] == [(False, True)] * 2


def test_failed_members_give_no_sample() -> None:
    """C15"""
    assert [s.member for s in samples_of(group_of([1.0, None, 0.0]))] == [0, 2]


def test_masked_truncated_members_stay_in_the_baseline_but_leave_numerator_and_denominator() -> None:
    """C03"""
    cut = [make_trajectory(0.0, member=m, num_sampled=10, outcome=Outcome.TRUNCATED) for m in (0, 1)]
    whole = [make_trajectory(r, member=2 + m, num_sampled=10) for m, r in enumerate((1.0, 0.0))]
    config = AlgorithmConfig(advantage="dr_grpo", truncated="mask")
    samples = samples_of(make_group(*cut, *whole), config=config)
    assert [(s.member, s.advantages[-1]) for s in samples] == [(2, 0.75), (3, -0.25)]
    assert {batch.denominator for batch in make_batches(samples, max_tokens=15)} == {20}
    assert len(samples_of(make_group(*cut, *whole))) == 4


def test_next_token_view_predicts_each_trained_token_from_the_one_before_it() -> None:
    batch = make_batches([make_sample(5, [2, 4]), make_sample(3, [1], member=1)], max_tokens=100)[0]
    view = next_token_view(batch)
    assert view.trained_BT.tolist() == [[False, False, True, False, True], [False, True, False, False, False]]
    assert view.predictor_N.tolist() == [1, 3, 5]
    ids = batch.token_ids_BT
    assert view.target_N.tolist() == [ids[0, 2], ids[0, 4], ids[1, 1]]


def test_next_token_view_masks_the_first_token_of_every_packed_segment_and_padding() -> None:
    everything_BT = torch.ones(1, 7, dtype=torch.bool)
    floats_BT = torch.zeros(1, 7)
    batch = Batch(
        token_ids_BT=torch.arange(7).unsqueeze(0),
        loss_mask_BT=everything_BT,
        rollout_logprobs_BT=floats_BT,
        old_logprobs_BT=floats_BT,
        advantages_BT=floats_BT,
        segment_ids_BT=torch.tensor([[0, 0, 0, 1, 1, -1, -1]]),
        position_ids_BT=torch.tensor([[0, 1, 2, 0, 1, 0, 1]]),
        denominator=3,
        num_sequences=2,
        has_signal=True,
    )
    view = next_token_view(batch)
    assert view.trained_BT.tolist() == [[False, True, True, False, True, False, False]]
    assert view.target_N.tolist() == [1, 2, 4]


def test_rows_are_padded_on_the_right_and_absent_logprobs_are_nan() -> None:
    batch = make_batches([make_sample(4, [2, 3]), make_sample(2, [1], member=1)], max_tokens=100)[0]
    assert batch.segment_ids_BT.tolist() == [[0, 0, 0, 0], [0, 0, -1, -1]]
    assert batch.rollout_logprobs_BT.isnan().tolist() == (~batch.loss_mask_BT).tolist()
    assert batch.old_logprobs_BT.isnan().all()
    assert batch.denominator == 3 and not batch.is_packed


def test_a_batch_in_which_nothing_is_trained_is_refused() -> None:
    """A04"""
    with pytest.raises(EmptyBatchError, match="none of the tokens of 2 samples is trained"):
        make_batches([make_sample(4, []), make_sample(5, [])], max_tokens=100)
    with pytest.raises(EmptyBatchError, match="none of the tokens of 0 samples"):
        make_batches([], max_tokens=100)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_trained_token_without_a_finite_logprob_is_refused_by_name(bad: float) -> None:
    sample = make_sample(4, [2, 3], draw=3, member=1)
    broken = replace(sample, rollout_logprobs=(*sample.rollout_logprobs[:3], bad))
    with pytest.raises(
        ValueError, match=rf"sample 3/1: token 3 \(id {sample.token_ids[3]}\) is trained but its sampler"
    ):
        make_batches([sample, broken], max_tokens=100)
    broken = replace(sample, advantages=(0.0, 0.0, bad, 1.0))
    with pytest.raises(ValueError, match=r"sample 3/1: token 2 .* its advantage is"):
        make_batches([broken], max_tokens=100)


@given(st.integers(1, 200), st.randoms(use_true_random=False))
def test_micro_batches_keep_every_token_once_within_the_budget_in_an_order_of_their_own(
    max_tokens: int, rng: random.Random
) -> None:
    """C01: what the denominator counts does not depend on the split."""
    samples = mixed_samples()
    shuffled = rng.sample(samples, len(samples))
    batches = make_batches(shuffled, max_tokens=max_tokens)
    expected = make_batches(samples, max_tokens=max_tokens)
    assert [b.token_ids_BT.tolist() for b in batches] == [b.token_ids_BT.tolist() for b in expected]
    num_trained = sum(s.num_trained_tokens for s in samples)
    assert sum(int(b.loss_mask_BT.sum()) for b in batches) == num_trained
    assert {b.denominator for b in batches} == {num_trained}
    assert all(b.num_tokens <= max_tokens or len(b.token_ids_BT) == 1 for b in batches)


def test_samples_without_signal_are_batched_apart_and_last() -> None:
    samples = [make_sample(9, [3], advantage=0.0), make_sample(5, [3], draw=1, advantage=0.5)]
    assert [(b.has_signal, b.token_ids_BT.shape[1]) for b in make_batches(samples, max_tokens=100)] == [
        (True, 5),
        (False, 9),
    ]


def test_minibatches_are_whole_groups_in_the_order_of_their_draws() -> None:
    samples = [make_sample(4, [2], draw=d, member=m) for m in range(2) for d in (9, 2, 7, 4)]
    parts = split_minibatches(samples, 2)
    assert [[(s.draw, s.member) for s in part] for part in parts] == [
        [(2, 0), (2, 1), (4, 0), (4, 1)],
        [(7, 0), (7, 1), (9, 0), (9, 1)],
    ]
    assert len(split_minibatches(samples, 9)) == 4
