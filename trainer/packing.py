"""Which samples share a rank, a row and a micro-batch: plans made from lengths alone.

    samples --ranks_of--> one list a rank --rows_of--> rows --micro_batches_of--> micro-batches of `max_tokens` tokens

Attention costs the square of a sample's length, so ranks are balanced by the sum of squared lengths. Unpacked, a row is
one sample. Packed, rows are filled up to one width, so that only their ends are padding.

Invariants: every sample is in exactly one row; equal samples in any order give equal plans; a sample longer than the
budget gets a row and a micro-batch of its own.

Does not do: cutting a sample in two; tensors (`trainer/batch.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from quintain.trainer.sample import Sample

Row = tuple[Sample, ...]
"""The samples of one row, in the order of their tokens."""


def longest_first(samples: Iterable[Sample]) -> list[Sample]:
    """In an order that depends on the samples alone."""
    return sorted(samples, key=lambda s: (-len(s.token_ids), s.draw, s.member, s.token_ids))


def ranks_of(samples: Iterable[Sample], num_ranks: int) -> list[list[Sample]]:
    """One list a rank: longest first, each to the rank with the smallest sum of squared lengths so far.

    The largest sum exceeds the smallest by at most one sample's square (greedy scheduling).
    """
    parts: list[list[Sample]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for sample in longest_first(samples):
        load, rank = loads[0]
        parts[rank].append(sample)
        heapq.heapreplace(loads, (load + len(sample.token_ids) ** 2, rank))
    return parts


def rows_of(samples: Iterable[Sample], *, width: int | None) -> list[Row]:
    """Rows in order of falling length: one sample each, or with `width` as many as fit (first fit, longest first)."""
    rows: list[list[Sample]] = []
    free: list[int] = []
    for sample in longest_first(samples):
        length = len(sample.token_ids)
        place = next((i for i, left in enumerate(free) if left >= length), None) if width else None
        if place is None:
            rows.append([sample])
            free.append(max(0, (width or 0) - length))
        else:
            rows[place].append(sample)
            free[place] -= length
    return sorted((tuple(row) for row in rows), key=num_tokens_of, reverse=True)


def micro_batches_of(rows: Sequence[Row], *, max_tokens: int) -> list[Sequence[Row]]:
    """Rows, longest first, cut so that rows x longest row is at most `max_tokens` (at least one row)."""
    parts: list[Sequence[Row]] = []
    start = 0
    while start < len(rows):
        end = start + max(1, max_tokens // num_tokens_of(rows[start]))
        parts.append(rows[start:end])
        start = end
    return parts


def num_tokens_of(row: Row) -> int:
    return sum(len(sample.token_ids) for sample in row)
