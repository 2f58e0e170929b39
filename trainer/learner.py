"""`Learner`: samples in, one or more optimizer steps, metrics out. Owns the optimizer, the version and the reference.

Flow of `train_on`::

    samples --split_minibatches--> K minibatches --make_batches--> micro-batches
    old log-probs: K = 1: those of the one forward pass, detached (ratio exactly 1);
                   K > 1: of every minibatch after the first, by a pass without gradient before the first update
    each minibatch: forward, loss / denominator, backward over its micro-batches; clip the gradient; step; version + 1
    micro-batches in which every advantage is 0 get the forward pass only (for the metrics): their gradient is 0

With several ranks, rank 0's `train_on`, `save` and `load` announce themselves and every rank carries them out
(`trainer/follower.py`); gradients are those of one process, since all ranks share the step's denominator.

Invariants: `policy_version` rises by 1 per optimizer step that was taken; one with a non-finite gradient norm is
skipped on every rank, counted and does not raise it, and several in a row are an error. The caller's model always has
the live weights, for an in-process sampler: it is the trained one, or (sharded, or with adapters) a copy that is
refreshed after every batch. It is in eval mode throughout: dropout would train another policy than the one that
was sampled.

Does not do: rollouts, checkpoint folders (it writes its files into one: `save`).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quintain.trainer import learner_files
from quintain.trainer.batch import (
    Batch,
    EmptyBatchError,
    batches_of_ranks,
    make_batches,
    padding_frac,
    split_minibatches,
)
from quintain.trainer.config import AlgorithmConfig, LoraConfig, TrainerConfig
from quintain.trainer.logprobs import Kernel, TokenScores, refuse_packing, score_tokens
from quintain.trainer.lora import adapters_off, with_adapters
from quintain.trainer.model_files import save_model
from quintain.trainer.objective import Objective, totals_of, with_denominators
from quintain.trainer.parallel import check_wrapping, checkpoint_activations, reshard, settle, shard_like
from quintain.trainer.ranks import Ranks
from quintain.trainer.sample import Sample
from quintain.trainer.scoring import per_token
from quintain.trainer.tally import Tally
from quintain.trainer.whole_weights import refresh, whole

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
        ranks: Ranks | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """Take over `model`, in place.

        Args:
            temperature: the sampling temperature of the rollouts, > 0.
            total_steps: optimizer steps of the whole run, for the schedule; by default steps x minibatches_per_step.
            ranks: this process among the learner's, each of which makes a learner at the same time; None = alone.
            lora: train adapters beside the frozen model.

        Raises:
            WrappingError: the model is not wrapped as `ranks.config.strategy` says.
        """
        self.config = config
        self.objective = Objective(config)
        self.micro_batch_tokens = trainer.micro_batch_tokens
        self.packed = trainer.packing
        self.kernel: Kernel = trainer.logprob_kernel
        if self.packed:
            refuse_packing(model)
        self.temperature = temperature
        self.total_steps = total_steps or trainer.steps * config.minibatches_per_step
        self.policy_version = 0
        self.num_skipped_steps = 0
        self.num_skipped_in_a_row = 0
        self.ranks = ranks or Ranks()
        self.accelerator, self.lora = self.ranks.accelerator, lora
        model.eval()
        self.model_class, self.dtype = type(model), model.dtype
        self.full_model: PreTrainedModel | None = model if self.ranks.is_main else None
        """Rank 0's: the plain model with the live weights, adapters merged, that samplers and files read."""
        self.in_place = lora is None and self.ranks.config.strategy in ("single", "ddp")
        """Whether that is the trained model itself, not a copy refreshed after each batch."""
        trained: Any = model if self.in_place or not self.ranks.is_main else copy.deepcopy(model)
        self.reference: PreTrainedModel | None = None
        if config.kl_coef > 0 and lora is None:
            self.reference = copy.deepcopy(model).requires_grad_(False)
            self.reference = shard_like(self.accelerator, self.reference)
        if self.ranks.config.activation_checkpointing:
            checkpoint_activations(trained)
        if lora is not None:
            trained = with_adapters(trained, lora)
        self.model, self.optimizer = self.accelerator.prepare(trained, self._make_optimizer(trained))
        check_wrapping(self.model, self.ranks.config)
        settle(self.model)

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
        by_rank = self._minibatches(samples)
        staleness_max = self.policy_version - oldest_version(samples)
        learning_rate, num_skipped_before = self.learning_rate, self.num_skipped_steps
        self.ranks.announce("train_on")
        tally = self.update(by_rank)
        batches = [batch for parts in by_rank for part in parts for batch in part]
        num_minibatches = len(by_rank[0])
        return tally.metrics(self.config, num_minibatches=num_minibatches) | {
            "train/learning_rate": learning_rate,
            "train/num_rows": sum(len(b.token_ids_BT) for b in batches if bool(b.loss_mask_BT.any())),
            "train/padding_frac": padding_frac(batches),
            "train/minibatch_steps": num_minibatches,
            "train/num_skipped_steps": self.num_skipped_steps - num_skipped_before,
            "policy/version": self.policy_version,
            "policy/staleness_max": staleness_max,
        }

    def update(self, by_rank: list[list[list[Batch]]] | None = None) -> Tally:
        """Every rank's part of `train_on`: take its micro-batches from rank 0, step, count together.

        `by_rank` is `[rank][minibatch][micro-batch]` on rank 0, None on the others.
        """
        device = self.accelerator.device
        minibatches = [[batch.to(device) for batch in part] for part in self.ranks.scatter(by_rank)]
        tally = Tally()
        scored_late = 0 if self.objective.rejects else 1  # the first minibatch is scored as it is trained on
        for index, part in enumerate(minibatches[scored_late:], start=scored_late):
            minibatches[index] = self._with_old_logprobs(part, tally)
        if self.objective.rejects:
            minibatches = [self._without_rejected(part, tally) for part in minibatches]
        for index, batches in enumerate(minibatches):
            self._optimizer_step(batches, tally, first=index == 0)
        self.refresh_full_model()
        if self.ranks.size == 1:
            return tally
        tally, *others = self.ranks.gather(tally.to_cpu())
        return tally.merge(others)

    def refresh_full_model(self) -> None:
        """Bring the copy that is sampled from to the trained weights; every rank takes part."""
        if not self.in_place:
            refresh(self.full_model, self.accelerator.unwrap_model(self.model))

    def _minibatches(self, samples: Sequence[Sample]) -> list[list[list[Batch]]]:
        """`[rank][minibatch][micro-batch]`."""
        trained = [sample for sample in samples if sample.num_trained_tokens]
        if not trained:
            make_batches(samples, max_tokens=self.micro_batch_tokens)  # raises, saying why
            raise EmptyBatchError("no samples")
        parts = split_minibatches(trained, self.config.minibatches_per_step)
        num_ranks = self.ranks.size
        cut = [
            batches_of_ranks(part, num_ranks=num_ranks, max_tokens=self.micro_batch_tokens, packed=self.packed)
            for part in parts
        ]
        return [[part[rank] for part in cut] for rank in range(num_ranks)]

    def _with_old_logprobs(self, batches: list[Batch], tally: Tally) -> list[Batch]:
        if self.config.old_logprobs == "rollout":
            return batches
        with torch.no_grad():
            scored = [(batch, self._score(batch)) for batch in batches]
        for batch, scores in scored:
            tally.add_mismatch(batch, scores)
        return [replace(batch, old_logprobs_BT=scores.logprobs_BT) for batch, scores in scored]

    def _without_rejected(self, batches: list[Batch], tally: Tally) -> list[Batch]:
        kept = self.objective.reject(batches)
        totals = totals_of(kept)
        tally.add_count("rejected", totals_of(batches)[0] - totals[0])
        return with_denominators(kept, self.ranks.gather(totals))

    def _score(self, batch: Batch, model: Any = None) -> TokenScores:
        """What `model`, by default the trained one, says about the batch's tokens."""
        return score_tokens(
            model or self.model,
            batch,
            temperature=self.temperature,
            entropy_gradient=self.objective.entropy_gradient,
            kernel=self.kernel,
        )

    def _optimizer_step(self, batches: list[Batch], tally: Tally, *, first: bool) -> None:
        # The first always: with nothing to learn the gradient is 0, not absent, and Adam's momentum still acts.
        wanted = [self.objective.has_gradient(batch) or index == 0 for index, batch in enumerate(batches)]
        last = max(index for index, wants_gradient in enumerate(wanted) if wants_gradient)
        for index, (batch, wants_gradient) in enumerate(zip(batches, wanted, strict=True)):
            with self._gradients_kept_local(index != last), torch.set_grad_enabled(wants_gradient):
                scores = self._score(batch)
                parts = self.objective.loss(batch, scores, first=first, ref_logprobs_BT=self._reference_logprobs(batch))
                tally.add_loss(parts)
                if first and not self.objective.rejects:
                    tally.add_mismatch(batch, scores)
                if wants_gradient:
                    self.accelerator.backward(parts.loss)
        reshard(self.model)
        self._average_to_sum()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        norm = float(whole(grad_norm))
        tally.grad_norms.append(norm)
        if math.isfinite(norm):
            self.optimizer.step()
            self.policy_version += 1
            self.num_skipped_in_a_row = 0
        else:
            self.num_skipped_steps += 1
            self.num_skipped_in_a_row += 1
        self.optimizer.zero_grad()
        if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"the gradient norm was not finite in {self.num_skipped_in_a_row} optimizer steps in a row (policy "
                f"version {self.policy_version}): lower algorithm.learning_rate ({self.config.learning_rate}) or "
                f"algorithm.max_grad_norm ({self.config.max_grad_norm}) and start again, or resume from a checkpoint"
            )

    def _average_to_sum(self) -> None:
        """Wrappers average over ranks, and the denominator is the whole step's already.

        The gradients are scaled rather than the loss: models compute their norms in fp32, where a factor that is no
        power of two would round differently.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.ranks.size > 1 and gradients:
            torch._foreach_mul_(gradients, float(self.ranks.size))  # pyright: ignore[reportPrivateImportUsage]

    def _gradients_kept_local(self, local: bool) -> Any:
        """DDP adds the ranks up once, at the last micro-batch; FSDP2 at each, which keeps its gradients sharded."""
        if local and self.ranks.config.strategy == "ddp":
            return self.accelerator.no_sync(self.model)
        return nullcontext()

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        if not self.objective.kl_in_loss:
            return None
        reference = self.model if self.reference is None else self.reference
        off = adapters_off(self.model) if self.reference is None else nullcontext()
        with torch.no_grad(), off:
            return self._score(batch, reference).logprobs_BT

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The reference model's log-prob of each trained token, `[T]` a sample; rank 0 alone, which has it whole."""
        assert self.reference is not None
        reference = self.reference

        def score(batch: Batch) -> torch.Tensor:
            return self._score(batch, reference).logprobs_BT

        return per_token(samples, score, max_tokens=self.micro_batch_tokens, device=self.accelerator.device)

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on besides weights and optimizer: counters and random states."""
        numpy_state: Any = np.random.get_state(legacy=False)
        numpy_state["state"]["key"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
        return {
            "policy_version": self.policy_version,
            "num_skipped_steps": self.num_skipped_steps,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "rng": {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
                "numpy": numpy_state,
                "python": random.getstate(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set what `state_dict` gave; weights and optimizer come apart (`load`)."""
        self.policy_version = state["policy_version"]
        self.num_skipped_steps = state["num_skipped_steps"]
        self.num_skipped_in_a_row = state.get("num_skipped_in_a_row", 0)
        rng = state["rng"]
        torch.set_rng_state(rng["torch"])
        if rng["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(rng["cuda"])
        numpy_state = copy.deepcopy(rng["numpy"])
        numpy_state["state"]["key"] = numpy_state["state"]["key"].numpy().astype(np.uint32)
        np.random.set_state(numpy_state)
        random.setstate(rng["python"])

    def save(self, folder: Path) -> None:
        """Write the learner's files into `folder`, which every rank sees (`learner_files`).

        Raises:
            CheckpointError: a weight is not finite; nothing was written.
        """
        self.ranks.announce("save", folder)
        learner_files.save(self, folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on any number of ranks: weights into the model that this learner has, then the state.

        Raises:
            RuntimeError: the weights are of another architecture.
        """
        self.ranks.announce("load", folder)
        learner_files.load(self, folder)

    def export_model(self, folder: Path) -> None:
        """Write the live weights, adapters merged, as a Hugging Face folder; rank 0 only, and no other is needed."""
        assert self.full_model is not None
        save_model(self.full_model, folder)

    def checkpoint_bytes(self) -> int:
        """About how much `save` writes: the weights, twice as much of Adam's moments, the reference or the base."""
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in self.model.parameters()]
        weights = sum(size for size, _ in sizes)
        trained = sum(size for size, is_trained in sizes if is_trained)
        return weights * (1 if self.reference is None and self.lora is None else 2) + 2 * trained


def oldest_version(samples: Sequence[Sample]) -> int:
    """The oldest policy version among the trained tokens; samples must have some."""
    return min(v for s in samples for v, trained in zip(s.policy_versions, s.loss_mask, strict=True) if trained)
