"""Supervised warm-up on an environment's demonstrations, so that a random model has something to reinforce.

    clean demonstrations ──> AdamW until greedy success is near the target ──> cool-down to learning rate 0 ──> check
    mixed-quality ones   ──> `mixed_steps` more, so that RL has bad habits to unlearn      (skipped where 0)
    cache                ──> the result, named by everything that made it

Invariants: only what the assistant says is trained; the schedule follows the checks, not the cap, so a stage that
learns quickly ends quickly with a model that has settled; order, data and checks follow from the seed; the clean stage
reaches the target or the warm start is an error (a weak start is what spoils a later RL run). Weights change in place.

Not done here: building the model, opening boxes, RL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError

from quintain.agents.renderer import ChatRenderer
from quintain.agents.seeds import derive_seed
from quintain.envs import Message, ToolEnv
from quintain.trainer.batch import Batch
from quintain.trainer.config import WarmStartConfig
from quintain.trainer.logprobs import score_tokens
from quintain.trainer.progress import PhaseProgress, Progress
from quintain.trainer.warm_start_cache import WarmStartCache, WarmStartReport, cache_key

ADAM_BETAS = (0.9, 0.98)  # 0.95 for the second one takes twice the steps here
MAX_GRAD_NORM = 1.0
PAD_MULTIPLE = 8
COOLDOWN_FROM = 0.8
"""A check at this share of the target starts the cool-down: settling is worth about 0.1 of greedy success."""
MIXED_WARMUP_STEPS = 10

Conversation = tuple[Message, ...]


class WarmStartError(RuntimeError):
    """The warm start did not reach what was asked of it; the model's weights are of no use."""


class Evaluate(Protocol):
    """Success on held-out tasks of the model as it is."""

    def __call__(self, *, greedy: bool, num_tasks: int) -> float:
        """Share of the first `num_tasks` held-out tasks solved, 0 to 1; NaN where none could be judged."""
        ...


def warm_start(
    model: Any,
    tokenizer: Any,
    renderer: ChatRenderer,
    env: ToolEnv,
    config: WarmStartConfig,
    *,
    seed: int,
    evaluate: Evaluate,
    progress: Progress,
) -> WarmStartReport:
    """Train `model` in place, or load what an earlier call with the same model, data, settings and seed made.

    Raises WarmStartError where the environment has no demonstrations or the target is not reached within the cap.
    """
    started = time.perf_counter()
    clean = demonstrations(env, config.num_demonstrations, bad_frac=0.0, seed=derive_seed(seed, "warm-start-clean"))
    num_mixed = config.mixed_steps * config.batch_size
    mixed_seed = derive_seed(seed, "warm-start-mixed")
    mixed = demonstrations(env, num_mixed, bad_frac=config.mixed_bad_frac, seed=mixed_seed)
    cache = WarmStartCache(Path(config.cache_dir))
    key = cache_key(model, tokenizer, env.tool_specs, [clean, mixed], config, seed)
    report = cache.load(key, model)
    if report is not None:
        progress.message(f"warm start: taken from {report.path} ({_reached(report)})")
        return report

    was_training = model.training
    model.eval()  # no dropout: the model is to say what it was shown
    rows = _Rows(renderer, env, clean)
    num_steps, success = _clean_stage(model, rows, config, derive_seed(seed, "warm-start-order"), evaluate, progress)
    sampled = None
    progress.message(f"warm start: greedy success {success:.2f} on held-out tasks after {num_steps} steps")
    if config.mixed_steps:
        progress.message(
            f"warm start: {config.mixed_steps} more steps, with bad habits mixed in on purpose so that RL has "
            "something to correct; success drops"
        )
        _mixed_stage(model, _Rows(renderer, env, mixed), config, progress)
        sampled = evaluate(greedy=False, num_tasks=config.num_check_tasks)
    model.train(was_training)
    report = WarmStartReport(
        num_steps=num_steps,
        greedy_success=success,
        sampled_success=sampled,
        seconds=time.perf_counter() - started,
        path=cache.path_of(key),
        from_cache=False,
    )
    try:
        cache.store(key, model, tokenizer, report)
    except (OSError, SafetensorError) as error:  # the latter is what a full disk gives while weights are written
        progress.message(
            f"warm start: not kept for the next run ({error}); this run goes on with it. "
            f"Set warm_start.cache_dir ({config.cache_dir}) to a folder that can be written"
        )
    return report


