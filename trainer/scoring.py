"""Per-token numbers of samples, asked of a model outside of the loss: reference log-probs, values.

    samples --micro_batches--> lists of samples --score (a forward pass)--> values_BT --per_token--> one list a sample

Invariants: answers come in the order of the samples; index `t` is about token `t` itself, NaN where it is not trained.

Does not do: packing; several ranks (rank 0 asks models that it holds whole).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from quintain.trainer.batch import Batch, collate
from quintain.trainer.packing import micro_batches_of, rows_of
from quintain.trainer.sample import Sample


def micro_batches(samples: Sequence[Sample], *, max_tokens: int) -> Iterator[tuple[list[Sample], Batch]]:
    """Micro-batches of one sample a row, each with its samples in the order of its rows; denominators are their own."""
    for rows in micro_batches_of(rows_of(samples, width=None), max_tokens=max_tokens):
        part = [sample for (sample,) in rows]
        num_trained = sum(sample.num_trained_tokens for sample in part)
        yield part, collate(rows, (max(1, num_trained), len(part)), has_signal=True)


def per_token(
    samples: Sequence[Sample],
    score: Callable[[Batch], torch.Tensor],
    *,
    max_tokens: int,
    device: torch.device | str,
) -> list[list[float]]:
    """`score`'s values `[B, T]` as one list `[T]` a sample; no gradient."""
    answers: dict[int, list[float]] = {}
    with torch.no_grad():
        for part, batch in micro_batches(samples, max_tokens=max_tokens):
            for sample, values in zip(part, score(batch.to(device)).tolist(), strict=True):
                answers[id(sample)] = values[: len(sample.token_ids)]
    return [answers[id(sample)] for sample in samples]
