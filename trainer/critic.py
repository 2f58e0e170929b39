"""`Critic`: PPO's value model. A copy of the policy's body with a head of its own, its own optimizer, in the same loop.

    batch of groups --values--> GAE (trainer/credit.py) --returns--> train_on: K optimizer steps, after the policy's

The value of token `t` is the head's answer at position `t - 1`: what is known *before* the token, as for its log-prob.

    loss = sum_m max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / (2 N)        (PPO's value clip)
    R = return, v_old = the value before the batch's first update, c = `value_clip`, N = the step's tokens with a target

Invariants: a critic step never raises the policy version; one with a non-finite gradient norm is left out and counted;
the head starts at 0, so that the first advantages are plain returns.

Does not do: several ranks. Rank 0 holds the critic and trains it, whatever the policy is spread over.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from quintain.trainer.batch import Batch, next_token_view, split_minibatches
from quintain.trainer.checkpoint import CheckpointError
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.credit import Credit
from quintain.trainer.logprobs import attention_arguments
from quintain.trainer.metrics import explained_variance
from quintain.trainer.sample import Sample
from quintain.trainer.scoring import micro_batches, per_token

STATE_FILE = "critic.pt"


class ValueModel(torch.nn.Module):
    """A decoder without its output layer, and a linear head of one output."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body: Any = copy.deepcopy(policy.base_model).requires_grad_(True)
        hidden_size = policy.config.get_text_config().hidden_size
        self.weight_D = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Values `[B, T]` in fp32, NaN where not trained; index `t` is the value before token `t`."""
        view = next_token_view(batch)
        arguments = attention_arguments(self.body, batch)
        hidden_BTD = self.body(input_ids=batch.token_ids_BT, use_cache=False, **arguments).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1)[view.predictor_N].to(self.weight_D.dtype)
        values_N = hidden_ND @ self.weight_D + self.bias
        empty_BT = torch.full(view.trained_BT.shape, math.nan, dtype=values_N.dtype, device=values_N.device)
        return empty_BT.masked_scatter(view.trained_BT, values_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Sums over the tokens of a micro-batch that have a target."""

    loss: torch.Tensor
    """With gradient, halved, not divided."""
    num_clipped: torch.Tensor
    """Where the clipped value's loss is the larger one."""


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, *, value_clip: float | None
) -> ValueLoss:
    """``sum max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2`` (PPO, as its authors' code)."""
    plain_N = (values_N - returns_N).square()
    if value_clip is None:
        return ValueLoss(loss=plain_N.sum() / 2, num_clipped=torch.zeros((), device=values_N.device))
    near_N = old_values_N + (values_N - old_values_N).clamp(-value_clip, value_clip)
    clipped_N = (near_N - returns_N).square()
    losses_N = torch.maximum(plain_N, clipped_N)
    return ValueLoss(loss=losses_N.sum() / 2, num_clipped=(clipped_N > plain_N).sum())


class Critic:
    """Life cycle: construct with the model that the run starts from, `load` where a checkpoint is, then `values` before
    and `train_on` after each of the policy's updates."""

    def __init__(
        self,
        policy: PreTrainedModel,
        config: AlgorithmConfig,
        *,
        micro_batch_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Copy the policy's body; `config.critic` is the critic's own part."""
        self.config, self.micro_batch_tokens, self.device = config.critic, micro_batch_tokens, device
        self.minibatches_per_step = config.minibatches_per_step
        self.model = ValueModel(policy).to(device).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=self.config.weight_decay,
        )

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Value before each trained token, `[T]` a sample; NaN elsewhere."""
        return per_token(samples, self.model, max_tokens=self.micro_batch_tokens, device=self.device)

    def train_on(self, credit: Credit) -> dict[str, float]:
        """Fit the returns, at most `minibatches_per_step` optimizer steps; the `critic/` metrics.

        `credit` must have values and returns, and a sample.
        """
        assert credit.values is not None and credit.returns is not None
        targets = {
            id(sample): (values, returns)
            for sample, values, returns in zip(credit.samples, credit.values, credit.returns, strict=True)
        }
        losses, clip_fracs, norms, num_skipped = [], [], [], 0
        for part in split_minibatches(credit.samples, self.minibatches_per_step):
            num_targets = sum(math.isfinite(r) for sample in part for r in targets[id(sample)][1])
            loss_sum = num_clipped = 0.0
            for chunk, batch in micro_batches(part, max_tokens=self.micro_batch_tokens):
                parts = self._loss(batch.to(self.device), [targets[id(sample)] for sample in chunk])
                (parts.loss / num_targets).backward()
                loss_sum += parts.loss.item()
                num_clipped += parts.num_clipped.item()
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
            if math.isfinite(norm):
                self.optimizer.step()
            else:
                num_skipped += 1
            self.optimizer.zero_grad()
            losses.append(loss_sum / num_targets)
            clip_fracs.append(num_clipped / num_targets)
            norms.append(norm)
        return {
            "critic/value_loss": sum(losses) / len(losses),
            "critic/clip_frac": sum(clip_fracs) / len(clip_fracs),
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/num_skipped_steps": num_skipped,
            **_fit(credit.values, credit.returns),
        }

    def _loss(self, batch: Batch, targets: Sequence[tuple[Sequence[float], Sequence[float]]]) -> ValueLoss:
        values_BT = self.model(batch)
        num_tokens = values_BT.shape[1]

        def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
            filled = [[*row, *[math.nan] * (num_tokens - len(row))] for row in rows]
            return torch.tensor(filled, dtype=values_BT.dtype, device=values_BT.device)

        old_values_BT, returns_BT = padded([old for old, _ in targets]), padded([found for _, found in targets])
        has_target_BT = returns_BT.isfinite()
        values_N, old_N, returns_N = (x[has_target_BT] for x in (values_BT, old_values_BT, returns_BT))
        return value_loss(values_N, old_N, returns_N, value_clip=self.config.value_clip)

    def save(self, folder: Path) -> None:
        """Write `critic.pt`. Raises CheckpointError where a weight is not finite."""
        broken = [name for name, p in self.model.named_parameters() if not bool(p.isfinite().all())]
        if broken:
            raise CheckpointError(
                f"the critic diverged: {len(broken)} of its tensors hold NaN or infinity ({broken[0]}, ...); lower "
                f"algorithm.critic.learning_rate ({self.config.learning_rate}) and resume"
            )
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises CheckpointError where the checkpoint has no critic."""
        if not (folder / STATE_FILE).is_file():
            raise CheckpointError(f"checkpoint {folder} has no {STATE_FILE}: it is of a run without a critic")
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def checkpoint_bytes(self) -> int:
        """Weights and two moments of each."""
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())


def _fit(values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]) -> dict[str, float]:
    pairs = [
        (v, r)
        for values_T, returns_T in zip(values, returns, strict=True)
        for v, r in zip(values_T, returns_T, strict=True)
        if math.isfinite(r)
    ]
    metrics = {"critic/value_mean": math.fsum(v for v, _ in pairs) / len(pairs)}
    explained = explained_variance(pairs)
    return metrics if explained is None else metrics | {"critic/explained_variance": explained}
