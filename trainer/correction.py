"""Off-policy correction: the sampler (behaviour policy) is not quite the policy that the ratio starts from (proximal).

    rho = exp(old - rollout)          of a token          level: token
          exp(sum of old - rollout)   of its sequence     level: sequence
          exp(mean of old - rollout)  of its sequence     level: geometric

    weights (multiply the clipped token loss; the token stays in every denominator)
        truncated: min(max(rho, low), high)      truncated importance sampling; the decoupled PPO objective of
                                                 arXiv 2110.00641 (behaviour, proximal, current), its weight bounded
        masked:    rho where low <= rho <= high, else 0      with level: token, low: 0.5, high: 5 this is IcePop
    rejection (the tokens leave loss *and* denominators, as if they had never been there, C03)
        reject_low, reject_high: where rho (at `reject_level`) is outside; at a sequence's level all its tokens leave
        veto: all tokens of a sequence in which a single token has exp(old - rollout) < veto

Invariants: no gradient flows through rho; only trained tokens count; log-ratios are clamped before `exp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quintain.trainer.aggregation import Sequences
from quintain.trainer.config import CorrectionConfig
from quintain.trainer.losses import clamped_exp


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeights:
    """What the losses of a micro-batch's trained tokens are multiplied by."""

    weight_N: torch.Tensor
    raw_N: torch.Tensor  # rho, before any bound
    bounded_N: torch.Tensor  # bool: rho was truncated, or masked


def log_ratio_at(level: str, log_ratio_N: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """``log rho`` at each token, `[N]`, of `log_ratio_N` = old - rollout."""
    if level == "token":
        return log_ratio_N
    values_S = sequences.sums(log_ratio_N) if level == "sequence" else sequences.means(log_ratio_N)
    return sequences.spread(values_S)


def importance_weights(log_ratio_N: torch.Tensor, sequences: Sequences, config: CorrectionConfig) -> ImportanceWeights:
    """Weights by `config.weight`, which is not `none`, for `log_ratio_N` = old - rollout."""
    raw_N = clamped_exp(log_ratio_at(config.level, log_ratio_N.detach(), sequences))
    beyond_N = (raw_N < config.low) | (raw_N > config.high)
    bounded_N = raw_N.clamp(config.low, config.high) if config.weight == "truncated" else raw_N.masked_fill(beyond_N, 0)
    return ImportanceWeights(weight_N=bounded_N, raw_N=raw_N, bounded_N=beyond_N)


def kept_tokens(log_ratio_N: torch.Tensor, sequences: Sequences, config: CorrectionConfig) -> torch.Tensor:
    """Which of the trained tokens rejection and veto leave in the batch, bool `[N]`; `log_ratio_N` = old - rollout."""
    rho_N = clamped_exp(log_ratio_at(config.reject_level, log_ratio_N, sequences))
    low = 0.0 if config.reject_low is None else config.reject_low
    high = math.inf if config.reject_high is None else config.reject_high
    kept_N = (rho_N >= low) & (rho_N <= high)
    if config.veto is not None:
        vetoes_N = clamped_exp(log_ratio_N) < config.veto
        kept_N &= sequences.spread(sequences.sums(vetoes_N.to(log_ratio_N.dtype))) == 0
    return kept_N