def _reached(report: WarmStartReport) -> str:
    mixed = report.sampled_success
    then = (
        "" if mixed is None else f"; then bad habits were mixed in on purpose, for RL to correct: {mixed:.2f} sampled"
    )
    return f"greedy success {report.greedy_success:.2f}{then}"


def demonstrations(env: ToolEnv, count: int, *, bad_frac: float, seed: int) -> list[Conversation]:
    """`count` whole conversations on tasks of the environment's split, `bad_frac` of them showing bad habits.

    Every task is used once before one is used again. Raises WarmStartError where the environment offers none.
    """
    rng = np.random.default_rng(seed)
    found: list[Conversation] = []
    order = np.empty(0, dtype=np.int64)
    for number in range(count):
        place = number % env.num_tasks
        if place == 0:
            order = rng.permutation(env.num_tasks)
        task = env.task_at(int(order[place]))
        reply = env.demonstrate(task, clean=bool(rng.random() >= bad_frac), rng=rng)
        if reply is None:
            raise WarmStartError(
                f"{type(env).__name__} offers no demonstration for task {task.id!r}: write its `demonstrate`, or set "
                "warm_start.enabled = false and start from a trained model (model.path)"
            )
        system = (Message(role="system", content=env.system_prompt),) if env.system_prompt else ()
        found.append((*system, Message(role="user", content=task.prompt), *reply))
    return found


class _Rows:
    """Demonstrations as token rows, rendered when first used."""

    def __init__(self, renderer: ChatRenderer, env: ToolEnv, conversations: Sequence[Conversation]) -> None:
        self._renderer, self._tools, self._conversations = renderer, env.tool_specs, conversations
        self._rendered: dict[int, tuple[tuple[int, ...], tuple[bool, ...]]] = {}

    def __len__(self) -> int:
        return len(self._conversations)

    def batch(self, indices: Sequence[int], device: torch.device) -> Batch:
        rows = [self._row(index) for index in indices]
        width = -(-max(len(ids) for ids, _ in rows) // PAD_MULTIPLE) * PAD_MULTIPLE
        ids_BT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in rows])
        mask_BT = torch.tensor([[*trained, *[False] * (width - len(trained))] for _, trained in rows])
        lengths_B = torch.tensor([len(ids) for ids, _ in rows])
        positions_BT = torch.arange(width).expand(len(rows), -1)
        nothing_BT = torch.full(ids_BT.shape, math.nan)
        return Batch(
            token_ids_BT=ids_BT,
            loss_mask_BT=mask_BT,
            rollout_logprobs_BT=nothing_BT,
            old_logprobs_BT=nothing_BT,
            advantages_BT=torch.ones(ids_BT.shape),
            segment_ids_BT=torch.where(positions_BT < lengths_B[:, None], 0, -1),
            position_ids_BT=positions_BT,
            denominator=int(mask_BT.sum()),
            num_sequences=len(rows),
            has_signal=True,
        ).to(device)

    def _row(self, index: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        row = self._rendered.get(index)
        if row is None:
            row = self._renderer.demonstration_row(self._conversations[index], self._tools)
            self._rendered[index] = row
        return row


class _Supervised:
    """AdamW on the assistant's tokens: loss = - sum of log-probs / trained tokens of the batch."""

    def __init__(self, model: Any, rows: _Rows, order: Callable[[], Sequence[int]]) -> None:
        self._model, self._rows, self._order = model, rows, order
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=ADAM_BETAS, weight_decay=0.01, fused=True)
        self._device = next(model.parameters()).device

    def step(self, learning_rate: float) -> float:
        """One optimizer step; the loss before it."""
        batch = self._rows.batch(self._order(), self._device)
        scores = score_tokens(self._model, batch, temperature=1.0)
        loss = -scores.logprobs_BT[scores.trained_BT].sum() / batch.denominator
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


