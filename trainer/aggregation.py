"""From losses of tokens to one number: which weight each trained token has, and which tokens make up a sequence.

    token-mean              w = 1 / N            N  = trained tokens of the optimizer step
    seq-mean-token-sum      w = 1 / S            S  = sequences of the optimizer step with a trained token
    seq-mean-token-mean     w = 1 / (S * n_s)    n_s = trained tokens of the token's own sequence
    seq-mean-token-sum-norm w = 1 / (S * L)      L  = `algorithm.norm_tokens`, a constant (Dr. GRPO, arXiv 2503.20783)

A sequence is one sample: a segment of a row, so packing changes nothing. The loss is ``sum_m w * loss``.

Invariants: N and S are of the whole optimizer step, over all its micro-batches and ranks, so that micro-batches just
add up; n_s is known in every micro-batch, since a sample is never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which sample of a micro-batch each of its `N` trained tokens belongs to.

    Example (two samples of one packed row, 2 and 1 trained tokens): ``Sequences(index_N=[0, 0, 1], lengths_S=[2, 1])``
    """

    index_N: torch.Tensor  # int64, < S
    lengths_S: torch.Tensor  # int64, trained tokens; 0 where the sample has none

    def sums(self, values_N: torch.Tensor) -> torch.Tensor:
        """Sum over every sequence's trained tokens, `[S]`; 0 where there are none."""
        return values_N.new_zeros(len(self.lengths_S)).index_add(0, self.index_N, values_N)

    def means(self, values_N: torch.Tensor) -> torch.Tensor:
        """Mean over every sequence's trained tokens, `[S]`: padding and tool text don't count (C16)."""
        return self.sums(values_N) / self.lengths_S.clamp(min=1)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Every sequence's value at each of its trained tokens, `[N]`."""
        return values_S[self.index_N]


def sequences_of(segment_ids_BT: torch.Tensor, trained_BT: torch.Tensor) -> Sequences:
    """The sequences of a micro-batch: its (row, segment) pairs."""
    num_rows, width = segment_ids_BT.shape[0], int(segment_ids_BT.max()) + 1
    row_B1 = torch.arange(num_rows, device=segment_ids_BT.device).unsqueeze(1)
    index_N = (row_B1 * width + segment_ids_BT)[trained_BT]
    return Sequences(index_N=index_N, lengths_S=torch.bincount(index_N, minlength=num_rows * width))


def token_weights(
    aggregation: Aggregation,
    sequences: Sequences,
    *,
    num_tokens: int,
    num_sequences: int,
    norm_tokens: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight of each trained token, `[N]`, in `dtype`; the table of this module.

    `num_tokens` and `num_sequences` are of the whole optimizer step.
    """
    lengths_N = sequences.spread(sequences.lengths_S).to(dtype)
    if aggregation == "token-mean":
        return torch.full_like(lengths_N, 1 / num_tokens)
    if aggregation == "seq-mean-token-sum":
        return torch.full_like(lengths_N, 1 / num_sequences)
    if aggregation == "seq-mean-token-mean":
        return 1 / (num_sequences * lengths_N)
    assert norm_tokens is not None  # AlgorithmConfig asks for it
    return torch.full_like(lengths_N, 1 / (num_sequences * norm_tokens))
