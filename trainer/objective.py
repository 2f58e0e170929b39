"""`Objective`: what one micro-batch's scores are worth. The loss as the recipe asks for it; owns no model.

    batch, scores (of the model), ref_logprobs (of the reference)
        --select the trained tokens--> token losses (`losses`) x importance weights (`correction`)
                                       + kl_coef * KL - entropy_coef * entropy
        --token weights (`aggregation`)--> PolicyLoss (the loss, and what is counted)

Three policies: rollout_logprobs (behaviour), old_logprobs (proximal; the recipe says whose), logprobs (current).

Invariants: micro-batches just add up, since every mean divides by a number of the whole optimizer step; everything is
selected by the mask of trained tokens before any arithmetic (NaN * 0 is NaN).

Does not do: forward passes, gradients, several processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quintain.trainer.aggregation import sequences_of, token_weights
from quintain.trainer.batch import Batch
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.correction import importance_weights, kept_tokens
from quintain.trainer.logprobs import TokenScores
from quintain.trainer.losses import KL_ESTIMATORS, LOG_RATIO_LIMIT, LOSSES, clamped_exp


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of one micro-batch and what is counted beside it (0-d tensors, no gradient but `loss`)."""

    loss: torch.Tensor
    """Already divided by the optimizer step's denominators: micro-batches just add up."""
    num_tokens: torch.Tensor
    """Trained tokens."""
    ratio_sum: torch.Tensor
    """Over trained tokens, of the token's ratio exp(logprobs - old_logprobs), unclipped."""
    ratio_max: torch.Tensor
    sequence_ratio_max: torch.Tensor
    """Largest geometric mean of a sequence's ratios."""
    num_clipped: torch.Tensor
    num_dual_clipped: torch.Tensor
    num_clamped: torch.Tensor
    """Trained tokens whose unclamped log-ratio was beyond `LOG_RATIO_LIMIT`."""
    entropy_sum: torch.Tensor
    kl_sum: torch.Tensor
    """Of the KL estimate against the reference; 0 without one."""
    correction_sum: torch.Tensor
    """Of the importance weights towards the sampler, after their bounds; 0 without a correction, as the next two."""
    correction_max: torch.Tensor
    """Largest of them before their bounds."""
    num_bounded: torch.Tensor
    """Trained tokens whose importance weight was truncated or masked."""


