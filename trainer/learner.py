"""`Learner`: samples in, one or more optimizer steps, metrics out. Owns the optimizer, the version and the reference.

Flow of `train_on`::

    samples --split_minibatches--> K minibatches --make_batches--> micro-batches
    old log-probs: K = 1: those of the one forward pass, detached (ratio exactly 1);
                   K > 1: of every minibatch after the first, by a pass without gradient before the first update
    each minibatch: forward, loss / denominator, backward over its micro-batches; clip the gradient; step; version + 1
    micro-batches in which every advantage is 0 get the forward pass only (for the metrics): their gradient is 0

Invariants: `policy_version` rises by 1 per optimizer step that was taken; one with a non-finite gradient norm is
skipped, counted and does not raise it, and several in a row are an error. Weights that are not finite are never saved.
Loaded weights get memory of their own, aligned as in a run that was never broken, so that sums come out the same. The
model is trained in place and stays the caller's object, so an in-process
sampler always has the live weights. It is in eval mode throughout: dropout would train another policy than the one that
was sampled.

Does not do: rollouts, checkpoint folders (it writes its files into one: `save`), several processes.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from quintain.trainer.batch import Batch, EmptyBatchError, make_batches, padding_frac, split_minibatches
from quintain.trainer.checkpoint import CheckpointError
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.logprobs import TokenScores, refuse_packing, score_tokens
from quintain.trainer.losses import PolicyLoss, kl_k3, policy_loss
from quintain.trainer.model_files import load_weights, own_memory, save_model
from quintain.trainer.sample import Sample
from quintain.trainer.tally import Tally

MODEL_FOLDER, REFERENCE_FOLDER, STATE_FILE = "model", "reference", "learner.pt"
MAX_SKIPPED_IN_A_ROW = 3
"""So many optimizer steps skipped one after the other end the run: the weights no longer change."""


class DivergedError(RuntimeError):
    """The model can no longer be trained: gradients or weights are not finite. Earlier checkpoints are untouched."""


def learning_rate_factor(schedule: str, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (0-based), in (0, 1].

    Warm-up: ``(step + 1) / warmup_steps``. After it, with ``x`` = the part of the remaining steps that is behind:
    constant 1, linear ``1 - x``, cosine ``(1 + cos(pi x)) / 2``. Steps past `total_steps` keep the last one's value.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    last = max(total_steps - 1, warmup_steps)
    x = (min(step, last) - warmup_steps) / max(1, total_steps - warmup_steps)
    return 1 - x if schedule == "linear" else (1 + math.cos(math.pi * x)) / 2


class Learner:
    """GRPO updates of one model.

    Life cycle: construct with the model that the run starts from (it is copied as the KL reference, which travels with
    the checkpoints), `load` a checkpoint's folder where there is one, then `train_on` once a batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: AlgorithmConfig,
        trainer: TrainerConfig,
        *,
        temperature: float,
        total_steps: int | None = None,
    ) -> None:
        """Take over `model`, in place.

        Args:
            temperature: the sampling temperature of the rollouts, > 0.
            total_steps: optimizer steps of the whole run, for the schedule; by default steps x minibatches_per_step.

        Raises:
            RuntimeError: started with more than one process.
        """
        self.config = config
        self.micro_batch_tokens = trainer.micro_batch_tokens
        self.packed = trainer.packing
        if self.packed:
            refuse_packing(model)
        self.temperature = temperature
        self.total_steps = total_steps or trainer.steps * config.minibatches_per_step
        self.policy_version = 0
        self.num_skipped_steps = 0
        self._num_skipped_in_a_row = 0
        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            raise RuntimeError(
                f"the learner runs in one process, not {self.accelerator.num_processes}: start it without a "
                "multi-process launcher"
            )
        model.eval()
        self.reference: PreTrainedModel | None = None
        if config.kl_coef > 0:
            self.reference = copy.deepcopy(model)
            self.reference.requires_grad_(False)
            self.reference.to(self.accelerator.device)  # pyright: ignore[reportArgumentType]
        self.model, self.optimizer = self.accelerator.prepare(model, self._make_optimizer(model))

    def _make_optimizer(self, model: PreTrainedModel) -> torch.optim.Optimizer:
        config = self.config
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            # Decay pulls norms and biases towards a scale of 0, which regularises nothing.
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=betas, fused=True)

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        factor = learning_rate_factor(
            self.config.lr_schedule,
            self.policy_version,
            warmup_steps=self.config.warmup_steps,
            total_steps=self.total_steps,
        )
        return self.config.learning_rate * factor

    def train_on(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on one batch, at most `minibatches_per_step` optimizer steps; returns metrics (`metrics.METRICS`).

        Raises:
            EmptyBatchError: no token is trained; the weights are untouched.
            ValueError: a trained token has no finite log-prob or advantage; the weights are untouched.
            DivergedError: `MAX_SKIPPED_IN_A_ROW` optimizer steps in a row had a non-finite gradient norm.
        """
        minibatches = self._minibatches(samples)
        tally = Tally()
        staleness_max = self.policy_version - oldest_version(samples)
        learning_rate, num_skipped_before = self.learning_rate, self.num_skipped_steps
        minibatches = [minibatches[0], *(self._with_old_logprobs(part, tally) for part in minibatches[1:])]
        for index, batches in enumerate(minibatches):
            self._optimizer_step(batches, tally, first=index == 0)
        num_tokens = sum(batches[0].denominator for batches in minibatches)
        metrics = tally.metrics(num_trained_tokens=num_tokens, num_minibatches=len(minibatches))
        if self.reference is None:
            metrics.pop("train/kl_reference", None)
        return metrics | {
            "train/learning_rate": learning_rate,
            "train/num_trained_tokens": num_tokens,
            "train/num_rows": sum(len(batch.token_ids_BT) for batches in minibatches for batch in batches),
            "train/padding_frac": padding_frac(batch for batches in minibatches for batch in batches),
            "train/minibatch_steps": len(minibatches),
            "train/num_skipped_steps": self.num_skipped_steps - num_skipped_before,
            "policy/version": self.policy_version,
            "policy/staleness_max": staleness_max,
        }

    def _minibatches(self, samples: Sequence[Sample]) -> list[list[Batch]]:
        trained = [sample for sample in samples if sample.num_trained_tokens]
        if not trained:
            make_batches(samples, max_tokens=self.micro_batch_tokens)  # raises, saying why
            raise EmptyBatchError("no samples")
        parts = split_minibatches(trained, self.config.minibatches_per_step)
        device = self.accelerator.device
        return [
            [b.to(device) for b in make_batches(p, max_tokens=self.micro_batch_tokens, packed=self.packed)]
            for p in parts
        ]

    def _with_old_logprobs(self, batches: list[Batch], tally: Tally) -> list[Batch]:
        if self.config.old_logprobs == "rollout":
            return batches
        with torch.no_grad():
            scored = [(batch, score_tokens(self.model, batch, temperature=self.temperature)) for batch in batches]
        for batch, scores in scored:
            tally.add_mismatch(batch, scores)
        return [replace(batch, old_logprobs_BT=scores.logprobs_BT) for batch, scores in scored]

    def _optimizer_step(self, batches: list[Batch], tally: Tally, *, first: bool) -> None:
        for index, batch in enumerate(batches):
            # The first always: with nothing to learn the gradient is 0, not absent, and Adam's momentum still acts.
            wants_gradient = batch.has_signal or self.reference is not None or index == 0
            with torch.set_grad_enabled(wants_gradient):
                scores = score_tokens(self.model, batch, temperature=self.temperature)
                loss = self._loss(batch, scores, self._old_logprobs(batch, scores, first=first), tally)
            if first:
                tally.add_mismatch(batch, scores)
            if wants_gradient:
                self.accelerator.backward(loss)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        norm = float(grad_norm) if grad_norm is not None else math.nan
        tally.grad_norms.append(norm)
        if math.isfinite(norm):
            self.optimizer.step()
            self.policy_version += 1
            self._num_skipped_in_a_row = 0
        else:
            self.num_skipped_steps += 1
            self._num_skipped_in_a_row += 1
        self.optimizer.zero_grad()
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"the gradient norm was not finite in {self._num_skipped_in_a_row} optimizer steps in a row (policy "
                f"version {self.policy_version}): lower algorithm.learning_rate ({self.config.learning_rate}) or "
                f"algorithm.max_grad_norm ({self.config.max_grad_norm}) and start again, or resume from a checkpoint"
            )

    def _old_logprobs(self, batch: Batch, scores: TokenScores, *, first: bool) -> torch.Tensor:
        if self.config.old_logprobs == "rollout":
            return batch.rollout_logprobs_BT
        return scores.logprobs_BT.detach() if first else batch.old_logprobs_BT

    def _loss(self, batch: Batch, scores: TokenScores, old_BT: torch.Tensor, tally: Tally) -> torch.Tensor:
        parts: PolicyLoss = policy_loss(
            scores.logprobs_BT,
            old_BT,
            batch.advantages_BT,
            scores.trained_BT,
            denominator=batch.denominator,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        loss = parts.loss
        if self.reference is not None:
            with torch.no_grad():
                ref_BT = score_tokens(self.reference, batch, temperature=self.temperature).logprobs_BT
            kl_sum = kl_k3(scores.logprobs_BT[scores.trained_BT], ref_BT[scores.trained_BT]).sum()
            loss = loss + self.config.kl_coef * kl_sum / batch.denominator
            tally.add("kl_reference", kl_sum)
        tally.add_loss(loss, parts, scores)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that the next step depends on: optimizer, counters, random states."""
        numpy_state: Any = np.random.get_state(legacy=False)
        numpy_state["state"]["key"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
        return {
            "optimizer": self.optimizer.state_dict(),
            "policy_version": self.policy_version,
            "num_skipped_steps": self.num_skipped_steps,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
            "rng": {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
                "numpy": numpy_state,
                "python": random.getstate(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set what `state_dict` gave; the weights come apart (`load`)."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]
        self.num_skipped_steps = state["num_skipped_steps"]
        self._num_skipped_in_a_row = state.get("num_skipped_in_a_row", 0)
        rng = state["rng"]
        torch.set_rng_state(rng["torch"])
        if rng["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(rng["cuda"])
        numpy_state = copy.deepcopy(rng["numpy"])
        numpy_state["state"]["key"] = numpy_state["state"]["key"].numpy().astype(np.uint32)
        np.random.set_state(numpy_state)
        random.setstate(rng["python"])

    def save(self, folder: Path) -> None:
        """Write `model/` (a Hugging Face folder, usable as `model.path`), `learner.pt` and, with a KL term,
        `reference/` into `folder`.

        Raises:
            CheckpointError: a weight is not finite; nothing was written.
        """
        broken = [name for name, p in self.model.named_parameters() if not bool(p.isfinite().all())]
        if broken:
            raise CheckpointError(
                f"the model diverged: {len(broken)} of its tensors hold NaN or infinity ({broken[0]}, ...), so it "
                f"is not saved and older checkpoints stay; lower algorithm.learning_rate ({self.config.learning_rate}) "
                f"or algorithm.max_grad_norm ({self.config.max_grad_norm}), and resume or start again"
            )
        save_model(self.accelerator.unwrap_model(self.model), folder / MODEL_FOLDER)
        if self.reference is not None:
            save_model(self.reference, folder / REFERENCE_FOLDER)
        torch.save(self.state_dict(), folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote: weights into the model that this learner has, then the state.

        Raises:
            RuntimeError: the weights are of another architecture.
        """
        load_weights(self.accelerator.unwrap_model(self.model), folder / MODEL_FOLDER)
        if self.reference is not None:
            load_weights(self.reference, folder / REFERENCE_FOLDER)
            own_memory(self.reference)
        # Also where the model came out of a file before this learner got it.
        own_memory(self.accelerator.unwrap_model(self.model))
        self.load_state_dict(torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True))

    def checkpoint_bytes(self) -> int:
        """About how much `save` writes: the weights, twice as much of Adam's moments, and the reference."""
        num_copies = 3 if self.reference is None else 4
        return num_copies * sum(p.numel() * p.element_size() for p in self.model.parameters())


def oldest_version(samples: Sequence[Sample]) -> int:
    """The oldest policy version among the trained tokens; samples must have some."""
    return min(v for s in samples for v, trained in zip(s.policy_versions, s.loss_mask, strict=True) if trained)
