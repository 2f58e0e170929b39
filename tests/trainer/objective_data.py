"""The input of the reference values, and the objective as a function of plain numbers."""

from __future__ import annotations

from typing import Any

import torch

from quintain.trainer.batch import Batch
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.logprobs import TokenScores
from quintain.trainer.objective import Objective, PolicyLoss

K_BT = torch.arange(24, dtype=torch.float64).view(4, 6)
MASK_BT = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 1], [1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
OLD_BT = -(0.1 + 0.05 * (K_BT % 7))
NEW_BT = OLD_BT + 0.1 * K_BT.sin()
ROLLOUT_BT = OLD_BT - 0.02 * K_BT.cos()
REF_BT = OLD_BT + 0.03 * (2 * K_BT).cos()
VALUES_BT = 0.1 * K_BT.cos()
ADVANTAGES_BT = torch.tensor([0.7, -0.7, 0.5, -0.5], dtype=torch.float64).unsqueeze(1).expand(4, 6)


def make_batch(
    old: Any,
    advantages: Any,
    mask_BT: torch.Tensor,
    *,
    rollout: Any = None,
    segment_ids_BT: torch.Tensor | None = None,
    denominator: int | None = None,
    num_sequences: int | None = None,
) -> Batch:
    """A micro-batch of these numbers in fp64; every row one sequence by default, denominators its own."""
    nothing_BT = torch.zeros_like(mask_BT).long()
    segments_BT = nothing_BT if segment_ids_BT is None else segment_ids_BT
    return Batch(
        token_ids_BT=nothing_BT,
        loss_mask_BT=mask_BT,
        rollout_logprobs_BT=wide(old if rollout is None else rollout),
        old_logprobs_BT=wide(old),
        advantages_BT=wide(advantages),
        segment_ids_BT=segments_BT,
        position_ids_BT=nothing_BT,
        denominator=denominator or int(mask_BT.sum()),
        num_sequences=num_sequences or int(mask_BT.any(1).sum()),
        has_signal=True,
    )


def loss_of(
    logprobs: Any,
    old: Any,
    advantages: Any,
    mask: torch.Tensor | None = None,
    *,
    ref: Any = None,
    entropy: Any = None,
    rollout: Any = None,
    segment_ids_BT: torch.Tensor | None = None,
    denominator: int | None = None,
    num_sequences: int | None = None,
    **settings: Any,
) -> PolicyLoss:
    """The objective's answer; `settings` are of AlgorithmConfig, gspo's aggregation being the default with gspo."""
    if settings.get("loss") == "gspo":
        settings = {"aggregation": "seq-mean-token-mean"} | settings
    logprobs_BT = wide(logprobs)
    mask_BT = torch.ones_like(logprobs_BT).bool() if mask is None else mask
    batch = make_batch(
        old,
        advantages,
        mask_BT,
        rollout=rollout,
        segment_ids_BT=segment_ids_BT,
        denominator=denominator,
        num_sequences=num_sequences,
    )
    scores = TokenScores(
        logprobs_BT=logprobs_BT,
        entropy_BT=torch.zeros_like(logprobs_BT) if entropy is None else wide(entropy),
        trained_BT=mask_BT,
    )
    objective = Objective(AlgorithmConfig(**settings))
    # not the first step: the proximal policy is the batch's own
    return objective.loss(batch, scores, first=False, ref_logprobs_BT=None if ref is None else wide(ref))


def wide(values: Any) -> torch.Tensor:
    """`[B, T]` in fp64; one row where a list is given."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(0)
