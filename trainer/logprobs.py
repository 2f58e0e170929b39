"""Log-probs of the trained tokens under a model, in fp32, aligned to the token itself.

Flow: one forward pass; the model's output layer is entered with the positions that predict a trained token alone, and
while they are many for its vocabulary it answers with log-probs and entropies, chunk by chunk, instead of logits::

    model(...) -> ... hidden_BTD --select--> hidden_ND --output layer--> [1, N, 2] log-prob, entropy
                                                                     or  [1, N, V] logits, where those are small

Both happen inside the model's own forward pass, so that wrappers that gather weights for it (FSDP2) or reduce gradients
after it (DDP) see nothing unusual.

Invariants: the distribution is the one that was sampled from (logits / temperature); positions that are not trained
hold NaN; what a model does to its logits after its output layer (scaling, soft capping) is found out by a trial run and
kept, at the price of full logits. Rows are padded on the right: a causal model's output at a token cannot depend on
what comes after it.

Does not do: top-p and its like (they renormalise, and training samples without them).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from quintain.trainer.batch import Batch, next_token_view
from quintain.trainer.chunked_logprobs import (
    CHUNK_BYTES,
    chunk_tokens,
    entropy_of,
    linear_logprobs,
    module_logprobs,
    wide,
)
from quintain.trainer.triton_logprobs import linear_logprobs_triton, triton_can_run

PLAIN_CAUSAL_MODELS = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"})
"""Model types known to attend to the past only. Others are given the padding mask, which costs speed, not accuracy."""

Kernel = Literal["auto", "torch", "triton"]
"""What computes log-probs from hidden states; `auto`: Triton on an NVIDIA or AMD GPU where it is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the model says about the tokens of one batch; NaN where `trained_BT` is False."""

    logprobs_BT: torch.Tensor  # fp32, with gradient where the caller has it enabled
    entropy_BT: torch.Tensor  # fp32, of the distribution that the token was drawn from, in nats; gradient as asked for
    trained_BT: torch.Tensor  # bool


def score_tokens(
    model: torch.nn.Module,
    batch: Batch,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    kernel: Kernel = "auto",
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenScores:
    """Log-prob and entropy of every trained token.

    Args:
        entropy_gradient: let gradients flow through the entropy, too.
        chunk_bytes: fp32 logits of more than this are never held; they are computed in parts, and again for gradients.

    Raises:
        ValueError: temperature is not positive, or the batch is packed and the model's type is not known to take it.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs of training need the sampling temperature, > 0")
    view = next_token_view(batch)
    inner = unwrapped(model)
    layer = _output_layer(inner)
    arguments = attention_arguments(inner, batch)
    # Asked first, whatever the size: ranks whose forward passes wait for each other must all make the trial run.
    kept = layer if layer is not None and _keeps_logits(model, layer, batch.token_ids_BT.device) else None
    fused = kept is not None and 4 * len(view.target_N) * _vocab_size(kept) > chunk_bytes
    scoring = _scoring(kept if fused else None, view.target_N, temperature, kernel, chunk_bytes)
    with _selecting(layer, view.predictor_N), scoring:
        out = model(input_ids=batch.token_ids_BT, use_cache=False, **arguments).logits
    if fused:
        logprobs_N, entropy_N = out[0].unbind(dim=1)
        if torch.finfo(out.dtype).bits < 32:
            raise ValueError(f"the model's wrapper rounds its outputs to {out.dtype}; log-probs need float32")
    else:
        # All positions come back from a model that does not call its output layer as a module.
        selected = out.shape[:2] == (1, len(view.predictor_N))
        logits_NV = wide(out[0] if selected else out.flatten(0, 1)[view.predictor_N]) / temperature
        logprobs_NV = logits_NV.log_softmax(dim=-1)
        logprobs_N = logprobs_NV.gather(1, view.target_N.unsqueeze(1)).squeeze(1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_N = entropy_of(logprobs_NV)
    return TokenScores(
        logprobs_BT=_scatter(logprobs_N, view.trained_BT),
        entropy_BT=_scatter(entropy_N if entropy_gradient else entropy_N.detach(), view.trained_BT),
        trained_BT=view.trained_BT,
    )


def model_logprobs(model: torch.nn.Module, batch: Batch, *, temperature: float) -> torch.Tensor:
    """`score_tokens` for callers that need the log-probs only: fp32 `[B, T]`, NaN where not trained."""
    return score_tokens(model, batch, temperature=temperature).logprobs_BT


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """``-sum_v p_v log p_v`` over the last dimension, in nats; entries of -inf count 0 and get gradient 0."""
    return entropy_of(logits.log_softmax(dim=-1))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP's wrapper; itself where it is in none (FSDP2 changes it in place)."""
    return getattr(model, "module", model)


def refuse_packing(model: torch.nn.Module) -> None:
    """Raises ValueError where the segments of a packed row are not known to be kept apart by this model."""
    model_type = getattr(getattr(unwrapped(model), "config", None), "model_type", None)
    if model_type not in PLAIN_CAUSAL_MODELS:
        raise ValueError(
            f"several samples a row are not supported for model type {model_type!r}, only for "
            f"{', '.join(sorted(PLAIN_CAUSAL_MODELS))}: set trainer.packing = false"
        )


def _scatter(values_N: torch.Tensor, trained_BT: torch.Tensor) -> torch.Tensor:
    empty_BT = torch.full(trained_BT.shape, math.nan, dtype=values_N.dtype, device=values_N.device)
    return empty_BT.masked_scatter(trained_BT, values_N)


def attention_arguments(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """What the model's forward pass needs besides ids, so that no token sees padding or another sample."""
    if batch.is_packed:
        refuse_packing(model)
        # transformers separates the segments where position ids restart and no mask is given.
        return {"position_ids": batch.position_ids_BT}
    if getattr(getattr(model, "config", None), "model_type", None) in PLAIN_CAUSAL_MODELS:
        return {}
    return {"attention_mask": (batch.segment_ids_BT >= 0).long()}


def _output_layer(model: torch.nn.Module) -> torch.nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


_KEEPS_LOGITS: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def _keeps_logits(model: torch.nn.Module, layer: torch.nn.Module, device: torch.device) -> bool:
    """Whether the model's logits are what its output layer answers; one trial forward pass, the first time."""
    known = _KEEPS_LOGITS.get(layer)
    if known is not None:
        return known
    answers: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        answers.append(output)

    handle = layer.register_forward_hook(keep)
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=False).logits
    finally:
        handle.remove()
    keeps = len(answers) == 1 and answers[0].shape == logits.shape and torch.equal(answers[0].to(logits.dtype), logits)
    _KEEPS_LOGITS[layer] = keeps
    return keeps


@contextmanager
def _selecting(layer: torch.nn.Module | None, predictor_N: torch.Tensor) -> Iterator[None]:
    """While open, the output layer sees `[1, N, D]` instead of `[B, T, D]`.

    In front of the layer rather than around it, so that what a model does to its logits afterwards (scaling, soft
    capping) still happens in the model's own code.
    """

    def select(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].flatten(0, 1)[predictor_N].unsqueeze(0), *args[1:])

    if layer is None:
        yield
        return
    handle = layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _scoring(
    layer: torch.nn.Module | None, target_N: torch.Tensor, temperature: float, kernel: Kernel, chunk_bytes: int
) -> Iterator[None]:
    """While open, the output layer answers `[1, N, 2]`, log-probs and entropies, instead of logits.

    As the layer's own answer, so that it leaves through the model: FSDP2 gathers the weights for the backward pass when
    a gradient reaches an output of the module that it wrapped.
    """
    if layer is None:
        yield
        return
    compute, is_plain = layer.forward, _is_plain_linear(layer)

    def score(hidden_1ND: torch.Tensor) -> torch.Tensor:
        hidden_ND = hidden_1ND[0]
        if not is_plain:
            scores = module_logprobs(
                compute,
                hidden_ND,
                target_N,
                temperature=temperature,
                num_chunk_tokens=chunk_tokens(_vocab_size(layer), chunk_bytes),
            )
        else:
            weight: Any = layer.weight
            bias: Any = layer.bias
            by_triton = kernel == "triton" or (kernel == "auto" and triton_can_run(hidden_ND))
            function = linear_logprobs_triton if by_triton else linear_logprobs
            scores = function(hidden_ND, weight, bias, target_N, temperature=temperature, chunk_bytes=chunk_bytes)
        return torch.stack(scores, dim=-1).unsqueeze(0)

    own = layer.__dict__.get("forward")  # a wrapper may have put one there
    layer.forward = score  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        if own is None:
            del layer.__dict__["forward"]
        else:
            layer.forward = own


def _is_plain_linear(layer: torch.nn.Module) -> bool:
    """A linear layer that computes what `torch.nn.Linear` computes: no adapter, no fp8, no tensor parallelism."""
    return (
        isinstance(layer, torch.nn.Linear)
        and type(layer).forward is torch.nn.Linear.forward
        and "forward" not in layer.__dict__
        and not isinstance(layer.weight, DTensor)
    )


def _vocab_size(layer: torch.nn.Module) -> int:
    """Rows of the layer's largest matrix: the vocabulary, also where adapters sit beside it."""
    return max((p.shape[0] for p in layer.parameters() if p.dim() == 2), default=0)
