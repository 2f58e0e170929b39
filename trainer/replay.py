"""Loss and gradient norm of one saved batch, computed again: what `quintain replay-batch` prints. No weight changes.

Invariants: each minibatch is computed from the same weights (the run's later minibatches saw updated ones), with the
settings that were saved beside the batch; on a CPU equal inputs give equal results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quintain.trainer.batch import make_batches, split_minibatches
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.ledger import SavedBatch
from quintain.trainer.logprobs import score_tokens
from quintain.trainer.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One minibatch."""

    num_samples: int
    num_trained_tokens: int
    loss: float
    grad_norm: float


def replay(model: Any, saved: SavedBatch) -> list[Replayed]:
    """Loss (without a KL term, nothing rejected) and gradient norm of every minibatch, by the saved settings.

    Raises:
        ValueError: a trained token has no finite log-prob or advantage, or nothing is trained.
    """
    algorithm = AlgorithmConfig.model_validate(saved.settings["algorithm"])
    objective = Objective(algorithm)
    trainer = TrainerConfig.model_validate(saved.settings["trainer"])
    model.eval()
    results = []
    trained = [sample for sample in saved.samples if sample.num_trained_tokens]
    for part in split_minibatches(trained, algorithm.minibatches_per_step):
        model.zero_grad()
        total = 0.0
        batches = make_batches(part, max_tokens=trainer.micro_batch_tokens, packed=trainer.packing)
        for batch in batches:
            scores = score_tokens(
                model,
                batch,
                temperature=saved.settings["temperature"],
                entropy_gradient=objective.entropy_gradient,
                kernel="torch",
            )
            loss = objective.loss(batch, scores, first=True).loss
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        results.append(
            Replayed(
                num_samples=len(part),
                num_trained_tokens=batches[0].denominator,
                loss=total,
                grad_norm=float(norm),
            )
        )
    model.zero_grad()
    return results
