"""The policy loss and the KL estimates as functions of numbers, without a model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintain.trainer.losses import LOG_RATIO_LIMIT, PolicyLoss, kl_k1, kl_k2, kl_k3, policy_loss, sequence_ratio

NAN = math.nan
K_BT = torch.arange(24, dtype=torch.float64).view(4, 6)
MASK_BT = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 1], [1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
OLD_BT = -(0.1 + 0.05 * (K_BT % 7))
NEW_BT = OLD_BT + 0.1 * K_BT.sin()
REF_BT = OLD_BT + 0.03 * (2 * K_BT).cos()
ADVANTAGES_BT = torch.tensor([0.7, -0.7, 0.5, -0.5], dtype=torch.float64).unsqueeze(1).expand(4, 6)


def loss_of(logprobs, old, advantages, mask=None, *, denominator: int | None = None, **overrides) -> PolicyLoss:
    tensors = [torch.as_tensor(x, dtype=torch.float64) for x in (logprobs, old, advantages)]
    tensors = [x if x.dim() == 2 else x.unsqueeze(0) for x in tensors]
    if torch.is_tensor(logprobs) and logprobs.requires_grad:
        tensors[0] = logprobs if logprobs.dim() == 2 else logprobs.unsqueeze(0)
    mask_BT = torch.ones_like(tensors[1]).bool() if mask is None else mask
    arguments = {"clip_low": 0.2, "clip_high": 0.28} | overrides
    new_BT, old_BT, advantages_BT = tensors
    return policy_loss(
        new_BT, old_BT, advantages_BT, mask_BT, denominator=denominator or int(mask_BT.sum()), **arguments
    )


def test_clipped_token_mean_loss_agrees_with_independent_implementations() -> None:
    """Two public packages agree on 0.043835 (clip 0.2 / 0.28, dual clip 3)."""
    parts = loss_of(NEW_BT, OLD_BT, ADVANTAGES_BT, MASK_BT, dual_clip=3.0)
    assert parts.loss.item() == pytest.approx(0.043835, abs=1e-6)


def test_kl_estimates_agree_with_independent_implementations() -> None:
    new, ref = NEW_BT[MASK_BT], REF_BT[MASK_BT]
    assert kl_k1(new, ref).mean().item() == pytest.approx(0.003523, abs=1e-6)
    assert kl_k2(new, ref).mean().item() == pytest.approx(0.002864, abs=1e-6)
    assert kl_k3(new, ref).mean().item() == pytest.approx(0.002825, abs=1e-6)


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


def test_an_overflowing_ratio_stays_finite_and_is_counted() -> None:
    """C05"""
    logprobs = torch.tensor([[0.0, -1.0]], requires_grad=True)
    parts = policy_loss(
        logprobs,
        torch.tensor([[-100.0, -1.0]]),
        torch.tensor([[0.0, 1.0]]),
        torch.ones(1, 2).bool(),
        denominator=2,
        clip_low=0.2,
        clip_high=0.28,
    )
    parts.loss.backward()
    assert parts.loss.isfinite() and parts.num_clamped == 1 and parts.ratio_max.isfinite()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_number_of_clamped_tokens_counts_both_directions_from_unclamped_values() -> None:
    """C05"""
    limit = LOG_RATIO_LIMIT
    assert loss_of([0.0, 0.0, 0.0], [-limit - 1, limit + 1, 1.0], [1.0] * 3).num_clamped == 2


@pytest.mark.parametrize("placeholder", [0.0, 1.0, NAN, math.inf, -math.inf])
def test_what_stands_at_untrained_positions_changes_nothing(placeholder: float) -> None:
    """C12"""

    def outcome(fill: float):
        logprobs_BT = NEW_BT.where(MASK_BT, fill).requires_grad_()
        parts = policy_loss(
            logprobs_BT,
            OLD_BT.where(MASK_BT, fill),
            ADVANTAGES_BT.where(MASK_BT, fill),
            MASK_BT,
            denominator=15,
            clip_low=0.2,
            clip_high=0.28,
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
    ratio_B = sequence_ratio(torch.tensor([[0.1, 0.1, NAN, 9.0], [NAN] * 4]), torch.zeros(2, 4), mask_BT)
    assert ratio_B.tolist() == pytest.approx([math.exp(0.1), 1.0])


@given(st.lists(st.floats(-200, 0), min_size=1, max_size=8), st.floats(-5, 5))
def test_loss_and_gradient_are_finite_for_every_finite_input(logprobs: list[float], advantage: float) -> None:
    """C04, C05"""
    lp = torch.tensor(logprobs, requires_grad=True)
    parts = loss_of(lp, list(reversed(logprobs)), [advantage] * len(logprobs))
    (parts.loss + kl_k3(lp, lp.detach().flip(0)).sum()).backward()
    assert parts.loss.isfinite() and lp.grad is not None and lp.grad.isfinite().all()
