"""The clipped policy loss and the estimates of KL divergence: pure functions of per-token tensors.

Symbols: ``lp`` logprobs (with gradient), ``old`` old_logprobs (the proximal policy), ``ref`` ref_logprobs, ``A``
advantages, ``r = exp(lp - old)`` the importance ratio, ``m`` the mask of trained tokens, ``N`` the denominator.

Invariants: values at positions that are not trained are selected away before any arithmetic (NaN * 0 is NaN); a
log-ratio is clamped before `exp`, since clamping afterwards leaves a NaN gradient behind inf; the denominator is given
by the caller and is the number of trained tokens of the whole optimizer step.

Does not do: per-sequence aggregation, entropy bonus, importance correction towards the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios beyond +-20 (a factor of 4.9e8) are clamped: far outside any clip range, far from overflow in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of one micro-batch and what is counted beside it (0-d tensors, no gradient but `loss`)."""

    loss: torch.Tensor
    """Already divided by the optimizer step's denominator: micro-batches just add up."""
    ratio_sum: torch.Tensor
    ratio_max: torch.Tensor
    num_clipped: torch.Tensor
    """Trained tokens where the clip is active, so that they give no gradient."""
    num_clamped: torch.Tensor
    """Trained tokens whose unclamped log-ratio was beyond `LOG_RATIO_LIMIT`."""
    sequence_ratio_max: torch.Tensor
    """Largest `sequence_ratio` of the rows."""


def policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    denominator: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate, token mean over the optimizer step (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300).

    ``loss = sum_m -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / N``

    `clip_high` above `clip_low` is DAPO's asymmetric clip and the token mean over the whole batch is DAPO's, too (arXiv
    2503.14476). `dual_clip = c` bounds the loss of a token with A < 0 by ``-c A`` (arXiv 1912.09729).
    """
    logprobs, old, advantages = (x[loss_mask_BT] for x in (logprobs_BT, old_logprobs_BT, advantages_BT))
    log_ratio = logprobs - old
    ratio = clamped_exp(log_ratio)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-ratio * advantages, -clipped_ratio * advantages)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    loss = losses.sum() / denominator
    with torch.no_grad():
        too_high, too_low = ratio > 1 + clip_high, ratio < 1 - clip_low
        clipped = (too_high & (advantages > 0)) | (too_low & (advantages < 0))
        sequence_ratio_B = sequence_ratio(logprobs_BT.detach(), old_logprobs_BT, loss_mask_BT)
        zero = ratio.new_zeros(())
        return PolicyLoss(
            loss=loss,
            ratio_sum=ratio.sum(),
            ratio_max=ratio.max() if ratio.numel() else zero,
            num_clipped=clipped.sum(),
            num_clamped=(log_ratio.abs() > LOG_RATIO_LIMIT).sum(),
            sequence_ratio_max=sequence_ratio_B.max() if ratio.numel() else zero,
        )


def clamped_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(x)``, x clamped to +-`LOG_RATIO_LIMIT` first: a finite value, and gradient 0 (not NaN) beyond the limit."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_ratio(logprobs_BT: torch.Tensor, old_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Geometric mean of a row's token ratios, ``exp(sum_m (lp - old) / sum_m 1)``, `[B]` (GSPO, arXiv 2507.18071).

    The mean divides by the row's trained tokens, so padding and tool text change nothing; 1 where a row has none.
    """
    log_ratio_BT = torch.where(mask_BT, logprobs_BT, 0.0) - torch.where(mask_BT, old_logprobs_BT, 0.0)
    return clamped_exp(log_ratio_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1))


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
