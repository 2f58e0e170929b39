"""Policy losses and estimates of KL divergence: pure functions of the trained tokens' numbers, one loss a token.

Symbols: ``lp`` logprobs (with gradient), ``old`` old_logprobs (the proximal policy), ``ref`` ref_logprobs, ``A``
advantages, ``r = exp(lp - old)`` the importance ratio, ``lo, hi`` = `clip_low`, `clip_high`, ``sg`` stop-gradient.
All vectors are `[N]`: the trained tokens of a micro-batch, already selected.

Invariants: a log-ratio is clamped before `exp`, since clamping afterwards leaves a NaN gradient behind inf; counts are
of unclamped, unclipped values.

Does not do: selecting tokens, means (`trainer/aggregation.py`), weights towards the sampler (`trainer/correction.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quintain.trainer.aggregation import Sequences
from quintain.trainer.config import AlgorithmConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios beyond +-20 (a factor of 4.9e8) are clamped: far outside any clip range, far from overflow in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """One loss a trained token, and what the clip did."""

    losses_N: torch.Tensor  # with gradient
    clipped_N: torch.Tensor  # bool: the clip took hold
    dual_clipped_N: torch.Tensor  # bool: the bound of dual clip took hold


def clamped_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(x)``, x clamped to +-`LOG_RATIO_LIMIT` first: a finite value, and gradient 0 (not NaN) beyond the limit."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ppo_losses(
    logprobs_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    _sequences: Sequences,
    config: AlgorithmConfig,
) -> TokenLosses:
    """``max(-r A, -clip(r, 1 - lo, 1 + hi) A)`` (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300).

    ``hi > lo`` is DAPO's asymmetric clip (arXiv 2503.14476). `dual_clip = c` bounds the loss of a token with A < 0 by
    ``-c A`` (arXiv 1912.09729).
    """
    return _clipped(clamped_exp(logprobs_N - old_N), advantages_N, config)


def gspo_losses(
    logprobs_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequences: Sequences,
    config: AlgorithmConfig,
) -> TokenLosses:
    """PPO's clip with the sequence's ratio ``s = exp(sum_m (lp - old) / n)`` in place of r (GSPO, arXiv 2507.18071).

    In the token form of the paper, ``s_t = sg(s) * exp(lp - sg(lp))``: with one advantage a sequence the gradient is
    GSPO's, and advantages of their own for turns are allowed. n = the sequence's trained tokens.
    """
    log_ratio_S = sequences.means((logprobs_N - old_N).detach())
    ratio_N = clamped_exp(logprobs_N - logprobs_N.detach() + sequences.spread(log_ratio_S))
    return _clipped(ratio_N, advantages_N, config)


def _clipped(ratio_N: torch.Tensor, advantages_N: torch.Tensor, config: AlgorithmConfig) -> TokenLosses:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    losses_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    clipped_N = ((ratio_N > high) & (advantages_N > 0)) | ((ratio_N < low) & (advantages_N < 0))
    dual_clipped_N = torch.zeros_like(clipped_N)
    if config.dual_clip is not None:
        bound_N = -config.dual_clip * advantages_N
        dual_clipped_N = (advantages_N < 0) & (losses_N > bound_N)
        losses_N = torch.where(dual_clipped_N, bound_N, losses_N)
    return TokenLosses(losses_N=losses_N, clipped_N=clipped_N, dual_clipped_N=dual_clipped_N)


def cispo_losses(
    logprobs_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    _sequences: Sequences,
    config: AlgorithmConfig,
) -> TokenLosses:
    """``-sg(clip(r, 1 - lo, 1 + hi)) A lp`` (CISPO, arXiv 2506.13585): the weight is clipped.

    No token loses its gradient. The paper has no lower bound: `clip_low` close to 1.
    """
    ratio_N = clamped_exp(logprobs_N - old_N).detach()
    weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLosses(
        losses_N=-weight_N * advantages_N * logprobs_N,
        clipped_N=weight_N != ratio_N,
        dual_clipped_N=torch.zeros_like(ratio_N, dtype=torch.bool),
    )


def reinforce_losses(
    logprobs_N: torch.Tensor,
    _old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    _sequences: Sequences,
    _config: AlgorithmConfig,
) -> TokenLosses:
    """``-A lp`` (REINFORCE): no ratio and no clip, so for one optimizer step a batch only."""
    nothing_N = torch.zeros_like(logprobs_N, dtype=torch.bool)
    return TokenLosses(losses_N=-advantages_N * logprobs_N, clipped_N=nothing_N, dual_clipped_N=nothing_N)


LOSSES: dict[str, Callable[..., TokenLosses]] = {
    "ppo": ppo_losses,
    "gspo": gspo_losses,
    "cispo": cispo_losses,
    "reinforce": reinforce_losses,
}
"""By `algorithm.loss`."""


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """``k1 = lp - ref``, elementwise: unbiased for KL(policy || reference) on the policy's samples; can be negative."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """``k2 = (lp - ref)^2 / 2``, elementwise: biased, never negative."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """``k3 = exp(ref - lp) - 1 - (ref - lp)``, elementwise: unbiased, never negative (GRPO, arXiv 2402.03300)."""
    log_ratio = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(x) - 1 loses where the two policies nearly agree.
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""By `algorithm.kl_estimator`."""
