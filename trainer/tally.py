"""`Tally`: sums and maxima of one batch's training, kept on the device and read once.

Invariants: every mean is a sum over trained tokens divided by the number of trained tokens of the batch; nothing is
read from the device before `metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quintain.trainer.batch import Batch
from quintain.trainer.logprobs import TokenScores
from quintain.trainer.losses import PolicyLoss, kl_k3


class Tally:
    """Collects during one `Learner.train_on`; made new for each."""

    def __init__(self) -> None:
        self.grad_norms: list[float] = []
        """One an optimizer step, before clipping."""
        self._num_compared_tokens = 0
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        value = _wide(value)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

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

    def add_loss(self, loss: torch.Tensor, parts: PolicyLoss, scores: TokenScores) -> None:
        self.add("loss", loss)
        self.add("ratio", parts.ratio_sum)
        self.add_max("ratio", parts.ratio_max)
        self.add_max("sequence_ratio", parts.sequence_ratio_max)
        self.add("clipped", parts.num_clipped)
        self.add("clamped", parts.num_clamped)
        self.add("entropy", scores.entropy_BT[scores.trained_BT].sum())

    def to_cpu(self) -> Tally:
        """Itself, with every number in the host's memory, so that it can be sent."""
        for values in (self._sums, self._maxima):
            values.update({name: value.cpu() for name, value in values.items()})
        return self

    def merge(self, others: Iterable[Tally]) -> Tally:
        """Itself, with what the other ranks counted in the same steps; gradient norms are global already."""
        for other in others:
            self._num_compared_tokens += other._num_compared_tokens
            for name, value in other._sums.items():
                self.add(name, value)
            for name, value in other._maxima.items():
                self.add_max(name, value)
        return self

    def metrics(self, *, num_trained_tokens: int, num_minibatches: int) -> dict[str, float]:
        """Read everything at once. `num_trained_tokens` is of the whole batch, over all its minibatches."""
        names, maxima = list(self._sums), list(self._maxima)
        stacked = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        total = dict(zip(names, stacked, strict=False))
        largest = dict(zip(maxima, stacked[len(names) :], strict=True))
        return {
            "train/loss": total["loss"] / num_minibatches,
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/ratio_mean": total["ratio"] / num_trained_tokens,
            "train/ratio_max": largest["ratio"],
            "train/sequence_ratio_max": largest["sequence_ratio"],
            "train/clip_frac": total["clipped"] / num_trained_tokens,
            "train/num_clamped_tokens": total["clamped"],
            "train/entropy": total["entropy"] / num_trained_tokens,
            "train/kl_reference": total.get("kl_reference", 0.0) / num_trained_tokens,
            "mismatch/logprob_gap_max": largest["gap"],
            "mismatch/logprob_gap_mean": total["gap"] / self._num_compared_tokens,
            "mismatch/k3": total["k3"] / self._num_compared_tokens,
        }


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Without gradient and in fp64: long sums, and k3 of nearly equal log-probs, are below the rounding of fp32."""
    # Apple's GPUs have no fp64.
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
