"""The training loop, synchronous: one batch of groups is sampled, scored, trained on; then the next.

    task order ──draws──> runner (policy x environments) ──groups──> advantages ──samples──> learner (then the critic)
      ^                       ^                              │                                  │
      └─ groups without spread, with dynamic sampling ───────┘                                  │
                              └──── WeightDelivery: every engine has the weights before it samples ┘

| who    | waits for | ends by                                                |
|--------|-----------|--------------------------------------------------------|
| loop   | groups    | each trajectory's deadline; the runner's failure breaker |
| loop   | learner   | one batch of bounded size                              |
| loop   | engines   | the deadline of each stage of a delivery (`trainer/weights.py`) |
| runner | policy    | the generation's token limit                           |
| runner | sandboxes | `sandbox.acquire_timeout_s`, each command's deadline     |

Invariants: `step` counts finished batches (1 after the first); every token of batch `n` was sampled by the version
that batch `n` is trained at (staleness 0); a checkpoint is written only between batches. The loop builds nothing: the
recipe layer hands it ready parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quintain.agents.evaluation import EvalResult
from quintain.agents.scheduler import Draw, RolloutRunner
from quintain.agents.store import TrajectoryStore
from quintain.agents.trajectory import Group
from quintain.envs import Task
from quintain.trainer.advantages import is_informative
from quintain.trainer.batch import EmptyBatchError
from quintain.trainer.checkpoint import CheckpointError, Checkpoints, SavedTogether
from quintain.trainer.config import AlgorithmConfig, CheckpointConfig, EvalConfig, TrainerConfig
from quintain.trainer.credit import Credit, credit
from quintain.trainer.critic import Critic
from quintain.trainer.interrupts import interrupts_held
from quintain.trainer.learner import Learner
from quintain.trainer.ledger import BatchLedger
from quintain.trainer.metrics import rollout_metrics
from quintain.trainer.progress import Progress
from quintain.trainer.status import StatusFile
from quintain.trainer.task_order import TaskOrder
from quintain.trainer.tracking import Trackers
from quintain.trainer.weights import WeightDelivery


@dataclass(slots=True)
class LoopState:
    """What a resumed run needs to know of the past, besides the learner's own state."""

    step: int = 0
    """Finished batches."""
    next_draw: int = 0
    """Number of the next task draw."""
    success_before: float | None = None
    """Sampled success on held-out tasks before the first batch."""
    success_after: float | None = None
    """The newest evaluation's."""
    reward_first: float | None = None
    """Mean reward of the first batch."""
    reward_last: float | None = None
    max_staleness_seen: int = 0
    num_sampled_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall clock by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The settings that the loop itself reads."""

    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    evaluation: EvalConfig
    checkpoint: CheckpointConfig


class TrainingLoop:
    """Runs from `state.step` to `config.trainer.steps`. One use: build, `run`, drop."""

    def __init__(
        self,
        config: LoopConfig,
        *,
        runner: RolloutRunner,
        learner: Learner,
        weights: WeightDelivery,
        evaluate: Callable[..., EvalResult],
        task_at: Callable[[int], Task],
        order: TaskOrder,
        store: TrajectoryStore,
        trackers: Trackers,
        checkpoints: Checkpoints,
        status: StatusFile,
        progress: Progress,
        state: LoopState,
        ledger: BatchLedger | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.config, self.runner, self.learner, self.weights = config, runner, learner, weights
        self.evaluate, self.task_at, self.order = evaluate, task_at, order
        self.store, self.trackers, self.checkpoints = store, trackers, checkpoints
        self.status, self.progress, self.state = status, progress, state
        self.ledger, self.critic = ledger, critic
        self.saved = learner if critic is None else SavedTogether(learner, critic)
        """What a checkpoint holds."""
        self._between_batches = True
        self._saved_step = state.step if state.step else -1
        self._delivered_version: int | None = None
        self._delivery_s = 0.0  # since the newest record
        self._loop_lag_s = 0.0  # as well

    def run(self) -> LoopState:
        """Train to the last step. An exception that meets the learner between two batches passes on after a save.

        Where that save fails too, the exception says so in a note and still is the one that is raised.
        """
        steps = self.config.trainer.steps
        try:
            if self.state.step == 0:
                self._evaluate()
            with self.progress.phase("steps", total=steps) as bar:
                bar.advance(self.state.step)
                while self.state.step < steps:
                    note = self._one_batch()
                    bar.advance(1)
                    bar.note(note)
                    if self._due(self.config.evaluation.every_steps):
                        self._evaluate()
                    if self._due(self.config.checkpoint.every_steps):
                        self._save()
        except BaseException as error:  # re-raised: an interrupt must not lose the batches since the last checkpoint
            if self._between_batches and not isinstance(error, CheckpointError):
                try:
                    self._save()
                except Exception as failure:  # noqa: BLE001 - teardown: what ended the run is what must be reported
                    error.add_note(f"no checkpoint of step {self.state.step} was written on the way out: {failure}")
            raise
        return self.state

    def _one_batch(self) -> str:
        """Sample, score, train, record one batch; returns a short note for the progress line."""
        self._deliver()
        started = time.perf_counter()
        groups = self._collect()
        with interrupts_held():  # an update and its record are whole or absent
            return self._learn_from(groups, started, time.perf_counter())

    def _learn_from(self, groups: Sequence[Group], started: float, sampled: float) -> str:
        """Train on groups whose sampling began at `started` and ended at `sampled`; record the batch."""
        state, algorithm = self.state, self.config.algorithm
        given = credit(
            groups,
            algorithm,
            reference_logprobs=self.learner.reference_logprobs,
            values=self.critic.values if self.critic else None,
        )
        sampled_by = self.learner.policy_version
        metrics = self._train_on(given)
        state.step += 1
        state.next_draw += len(groups)
        self._between_batches = True
        trained = time.perf_counter()

        metrics |= rollout_metrics(groups, min_valid_members=algorithm.min_valid_members)
        if algorithm.dynamic_sampling:
            num_informative = sum(is_informative(group, algorithm) for group in groups)
            metrics["reward/num_filtered_groups"] = len(groups) - num_informative
            metrics["reward/num_missing_groups"] = algorithm.tasks_per_step - num_informative
        if given.kl_penalty_mean is not None:
            metrics["reward/kl_penalty_mean"] = given.kl_penalty_mean
        num_tokens = sum(t.num_sampled_tokens for g in groups for t in g.trajectories)
        metrics |= {
            "rollout/event_loop_lag_max_s": self._loop_lag_s,
            "time/delivery_s": self._delivery_s,
            "time/rollout_s": sampled - started,
            "time/train_s": trained - sampled,
            "time/step_s": trained - started,
            "perf/tokens_per_second": num_tokens / (trained - started),
            "policy/version": float(self.learner.policy_version),
        }
        self._delivery_s = self._loop_lag_s = 0.0
        state.num_sampled_tokens += num_tokens
        state.max_staleness_seen = max(state.max_staleness_seen, int(metrics["policy/staleness_max"]))
        reward = metrics.get("reward/mean")  # absent where no trajectory is valid
        state.reward_last = state.reward_last if reward is None else reward
        state.reward_first = state.reward_last if state.reward_first is None else state.reward_first
        self._add_seconds("rollout", sampled - started)
        self._add_seconds("train", trained - sampled)
        self._record(groups, given.advantages_P_G, metrics, sampled_by)
        if reward is None:
            return "no valid trajectory"
        return f"reward {reward:.3f} success {metrics['rollout/success_frac']:.2f}"

    def _train_on(self, given: Credit) -> dict[str, float]:
        """One batch of updates; a batch that nothing can be learned from is passed over, counted."""
        samples = given.samples
        if self.ledger is not None:
            self.ledger.admit(self.state.step + 1, samples, policy_version=self.learner.policy_version)
        self._between_batches = False
        try:
            metrics = self.learner.train_on(samples)
            if self.critic is not None:
                metrics |= self.critic.train_on(given)
        except EmptyBatchError as error:
            self.progress.message(f"step {self.state.step + 1}: no update: {error}")
            metrics = {"train/num_skipped_batches": 1.0, "policy/staleness_max": 0.0}
        return metrics

    def _deliver(self) -> None:
        """Every engine has the learner's weights afterwards, also those of a resumed run (D12)."""
        version = self.learner.policy_version
        if version == self._delivered_version:
            return
        started = time.perf_counter()
        self.status.update(phase="weights", step=self.state.step)
        self.weights.deliver(version)
        self._delivered_version = version
        self.status.update(policy_version=version)
        seconds = time.perf_counter() - started
        self._delivery_s += seconds
        self._add_seconds("delivery", seconds)

    def _collect(self) -> list[Group]:
        """The groups of one batch: `tasks_per_step`, or with dynamic sampling as many as it takes to have so many that
        teach something, up to the cap. Groups that are not needed are never drawn."""
        algorithm = self.config.algorithm
        most = algorithm.tasks_per_step * algorithm.max_draws_factor
        groups = self._draw(algorithm.tasks_per_step, after=0)
        while algorithm.dynamic_sampling:
            num_informative = sum(is_informative(group, algorithm) for group in groups)
            num_more = min(algorithm.tasks_per_step - num_informative, most - len(groups))
            if num_more <= 0:
                break
            groups += self._draw(num_more, after=len(groups))
        return groups

    def _draw(self, num_draws: int, *, after: int) -> list[Group]:
        """Groups of the next `num_draws` task draws, `after` of this batch having been drawn."""
        algorithm = self.config.algorithm
        first = self.state.next_draw + after
        draws = [Draw(number=n, task=self.task_at(self.order.index(n))) for n in range(first, first + num_draws)]
        self.status.update(phase="rollouts", step=self.state.step)
        total = len(draws) * algorithm.group_size
        with self.progress.phase("rollouts", total=total) as bar:
            groups = self.runner.collect(
                draws, group_size=algorithm.group_size, on_trajectory=lambda _trajectory: bar.advance(1)
            )
        self._loop_lag_s = max(self._loop_lag_s, self.runner.stats.loop_lag_max_s)
        return groups

    def _record(
        self,
        groups: Sequence[Group],
        advantages_P_G: Sequence[Sequence[float]],
        metrics: dict[str, float],
        sampled_by: int,
    ) -> None:
        started = time.perf_counter()
        self.store.write_step(self.state.step, groups, advantages_P_G)
        self.trackers.log_metrics(self.state.step, metrics)
        self.trackers.log_groups(self.state.step, groups, advantages_P_G, policy_version=sampled_by)
        self._add_seconds("record", time.perf_counter() - started)

    def _evaluate(self) -> None:
        self._deliver()
        started = time.perf_counter()
        self.status.update(phase="evaluation", step=self.state.step)
        metrics: dict[str, float] = {}
        for name, greedy in (("sampled", False), *((("greedy", True),) if self.config.evaluation.greedy else ())):
            result = self.evaluate(greedy=greedy)
            metrics[f"eval/success_frac_{name}"] = result.success_frac
            metrics[f"eval/reward_mean_{name}"] = result.reward_mean
        self.state.success_after = metrics["eval/success_frac_sampled"]
        if self.state.success_before is None:
            self.state.success_before = self.state.success_after
        self.trackers.log_metrics(self.state.step, metrics)
        shown = ", ".join(f"{key.rsplit('_', 1)[1]} {metrics[key]:.3f}" for key in metrics if "success" in key)
        self.progress.message(f"held-out success at step {self.state.step}: {shown}")
        self._add_seconds("evaluation", time.perf_counter() - started)

    def _save(self) -> Path | None:
        if self._saved_step == self.state.step:
            return None
        started = time.perf_counter()
        self.status.update(phase="save", step=self.state.step)
        with self.progress.phase("save", total=None):
            path = self.checkpoints.save(self.state.step, self.saved, asdict(self.state))
        self._saved_step = self.state.step
        self._add_seconds("save", time.perf_counter() - started)
        return path

    def _due(self, every: int) -> bool:
        step = self.state.step
        return step == self.config.trainer.steps or (every > 0 and step % every == 0)

    def _add_seconds(self, phase: str, seconds: float) -> None:
        self.state.seconds[phase] = self.state.seconds.get(phase, 0.0) + seconds
