"""Losses, aggregations and KL estimates as functions of numbers, without a model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_data import ADVANTAGES_BT, MASK_BT, NEW_BT, OLD_BT, REF_BT, ROLLOUT_BT, loss_of

from quintain.trainer.aggregation import sequences_of
from quintain.trainer.losses import LOG_RATIO_LIMIT, LOSSES, clamped_exp, kl_k1, kl_k2, kl_k3
from quintain.trainer.objective import PolicyLoss

NAN = math.nan
REFERENCE = [
    ("ppo", "token-mean", {"dual_clip": 3.0}, 0.043835),
    ("ppo", "seq-mean-token-sum", {"dual_clip": 3.0}, 0.164381),
    ("ppo", "seq-mean-token-mean", {"dual_clip": 3.0}, 0.009985),
    ("ppo", "seq-mean-token-sum-norm", {"dual_clip": 3.0, "norm_tokens": 6}, 0.027397),
    ("ppo", "token-mean", {"dual_clip": 3.0, "correction": {"weight": "truncated", "high": 2.0}}, 0.045757),
    ("gspo", "seq-mean-token-mean", {}, 0.009761),
    ("cispo", "token-mean", {}, -0.009097),
]
"""Values on which two public packages agree (clip 0.2 / 0.28); the fifth has truncated importance weights."""


@pytest.mark.parametrize(("loss", "aggregation", "settings", "value"), REFERENCE)
def test_losses_agree_with_independent_implementations(loss, aggregation, settings, value: float) -> None:
    parts = loss_of(
        NEW_BT, OLD_BT, ADVANTAGES_BT, MASK_BT, rollout=ROLLOUT_BT, loss=loss, aggregation=aggregation, **settings
    )
    assert parts.loss.item() == pytest.approx(value, abs=1e-6)


def test_kl_estimates_agree_with_independent_implementations() -> None:
    new, ref = NEW_BT[MASK_BT], REF_BT[MASK_BT]
    assert kl_k1(new, ref).mean().item() == pytest.approx(0.003523, abs=1e-6)
    assert kl_k1(new, ref).abs().mean().item() == pytest.approx(0.070245, abs=1e-6)
    assert kl_k2(new, ref).mean().item() == pytest.approx(0.002864, abs=1e-6)
    assert kl_k3(new, ref).mean().item() == pytest.approx(0.002825, abs=1e-6)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.003523), ("k2", 0.002864), ("k3", 0.002825)])
def test_kl_term_and_entropy_bonus_enter_with_the_weights_of_the_aggregation(estimator: str, value: float) -> None:
    settings = {"kl_coef": 0.5, "kl_estimator": estimator}
    zero_BT = torch.zeros_like(NEW_BT)
    parts = loss_of(NEW_BT, NEW_BT, zero_BT, MASK_BT, ref=REF_BT, **settings)
    assert parts.loss.item() == pytest.approx(0.5 * value, abs=1e-6)
    parts = loss_of(NEW_BT, NEW_BT, zero_BT, MASK_BT, entropy=zero_BT + 2, entropy_coef=0.1)
    assert parts.loss.item() == pytest.approx(-0.2)


def test_token_mean_does_not_depend_on_how_tokens_are_split_into_micro_batches() -> None:
    """C01"""
    short, long = loss_of([0.0], [0.0], [1.0], denominator=4), loss_of([0.0] * 3, [0.0] * 3, [-1.0] * 3, denominator=4)
    assert (short.loss + long.loss).item() == 0.5


def test_shares_of_a_step_add_up_whoever_computes_them() -> None:
    """C02 in numbers: five tokens of loss 1 and one of loss 7 give 2, not 4."""
    first = loss_of([0.0] * 5, [0.0] * 5, [-1.0] * 5, denominator=6)
    second = loss_of([0.0], [0.0], [-7.0], denominator=6)
    assert (first.loss + second.loss).item() == pytest.approx(2.0)


def test_kl_of_a_token_that_became_impossible_has_a_finite_value_and_gradient() -> None:
    """C04"""
    logprob = torch.tensor([-120.0], requires_grad=True)
    value = kl_k3(logprob, torch.tensor([-1.0]))
    value.sum().backward()
    assert value.isfinite().all() and logprob.grad is not None and logprob.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_an_overflowing_ratio_stays_finite_and_is_counted(loss: str) -> None:
    """C05"""
    logprobs = torch.tensor([[0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    parts = loss_of(logprobs, [-100.0, -1.0], [0.0, 1.0], loss=loss)
    parts.loss.backward()
    assert parts.loss.isfinite() and parts.num_clamped == 1 and parts.ratio_max.isfinite()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_number_of_clamped_tokens_counts_both_directions_from_unclamped_values() -> None:
    """C05"""
    limit = LOG_RATIO_LIMIT
    assert loss_of([0.0, 0.0, 0.0], [-limit - 1, limit + 1, 1.0], [1.0] * 3).num_clamped == 2


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("placeholder", [0.0, 1.0, NAN, math.inf, -math.inf])
def test_what_stands_at_untrained_positions_changes_nothing(placeholder: float, loss: str) -> None:
    """C12"""

    def outcome(fill: float):
        logprobs_BT = NEW_BT.where(MASK_BT, fill).requires_grad_()
        old, advantages, rollout, ref = (x.where(MASK_BT, fill) for x in (OLD_BT, ADVANTAGES_BT, ROLLOUT_BT, REF_BT))
        correction = {"weight": "truncated", "level": "geometric"}
        parts = loss_of(
            logprobs_BT,
            old,
            advantages,
            MASK_BT,
            rollout=rollout,
            ref=ref,
            loss=loss,
            kl_coef=0.1,
            correction=correction,
        )
        parts.loss.backward()
        assert logprobs_BT.grad is not None
        values = [getattr(parts, name).item() for name in PolicyLoss.__slots__]
        return values, logprobs_BT.grad.tolist()

    assert outcome(placeholder) == outcome(0.5)


def test_masked_rows_leave_numerator_and_denominator() -> None:
    """C03: four rows of ten tokens of loss 1, two of them masked, divide by 20."""
    zeros_BT, mask_BT = torch.zeros(4, 10), torch.ones(4, 10).bool()
    mask_BT[2:] = False
    parts = loss_of(zeros_BT, zeros_BT, zeros_BT - 1, mask_BT)
    assert parts.loss.item() == loss_of(zeros_BT[:2], zeros_BT[:2], zeros_BT[:2] - 1).loss.item() == 1.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.27, 1.0, False),
        (1.29, 1.0, True),
        (1.29, -1.0, False),
        (0.79, -1.0, True),
        (0.81, -1.0, False),
        (0.1, 1, False),
    ],
)
def test_clip_is_asymmetric_and_stops_only_moves_that_went_far_enough(ratio, advantage, clipped) -> None:
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    parts = loss_of(logprob, [0.0], [advantage])
    parts.loss.backward()
    assert logprob.grad is not None
    assert (logprob.grad.item() == 0) is clipped and parts.num_clipped.item() == clipped
    bound = 1.28 if advantage > 0 else 0.8
    assert parts.loss.item() == pytest.approx(-advantage * (bound if clipped else ratio))


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    assert loss_of([math.log(10.0)], [0.0], [-1.0]).loss.item() == pytest.approx(10.0)
    assert loss_of([math.log(10.0)], [0.0], [-1.0], dual_clip=3.0).loss.item() == pytest.approx(3.0)


def test_sequence_ratio_averages_over_trained_tokens_only() -> None:
    """C16"""
    mask_BT = torch.tensor([[True, True, False, False], [False] * 4])
    sequences = sequences_of(torch.tensor([[0, 0, 0, -1], [0] * 4]), mask_BT)
    assert clamped_exp(sequences.means(torch.tensor([0.1, 0.1]))).tolist() == pytest.approx([math.exp(0.1), 1.0])
    padded = loss_of([0.1, 0.1, NAN, 9.0], [0.0] * 4, [1.0] * 4, mask_BT[:1], loss="gspo")
    assert padded.loss.item() == loss_of([0.1, 0.1], [0.0] * 2, [1.0] * 2, loss="gspo").loss.item()
    assert padded.sequence_ratio_max.item() == pytest.approx(math.exp(0.1))


def test_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    lp = NEW_BT.clone().requires_grad_()
    loss_of(lp, OLD_BT, ADVANTAGES_BT, MASK_BT, loss="gspo").loss.backward()
    plain = NEW_BT.clone().requires_grad_()
    means_B = torch.where(MASK_BT, plain - OLD_BT, 0.0).sum(1) / MASK_BT.sum(1)
    (-means_B.exp() * ADVANTAGES_BT[:, 0]).mean().backward()  # no ratio is near the clip
    assert lp.grad is not None and plain.grad is not None
    assert torch.allclose(lp.grad, plain.grad, atol=1e-12)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    lp = torch.tensor([[math.log(2.0)]], dtype=torch.float64, requires_grad=True)
    parts = loss_of(lp, [0.0], [1.0], loss="cispo")
    parts.loss.backward()
    assert lp.grad is not None and lp.grad.item() == pytest.approx(-1.28) and parts.num_clipped == 1


def test_reinforce_is_the_weighted_log_prob() -> None:
    parts = loss_of([-1.0, -3.0], [NAN, NAN], [1.0, -0.5], loss="reinforce")
    assert parts.loss.item() == pytest.approx((1.0 - 1.5) / 2)


@given(st.lists(st.floats(-200, 0), min_size=1, max_size=8), st.floats(-5, 5))
def test_loss_and_gradient_are_finite_for_every_finite_input(logprobs: list[float], advantage: float) -> None:
    """C04, C05"""
    lp = torch.tensor(logprobs, requires_grad=True)
    parts = loss_of(lp, list(reversed(logprobs)), [advantage] * len(logprobs))
    (parts.loss + kl_k3(lp, lp.detach().flip(0)).sum()).backward()
    assert parts.loss.isfinite() and lp.grad is not None and lp.grad.isfinite().all()
