"""Log-prob and entropy straight from hidden states, a chunk of tokens at a time: the full logits never exist.

    hidden_ND --chunk--> logits_CV --> log-prob, entropy of its tokens        forward: logits dropped at once
                         logits_CV --> gradient of hidden_CD and weight_VD    backward: computed anew, dropped again

With ``z = (h W' + b) / temperature``, ``lse = log sum_v exp z_v``, ``p_v = exp(z_v - lse)``:

    logprob = z_target - lse                      d logprob / d z_v = 1[v = target] - p_v
    entropy = lse - sum_v p_v z_v                 d entropy / d z_v = -p_v (z_v - lse + entropy)

Invariants: logits, sums and results are at least fp32, products run in the layer's own precision (autocast's where it
is on); an entry of -inf has probability 0, counts 0 in the entropy and gets gradient 0; memory beyond hidden states and
weight gradient is a few times `chunk_bytes`, whatever the number of tokens.

Does not do: finding out what a model does to its logits afterwards (`trainer/logprobs.py`); choosing a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 * 2**20
"""Size of one chunk of fp32 logits. Large enough for full speed on an accelerator, small beside any model."""

LOWEST = -1000.0
"""Log-probs below are taken for this in products with their probability, which is 0: with -inf, 0 * -inf is NaN."""


def wide(logits: torch.Tensor) -> torch.Tensor:
    """At least fp32: log-probs of bf16 logits are off by whole percents."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def chunk_tokens(vocab_size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Tokens whose fp32 logits fill one chunk."""
    return max(1, chunk_bytes // (4 * vocab_size))


def logprob_and_entropy(logits_NV: torch.Tensor, target_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of the target and entropy in nats, both `[N]`, of wide logits that are divided by the temperature."""
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    return logprobs_NV.gather(1, target_N.unsqueeze(1)).squeeze(1), entropy_of(logprobs_NV)


def entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    """``-sum_v p_v log p_v`` over the last dimension; entries of -inf count 0 and get gradient 0."""
    # 0 * -inf is NaN in the value and in the gradient of both factors: the factor itself is replaced, not the product.
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0.0)).sum(dim=-1)


def linear_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_N: torch.Tensor,
    *,
    temperature: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`logprob_and_entropy` of ``F.linear(hidden, weight, bias) / temperature``; gradients for all three."""
    return _LinearLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_ND, weight_VD, bias_V, target_N, temperature, chunk_tokens(weight_VD.shape[0], chunk_bytes)
    )


def module_logprobs(
    layer: Callable[[torch.Tensor], torch.Tensor],
    hidden_ND: torch.Tensor,
    target_N: torch.Tensor,
    *,
    temperature: float,
    num_chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for any output layer (one with a LoRA adapter, say), called once a chunk in each direction."""

    def of_chunk(hidden_CD: torch.Tensor, target_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprob_and_entropy(wide(layer(hidden_CD)) / temperature, target_C)

    parts = [
        checkpoint(of_chunk, hidden_CD, target_C, use_reentrant=False)
        for hidden_CD, target_C in zip(hidden_ND.split(num_chunk_tokens), target_N.split(num_chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_N: torch.Tensor,
        temperature: float,
        num_chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.temperature, ctx.num_chunk_tokens = temperature, num_chunk_tokens
        ctx.dtype = product_dtype(hidden_ND)
        weight = weight_VD.to(ctx.dtype)
        logprobs, entropies, lses = [], [], []
        for hidden_CD, target_C in zip(
            hidden_ND.split(num_chunk_tokens), target_N.split(num_chunk_tokens), strict=True
        ):
            z_CV = _logits(hidden_CD, weight, bias_V, ctx)
            lses.append(z_CV.logsumexp(dim=1))
            logp_CV = z_CV.sub_(lses[-1].unsqueeze(1))
            logprobs.append(logp_CV.gather(1, target_C.unsqueeze(1)).squeeze(1))
            p_CV = logp_CV.exp()
            entropies.append(-p_CV.mul_(logp_CV.clamp_(min=LOWEST)).sum(dim=1))
            del z_CV, logp_CV, p_CV
        entropy_N, lse_N = torch.cat(entropies), torch.cat(lses)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N)
        ctx.set_materialize_grads(False)
        return torch.cat(logprobs), entropy_N.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprob_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        weight = weight_VD.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V) if bias_V is not None and wants_bias else None
        for start in range(0, len(hidden_ND), ctx.num_chunk_tokens):
            chunk = slice(start, start + ctx.num_chunk_tokens)
            z_CV = _logits(hidden_ND[chunk], weight, bias_V, ctx).sub_(lse_N[chunk].unsqueeze(1))
            grad_CV = _grad_logits(
                z_CV,
                target_N[chunk],
                None if grad_logprob_N is None else grad_logprob_N[chunk],
                None if grad_entropy_N is None else grad_entropy_N[chunk],
                entropy_N[chunk],
            ).div_(ctx.temperature)
            del z_CV
            if grad_bias is not None:
                grad_bias += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_CV @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_CV, hidden_ND[chunk].to(ctx.dtype))
        return grad_hidden, grad_weight, grad_bias, None, None, None


def product_dtype(hidden_ND: torch.Tensor) -> torch.dtype:
    """In which `F.linear` would compute here."""
    device = hidden_ND.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype


def add_product(grad_weight_VD: torch.Tensor, grad_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """``grad_weight += grad' hidden``; in place and without a copy where the dtypes allow it."""
    if grad_weight_VD.dtype == grad_CV.dtype:
        grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
    else:
        grad_weight_VD += grad_CV.T @ hidden_CD


def _logits(hidden_CD: torch.Tensor, weight: torch.Tensor, bias_V: torch.Tensor | None, ctx: Any) -> torch.Tensor:
    with torch.autocast(hidden_CD.device.type, enabled=False):
        bias = None if bias_V is None else bias_V.to(ctx.dtype)
        logits_CV = F.linear(hidden_CD.to(ctx.dtype), weight, bias)
    return wide(logits_CV).div_(ctx.temperature)


def _grad_logits(
    logp_CV: torch.Tensor,
    target_C: torch.Tensor,
    grad_logprob_C: torch.Tensor | None,
    grad_entropy_C: torch.Tensor | None,
    entropy_C: torch.Tensor,
) -> torch.Tensor:
    """Gradient with respect to ``z``, from ``log p``; overwrites `logp_CV` where it can."""
    if grad_entropy_C is None:
        grad_CV = logp_CV.exp_()
        scale_C1 = torch.zeros_like(entropy_C) if grad_logprob_C is None else -grad_logprob_C
        grad_CV.mul_(scale_C1.unsqueeze(1))
    else:
        p_CV = logp_CV.exp()
        grad_CV = logp_CV.clamp_(min=LOWEST).add_(entropy_C.unsqueeze(1))
        grad_CV.mul_(-grad_entropy_C.unsqueeze(1))
        if grad_logprob_C is not None:
            grad_CV.sub_(grad_logprob_C.unsqueeze(1))
        grad_CV.mul_(p_CV)
    if grad_logprob_C is not None:
        grad_CV.scatter_add_(1, target_C.unsqueeze(1), grad_logprob_C.unsqueeze(1))
    return grad_CV
