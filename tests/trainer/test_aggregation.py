"""Means over tokens and sequences: the same gradient however an optimizer step is cut into micro-batches and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_data import ADVANTAGES_BT, MASK_BT, NEW_BT, OLD_BT, ROLLOUT_BT, loss_of
from trainer_data import mixed_samples, tiny_model

from quintain.trainer.aggregation import sequences_of
from quintain.trainer.batch import make_batches
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.logprobs import score_tokens
from quintain.trainer.losses import LOSSES
from quintain.trainer.objective import Objective

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PAIRS = [(loss, aggregation) for loss in LOSSES for aggregation in AGGREGATIONS if loss != "gspo"]
PAIRS.append(("gspo", "seq-mean-token-mean"))


def settings_of(loss: str, aggregation: str) -> dict[str, Any]:
    norm = {"norm_tokens": 32} if aggregation == "seq-mean-token-sum-norm" else {}
    return {"loss": loss, "aggregation": aggregation} | norm


def gradient_of(model: Any, config: AlgorithmConfig, *, max_tokens: int, packed: bool = False) -> torch.Tensor:
    """Of one optimizer step in fp64; the sampler's log-probs are the proximal policy, so that ratios differ from 1."""
    model.zero_grad()
    objective = Objective(config)
    for batch in make_batches(mixed_samples(rollout_near=model), max_tokens=max_tokens, packed=packed):
        scores = score_tokens(model, batch, temperature=1.0, entropy_gradient=True)
        objective.loss(batch, scores, first=True).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("loss", "aggregation"), PAIRS)
def test_gradient_is_the_same_for_every_micro_batch_size_and_packing(loss: str, aggregation: str) -> None:
    """C01"""
    model = tiny_model().double().eval()
    config = AlgorithmConfig(old_logprobs="rollout", entropy_coef=0.01, **settings_of(loss, aggregation))
    whole = gradient_of(model, config, max_tokens=8192)
    assert whole.abs().max() > 1e-3
    for max_tokens, packed in ((1, False), (70, False), (100, True), (200, True)):
        other = gradient_of(model, config, max_tokens=max_tokens, packed=packed)
        assert (other - whole).abs().max() <= 1e-10 * max(1.0, whole.abs().max().item()), (max_tokens, packed)


@pytest.mark.parametrize(("loss", "aggregation"), PAIRS)
def test_rows_that_are_masked_late_leave_numerator_and_denominators(loss: str, aggregation: str) -> None:
    """C03"""
    mask_BT = MASK_BT.clone()
    mask_BT[2:] = False
    settings = settings_of(loss, aggregation)
    masked = loss_of(NEW_BT, OLD_BT, ADVANTAGES_BT, mask_BT, **settings)
    without = loss_of(NEW_BT[:2], OLD_BT[:2], ADVANTAGES_BT[:2], MASK_BT[:2], **settings)
    assert masked.loss.item() == pytest.approx(without.loss.item(), abs=1e-12)


@pytest.mark.parametrize(("loss", "aggregation"), PAIRS)
def test_packed_rows_are_as_many_sequences_as_they_hold_samples(loss: str, aggregation: str) -> None:
    settings: dict[str, Any] = settings_of(loss, aggregation)
    settings["correction"] = {"weight": "truncated", "level": "geometric"}
    apart = loss_of(NEW_BT, OLD_BT, ADVANTAGES_BT, MASK_BT, rollout=ROLLOUT_BT, **settings)
    packed = loss_of(
        NEW_BT.view(2, 12),
        OLD_BT.view(2, 12),
        ADVANTAGES_BT.reshape(2, 12),
        MASK_BT.view(2, 12),
        rollout=ROLLOUT_BT.view(2, 12),
        segment_ids_BT=torch.tensor([[0] * 6 + [1] * 6] * 2),
        num_sequences=4,
        **settings,
    )
    assert packed.loss.item() == pytest.approx(apart.loss.item(), abs=1e-12)


def test_sequences_are_row_and_segment() -> None:
    segments_BT = torch.tensor([[0, 0, 1, 1, -1], [0, 0, 0, -1, -1]])
    trained_BT = torch.tensor([[False, True, True, True, False], [True, False, True, False, False]])
    sequences = sequences_of(segments_BT, trained_BT)
    assert sequences.index_N.tolist() == [0, 1, 1, 2, 2] and sequences.lengths_S.tolist() == [1, 2, 2, 0]
    assert sequences.means(torch.tensor([1.0, 2.0, 4.0, 5.0, 7.0])).tolist() == [1.0, 3.0, 6.0, 0.0]


def test_nothing_trained_is_a_loss_of_zero_with_a_gradient_of_zero() -> None:
    """Micro-batches that only keep other ranks company."""
    for loss, aggregation in PAIRS:
        lp = NEW_BT.clone().requires_grad_()
        nothing_BT = torch.zeros_like(MASK_BT)
        settings = settings_of(loss, aggregation)
        parts = loss_of(lp, OLD_BT, ADVANTAGES_BT, nothing_BT, denominator=3, num_sequences=2, **settings)
        parts.loss.backward()
        assert parts.loss.item() == 0 and lp.grad is not None and not lp.grad.any()
