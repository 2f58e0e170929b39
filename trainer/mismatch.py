"""How far two computations of the same tokens' log-probs are apart: trainer against sampler, one precision another.

Symbols: ``a`` the log-probs under the distribution that the tokens were drawn from (the sampler's), ``b`` the other's,
``d = b - a``, over N tokens that were sampled; nothing else may be passed in.

Invariants: computed in fp64, since these numbers are below the rounding of fp32; log-ratios are clamped before `exp`;
all values are 0 (or 1 for `ess_frac` and `prob_error`) where both agree.

Does not do: choosing the tokens (tool text has no log-prob); thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintain.trainer.losses import clamped_exp, kl_k3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Of N tokens; e.g. ``Mismatch(num_tokens=4096, gap_max=2.1e-5, gap_mean=1.3e-6, k3=4e-12, ess_frac=1.0,
    prob_error=1.0000013)``."""

    num_tokens: int
    gap_max: float
    """``max |d|``, nats."""
    gap_mean: float
    """``mean |d|`` over the N tokens, nats."""
    k3: float
    """``mean(exp(d) - 1 - d)`` over the N tokens: estimates KL(a || b), never negative."""
    ess_frac: float
    """Effective sample size, as a share, of the weights ``w = exp(d)``: ``(sum w)^2 / (N sum w^2)``, in (0, 1]."""
    prob_error: float
    """token_mult_prob_error: ``mean(exp |d|)`` over the N tokens, at least 1: by what factor probabilities differ."""


def mismatch(sampled_logprobs_N: torch.Tensor, other_logprobs_N: torch.Tensor) -> Mismatch:
    """Measure; both `[N]`, of the same sampled tokens.

    Raises:
        ValueError: there is no token, or a log-prob is not finite.
    """
    a, b = (x.detach().to("cpu", torch.float64) for x in (sampled_logprobs_N, other_logprobs_N))
    if not a.numel() or a.shape != b.shape:
        raise ValueError(f"log-probs of {tuple(a.shape)} and {tuple(b.shape)} tokens: there is nothing to compare")
    if not bool((a.isfinite() & b.isfinite()).all()):
        raise ValueError("a log-prob is not finite; pass only tokens that were sampled")
    d = b - a
    weight = clamped_exp(d)
    return Mismatch(
        num_tokens=d.numel(),
        gap_max=d.abs().max().item(),
        gap_mean=d.abs().mean().item(),
        k3=kl_k3(a, b).mean().item(),
        ess_frac=(weight.sum().square() / (weight.numel() * weight.square().sum())).item(),
        prob_error=clamped_exp(d.abs()).mean().item(),
    )
