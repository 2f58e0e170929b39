"""`Tally`: sums and maxima of one batch's training, kept on the device and read once.

Invariants: every mean is a sum over trained tokens divided by the number of trained tokens of the batch; nothing is
read from the device before `metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch

from quintain.trainer.batch import Batch
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.logprobs import TokenScores
from quintain.trainer.losses import kl_k3
from quintain.trainer.objective import PolicyLoss


class Tally:
    """Collects during one `Learner.train_on`; made new for each."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.grad_norms: list[float] = []
        """One an optimizer step, before clipping."""
        self._num_compared_tokens = 0
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        value = _wide(value)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_count(self, name: str, number: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + number

    def add_max(self, name: str, value: torch.Tensor) -> None:
        value = _wide(value)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def add_mismatch(self, batch: Batch, scores: TokenScores) -> None:
        """Trainer's against sampler's log-probs, trained tokens only: tool text has none to compare."""
        logprobs = scores.logprobs_BT.detach()[scores.trained_BT]
        rollout_logprobs = batch.rollout_logprobs_BT[scores.trained_BT]
        gap = (logprobs - rollout_logprobs).abs()
        if not gap.numel():
            return
        self._num_compared_tokens += gap.numel()
        self.add("gap", gap.sum())
        self.add_max("gap", gap.max())
        self.add("k3", kl_k3(_wide(rollout_logprobs), _wide(logprobs)).sum())

    def add_loss(self, parts: PolicyLoss) -> None:
        for field in fields(parts):
            add = self.add_max if field.name.endswith("_max") else self.add
            add(field.name, getattr(parts, field.name))

    def to_cpu(self) -> Tally:
        """Itself, with every number in the host's memory, so that it can be sent."""
        for values in (self._sums, self._maxima):
            values.update({name: value.cpu() for name, value in values.items()})
        return self

    def merge(self, others: Iterable[Tally]) -> Tally:
        """Itself, with what the other ranks counted in the same steps; gradient norms are global already."""
        for other in others:
            self._num_compared_tokens += other._num_compared_tokens
            for name, number in other._counts.items():
                self.add_count(name, number)
            for name, value in other._sums.items():
                self.add(name, value)
            for name, value in other._maxima.items():
                self.add_max(name, value)
        return self

    def metrics(self, config: AlgorithmConfig, *, num_minibatches: int) -> dict[str, float]:
        """Read everything at once; what `config` leaves out of the loss has no metric."""
        names, maxima = list(self._sums), list(self._maxima)
        stacked = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        total = dict(zip(names, stacked, strict=False))
        largest = dict(zip(maxima, stacked[len(names) :], strict=True))
        num_trained, num_compared = max(1.0, total["num_tokens"]), max(1, self._num_compared_tokens)
        metrics = {
            "train/loss": total["loss"] / num_minibatches,
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/num_trained_tokens": total["num_tokens"],
            "train/ratio_mean": total["ratio_sum"] / num_trained,
            "train/ratio_max": largest["ratio_max"],
            "train/sequence_ratio_max": largest["sequence_ratio_max"],
            "train/clip_frac": total["num_clipped"] / num_trained,
            "train/num_clamped_tokens": total["num_clamped"],
            "train/entropy": total["entropy_sum"] / num_trained,
            "mismatch/logprob_gap_max": largest.get("gap", 0.0),
            "mismatch/logprob_gap_mean": total.get("gap", 0.0) / num_compared,
            "mismatch/k3": total.get("k3", 0.0) / num_compared,
        }
        if config.kl_coef > 0 and config.kl_in == "loss":
            metrics["train/kl_reference"] = total["kl_sum"] / num_trained
        if config.dual_clip is not None:
            metrics["train/dual_clip_frac"] = total["num_dual_clipped"] / num_trained
        if config.correction.weight != "none":
            metrics["train/correction_weight_mean"] = total["correction_sum"] / num_trained
            metrics["train/correction_ratio_max"] = largest["correction_max"]
            metrics["train/correction_bounded_frac"] = total["num_bounded"] / num_trained
        if config.correction.rejects:
            num_rejected = self._counts.get("rejected", 0)
            metrics["train/rejected_tokens_frac"] = num_rejected / max(1.0, num_rejected + total["num_tokens"])
        return metrics


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Without gradient and in fp64: long sums, and k3 of nearly equal log-probs, are below the rounding of fp32."""
    # Apple's GPUs have no fp64.
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