class Objective:
    """The loss of one run: made from its settings, stateless."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @property
    def kl_in_loss(self) -> bool:
        """Whether `loss` must be given the reference model's log-probs."""
        return self.config.kl_coef > 0 and self.config.kl_in == "loss"

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy of the scores must carry a gradient."""
        return self.config.entropy_coef > 0

    @property
    def rejects(self) -> bool:
        """Whether `reject` must see every micro-batch, with its old log-probs, before the first update."""
        return self.config.correction.rejects

    def has_gradient(self, batch: Batch) -> bool:
        """False where the gradient is 0 whatever the model says, so that a backward pass would be idle."""
        return batch.has_signal or self.kl_in_loss or self.entropy_gradient

    def old_logprobs(self, batch: Batch, scores: TokenScores, *, first: bool) -> torch.Tensor:
        """The proximal policy's log-probs, `[B, T]`, no gradient.

        `first`: this is the batch's first optimizer step, whose weights are the proximal policy's.
        """
        if self.config.old_logprobs == "rollout":
            return batch.rollout_logprobs_BT
        return scores.logprobs_BT.detach() if first else batch.old_logprobs_BT

    def loss(
        self, batch: Batch, scores: TokenScores, *, first: bool, ref_logprobs_BT: torch.Tensor | None = None
    ) -> PolicyLoss:
        """``sum_m w (c * policy_loss + kl_coef * KL - entropy_coef * entropy)``, w by `algorithm.aggregation`.

        c = the importance weight towards the sampler (1 without a correction). `first`: see `old_logprobs`.
        """
        config, trained_BT = self.config, scores.trained_BT
        old_BT = self.old_logprobs(batch, scores, first=first)
        logprobs_N, old_N, advantages_N = (x[trained_BT] for x in (scores.logprobs_BT, old_BT, batch.advantages_BT))
        entropy_N = scores.entropy_BT[trained_BT]
        sequences = sequences_of(batch.segment_ids_BT, trained_BT)
        parts = LOSSES[config.loss](logprobs_N, old_N, advantages_N, sequences, config)
        losses_N = parts.losses_N
        zero = logprobs_N.new_zeros(())
        correction_sum, correction_max, num_bounded = zero, zero, zero
        if config.correction.weight != "none":
            weights = importance_weights(old_N - batch.rollout_logprobs_BT[trained_BT], sequences, config.correction)
            losses_N = weights.weight_N * losses_N
            correction_sum, correction_max = weights.weight_N.sum(), _largest(weights.raw_N)
            num_bounded = weights.bounded_N.sum()
        kl_sum = zero
        if ref_logprobs_BT is not None:
            kl_N = KL_ESTIMATORS[config.kl_estimator](logprobs_N, ref_logprobs_BT[trained_BT])
            losses_N = losses_N + config.kl_coef * kl_N
            kl_sum = kl_N.detach().sum()
        if self.entropy_gradient:
            losses_N = losses_N - config.entropy_coef * entropy_N
        weight_N = token_weights(
            config.aggregation,
            sequences,
            num_tokens=batch.denominator,
            num_sequences=batch.num_sequences,
            norm_tokens=config.norm_tokens,
            dtype=logprobs_N.dtype,
        )
        log_ratio_N = (logprobs_N - old_N).detach()
        ratio_N = clamped_exp(log_ratio_N)
        return PolicyLoss(
            loss=(losses_N * weight_N).sum(),
            num_tokens=trained_BT.sum(),
            ratio_sum=ratio_N.sum(),
            ratio_max=_largest(ratio_N),
            sequence_ratio_max=_largest(clamped_exp(sequences.means(log_ratio_N))) if len(ratio_N) else zero,
            num_clipped=parts.clipped_N.sum(),
            num_dual_clipped=parts.dual_clipped_N.sum(),
            num_clamped=(log_ratio_N.abs() > LOG_RATIO_LIMIT).sum(),
            entropy_sum=entropy_N.detach().sum(),
            kl_sum=kl_sum,
            correction_sum=correction_sum,
            correction_max=correction_max,
            num_bounded=num_bounded,
        )

    def reject(self, batches: Sequence[Batch]) -> list[Batch]:
        """One rank's micro-batches of an optimizer step without the tokens that rejection and veto take out.

        They must have their old log-probs. Denominators are the caller's to set (`with_denominators`).
        """
        kept = []
        for batch in batches:
            trained_BT = batch.loss_mask_BT & ~batch.old_logprobs_BT.isnan()
            log_ratio_N = (batch.old_logprobs_BT[trained_BT] - batch.rollout_logprobs_BT[trained_BT]).detach()
            sequences = sequences_of(batch.segment_ids_BT, trained_BT)
            kept_N = kept_tokens(log_ratio_N, sequences, self.config.correction)
            kept.append(replace(batch, loss_mask_BT=torch.zeros_like(trained_BT).masked_scatter(trained_BT, kept_N)))
        return kept


def totals_of(batches: Sequence[Batch]) -> tuple[int, int]:
    """Trained tokens, and sequences with one, of some micro-batches."""
    lengths = [sequences_of(batch.segment_ids_BT, batch.loss_mask_BT).lengths_S for batch in batches]
    return sum(int(x.sum()) for x in lengths), sum(int((x > 0).sum()) for x in lengths)


def with_denominators(batches: Sequence[Batch], totals: Sequence[tuple[int, int]]) -> list[Batch]:
    """The micro-batches of an optimizer step with the denominators of what is left on all ranks (`totals_of` each).

    At least 1, so that a step in which everything was rejected has a loss of 0.
    """
    num_tokens, num_sequences = (max(1, sum(counts)) for counts in zip(*totals, strict=True))
    return [replace(batch, denominator=num_tokens, num_sequences=num_sequences) for batch in batches]


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max() if values.numel() else values.new_zeros(())
