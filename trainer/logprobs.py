"""Log-probs of the trained tokens under a model, in fp32, aligned to the token itself.

Flow: one forward pass; a hook in front of the output layer keeps only the positions that predict a trained token, so
the vocabulary-sized work is done for those alone; then temperature, log-softmax, gather, and scatter to ``[B, T]``.

Invariants: the distribution is the one that was sampled from (logits / temperature); positions that are not trained
hold NaN. Rows are padded on the right: a causal model's output at a token cannot depend on what comes after it.

Does not do: chunking over the vocabulary; top-p and its like (they renormalise, and training samples without them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quintain.trainer.batch import Batch, next_token_view

PLAIN_CAUSAL_MODELS = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"})
"""Model types known to attend to the past only. Others are given the padding mask, which costs speed, not accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the model says about the tokens of one batch; NaN where `trained_BT` is False."""

    logprobs_BT: torch.Tensor  # fp32, with gradient where the caller has it enabled
    entropy_BT: torch.Tensor  # fp32, of the distribution that the token was drawn from, in nats; no gradient
    trained_BT: torch.Tensor  # bool


def score_tokens(model: torch.nn.Module, batch: Batch, *, temperature: float) -> TokenScores:
    """Log-prob and entropy of every trained token.

    Raises:
        ValueError: temperature is not positive, or the batch is packed and the model's type is not known to take it.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs of training need the sampling temperature, > 0")
    view = next_token_view(batch)
    logits_NV = _predicting_logits(model, batch, view.predictor_N)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    logprobs_N = logprobs_NV.gather(1, view.target_N.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropy_N = _entropy(logprobs_NV)
    return TokenScores(
        logprobs_BT=_scatter(logprobs_N, view.trained_BT),
        entropy_BT=_scatter(entropy_N, view.trained_BT),
        trained_BT=view.trained_BT,
    )


def model_logprobs(model: torch.nn.Module, batch: Batch, *, temperature: float) -> torch.Tensor:
    """`score_tokens` for callers that need the log-probs only: fp32 `[B, T]`, NaN where not trained."""
    return score_tokens(model, batch, temperature=temperature).logprobs_BT


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """``-sum_v p_v log p_v`` over the last dimension, in nats; entries of -inf count 0 and get gradient 0."""
    return _entropy(logits.log_softmax(dim=-1))


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    # 0 * -inf is NaN in the value and in the gradient of both factors: the factor itself is replaced, not the product.
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0.0)).sum(dim=-1)


def _scatter(values_N: torch.Tensor, trained_BT: torch.Tensor) -> torch.Tensor:
    empty_BT = torch.full(trained_BT.shape, math.nan, dtype=values_N.dtype, device=values_N.device)
    return empty_BT.masked_scatter(trained_BT, values_N)


def _predicting_logits(model: torch.nn.Module, batch: Batch, predictor_N: torch.Tensor) -> torch.Tensor:
    """Logits `[N, V]` at the flat positions `predictor_N`."""
    with _selecting_before_output_layer(model, predictor_N):
        logits = model(input_ids=batch.token_ids_BT, use_cache=False, **_attention_arguments(model, batch)).logits
    if logits.shape[:2] == (1, len(predictor_N)):
        return logits[0]
    # A model that does not call its output layer as a module: all positions came back.
    return logits.flatten(0, 1)[predictor_N]


def refuse_packing(model: torch.nn.Module) -> None:
    """Raises ValueError where the segments of a packed row are not known to be kept apart by this model."""
    model_type = getattr(getattr(unwrapped(model), "config", None), "model_type", None)
    if model_type not in PLAIN_CAUSAL_MODELS:
        raise ValueError(
            f"several samples a row are not supported for model type {model_type!r}, only for "
            f"{', '.join(sorted(PLAIN_CAUSAL_MODELS))}: set trainer.packing = false"
        )


def _attention_arguments(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model_type = getattr(getattr(unwrapped(model), "config", None), "model_type", None)
    if batch.is_packed:
        refuse_packing(model)
        # transformers separates the segments where position ids restart and no mask is given.
        return {"position_ids": batch.position_ids_BT}
    if model_type in PLAIN_CAUSAL_MODELS:
        return {}
    return {"attention_mask": (batch.segment_ids_BT >= 0).long()}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP's or DeepSpeed's wrapper; itself where it is in none (FSDP2 changes it in place)."""
    return getattr(model, "module", model)


@contextmanager
def _selecting_before_output_layer(model: torch.nn.Module, predictor_N: torch.Tensor) -> Iterator[None]:
    """While open, the output layer sees `[1, N, D]` instead of `[B, T, D]`.

    In front of the layer rather than around it, so that what a model does to its logits afterwards (scaling, soft
    capping) still happens in the model's own code.
    """

    def select(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_BTD = args[0]
        return (hidden_BTD.flatten(0, 1)[predictor_N].unsqueeze(0), *args[1:])

    find = getattr(unwrapped(model), "get_output_embeddings", None)
    output_layer = find() if find is not None else None
    if output_layer is None:
        yield
        return
    handle = output_layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
