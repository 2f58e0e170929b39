"""The sampling loop of the in-process policy: prompts in, sampled ids and log-probs out, many rows in lock step.

Flow of one batch: `Backend.begin` runs the prompts -> [logits of every row -> sample -> `Backend.step`] until every row
ended. Rows that ended are taken out of the batch (`Backend.keep`) once a quarter of it is idle.

Invariants: each row draws from its own random stream, so a row's uniforms never depend on the other rows; which rows
share a batch, their order and when the batch shrinks follow from the requests and the sampled tokens alone. Nothing
here is concurrent: `LocalPolicy` calls from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quintain.agents.completion import FinishReason, GenerateRequest

UNIFORM_BLOCK = 32  # random numbers drawn ahead for each row
SHRINK_FRAC = 0.75  # the batch shrinks when at most this share of its rows is still unfinished


class Backend(Protocol):
    """Runs the model over the rows of one batch and keeps their keys and values between steps."""

    def begin(self, requests: Sequence[GenerateRequest], *, retain: bool) -> Tensor:
        """Run all prompts; logits after each, `[B, V]`. `retain`: keep the rows' keys and values after the batch."""
        ...

    def step(self, tokens_B: Tensor, growing_B: Tensor) -> Tensor:
        """Feed one token a row; logits `[B, V]`. Rows that are not `growing` have ended: their logits are not read."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows (indices into the present ones, ascending)."""
        ...

    def end(self, fed_ids: Sequence[tuple[int, ...]]) -> None:
        """The batch is over; `fed_ids[b]` are the tokens of request `b` whose keys and values are valid."""
        ...

    def forget(self) -> None:
        """Drop everything kept from earlier batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What was sampled for one request."""

    token_ids: tuple[int, ...]  # [T] the stop token included
    logprobs: tuple[float, ...]  # [T]
    finish_reason: FinishReason


def sample_tokens(logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token a row by inverting the cumulative distribution of softmax(logits / temperature), in fp32.

    Temperature 0 takes the largest logit (the lowest id among equals) and reports its log-prob at temperature 1.
    Returns the tokens `[B]` and their log-probs `[B]`.
    """
    greedy_B = temperature_B == 0
    logits_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    # `right=True` skips tokens of probability 0; the clamp catches u * total rounded up to total.
    drawn_B = torch.searchsorted(cdf_BV, uniforms_B[:, None] * cdf_BV[:, -1:], right=True)[:, 0]
    tokens_B = drawn_B.clamp_(max=logits_BV.shape[1] - 1)
    if bool(greedy_B.any()):
        tokens_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


class _RandomStreams:
    """One Philox stream a request, drawn in blocks for the rows that still need numbers."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self._streams = [np.random.Generator(np.random.Philox(request.seed)) for request in requests]
        self._block = torch.empty(0)

    def uniforms(self, step: int, rows: Tensor) -> Tensor:
        """The numbers of step `step` for these requests; every step must be asked for, in order."""
        column = step % UNIFORM_BLOCK
        if column == 0:
            block = np.zeros((len(self._streams), UNIFORM_BLOCK))
            for row in rows.tolist():
                block[row] = self._streams[row].random(UNIFORM_BLOCK)
            self._block = torch.from_numpy(block)
        return self._block[:, column][rows]


class _StopTable:
    """Which token ends which request, as one look-up a step."""

    def __init__(self, requests: Sequence[GenerateRequest], vocab_size: int) -> None:
        sets = sorted({request.sampling.stop_token_ids for request in requests})
        self._set_of_request = torch.tensor([sets.index(request.sampling.stop_token_ids) for request in requests])
        self._is_stop = torch.zeros(len(sets), vocab_size, dtype=torch.bool)
        for i, ids in enumerate(sets):
            self._is_stop[i, [token for token in ids if 0 <= token < vocab_size]] = True

    def hits(self, rows: Tensor, tokens_B: Tensor) -> Tensor:
        return self._is_stop[self._set_of_request[rows], tokens_B]


class DecodingStopped(Exception):
    """Nobody waits for the batch any more."""


def decode(
    backend: Backend,
    requests: Sequence[GenerateRequest],
    *,
    max_context: int,
    retain: bool,
    stopped_early: Callable[[], bool] = lambda: False,
) -> list[Decoded]:
    """Sample one completion for each request; the order of the result is that of the requests.

    A row never grows past `max_context` tokens: it ends with `length` there. Raises DecodingStopped at the first step
    at which `stopped_early` says so.
    """
    limit = torch.tensor([min(r.sampling.max_new_tokens, max_context - len(r.prompt_ids)) for r in requests])
    temperature = torch.tensor([float(r.sampling.temperature) for r in requests])
    streams = _RandomStreams(requests)
    logits_BV = backend.begin(requests, retain=retain)
    device = logits_BV.device
    stops = _StopTable(requests, logits_BV.shape[1])
    out_ids = torch.zeros(len(requests), int(limit.max()), dtype=torch.long)
    out_logprobs = torch.zeros(out_ids.shape)
    lengths, stopped = limit.clone(), torch.zeros(len(requests), dtype=torch.bool)

    rows = torch.arange(len(requests))  # the requests in the batch at present
    growing = torch.ones(len(rows), dtype=torch.bool)
    for step in range(out_ids.shape[1]):
        if stopped_early():
            raise DecodingStopped(f"given up after {step} tokens")
        drawn = sample_tokens(logits_BV, temperature[rows].to(device), streams.uniforms(step, rows).to(device))
        tokens, logprobs = (tensor.to("cpu") for tensor in drawn)
        out_ids[rows, step], out_logprobs[rows, step] = tokens, logprobs
        ends_here = growing & stops.hits(rows, tokens)
        stopped[rows] |= ends_here
        lengths[rows[ends_here]] = step + 1
        growing = growing & ~ends_here & (limit[rows] > step + 1)
        num_growing = int(growing.sum())
        if num_growing == 0:
            break
        if num_growing <= SHRINK_FRAC * len(rows):
            kept = growing.nonzero()[:, 0]
            backend.keep(kept)
            rows, tokens, growing = rows[kept], tokens[kept], growing[kept]
        logits_BV = backend.step(tokens.to(device), growing.to(device))

    decoded = [
        Decoded(token_ids=tuple(ids[:n]), logprobs=tuple(lps[:n]), finish_reason="stop" if stop else "length")
        for ids, lps, n, stop in zip(
            out_ids.tolist(), out_logprobs.tolist(), lengths.tolist(), stopped.tolist(), strict=True
        )
    ]
    backend.end([r.prompt_ids + d.token_ids[:-1] for r, d in zip(requests, decoded, strict=True)])
    return decoded