class _Order:
    """Batches of row indices: shuffled anew each time all rows were used."""

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self._num_rows, self._batch_size = num_rows, batch_size
        self._rng = np.random.default_rng(seed)
        self._left: list[int] = []

    def __call__(self) -> list[int]:
        while len(self._left) < self._batch_size:
            self._left += self._rng.permutation(self._num_rows).tolist()
        batch, self._left = self._left[: self._batch_size], self._left[self._batch_size :]
        return batch


def _clean_stage(
    model: Any, rows: _Rows, config: WarmStartConfig, seed: int, evaluate: Evaluate, progress: Progress
) -> tuple[int, float]:
    """Constant learning rate until a check comes near the target, then a cool-down and a check that must reach it.

    Where that fails, training goes on at the peak, to the next cool-down. Returns the steps taken and the greedy
    success reached. Raises WarmStartError at the cap.
    """
    trainer = _Supervised(model, rows, _Order(len(rows), config.batch_size, seed))
    best, cooling_until = 0.0, 0
    with progress.phase("warm start", total=config.max_steps, at_most=True) as phase:
        for step in range(1, config.max_steps + 1):
            if cooling_until:
                rate = config.learning_rate * (cooling_until - step + 1) / (config.cooldown_steps + 1)
            else:
                rate = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
            loss = trainer.step(rate)
            phase.advance(1)
            at_end = step in (cooling_until, config.max_steps)
            due = step >= config.first_check_step and step % config.check_every_steps == 0
            if not (at_end or (due and not cooling_until)):
                continue
            success = _checked(evaluate, config, phase, step, loss)
            best = max(best, success)
            if success >= config.target_success and (at_end or not config.cooldown_steps):
                return step, success
            near = success >= COOLDOWN_FROM * config.target_success and not at_end
            cooling_until = min(step + config.cooldown_steps, config.max_steps) if near else 0
    raise WarmStartError(
        f"warm start: greedy success on {config.num_check_tasks} held-out tasks reached {best:.2f} in "
        f"{config.max_steps} steps, and warm_start.target_success is {config.target_success}. Raise "
        "warm_start.max_steps, use a larger model (model.scratch.hidden_size, num_layers) or another seed, give "
        "simpler demonstrations, or lower the target"
    )


def _checked(evaluate: Evaluate, config: WarmStartConfig, phase: PhaseProgress, step: int, loss: float) -> float:
    success = evaluate(greedy=True, num_tasks=config.num_check_tasks)
    if math.isnan(success):
        raise WarmStartError(
            f"warm start: none of {config.num_check_tasks} held-out tasks could be judged at step {step}"
        )
    phase.note(f"greedy success {success:.2f}, loss {loss:.3f}")
    return success


def _mixed_stage(model: Any, rows: _Rows, config: WarmStartConfig, progress: Progress) -> None:
    """One pass over mixed-quality demonstrations, the learning rate falling to 0: sampling then shows the mixture."""
    numbers = iter(range(0, len(rows), config.batch_size))

    def in_order() -> Sequence[int]:
        first = next(numbers)
        return range(first, first + config.batch_size)

    trainer = _Supervised(model, rows, in_order)
    with progress.phase("warm start, bad habits", total=config.mixed_steps) as phase:
        for step in range(1, config.mixed_steps + 1):
            rising = step / MIXED_WARMUP_STEPS
            falling = (config.mixed_steps - step + 1) / max(1, config.mixed_steps - MIXED_WARMUP_STEPS)
            trainer.step(config.mixed_learning_rate * min(1.0, rising, falling))
            phase.advance(1)
