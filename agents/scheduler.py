"""Many trajectories at once: the workers, their environments, retries and the breaker.

    draws x members ──> queue ──> worker (a policy slot + an environment) ──run_trajectory──> groups
                          ^── failed members, next attempt ──╯     N at once

Invariants:
- Every worker is in its policy slot before the first one starts, and stays there until nothing is left to do: an engine
  that samples when all slots wait sees the same batches whatever the tools' timing.
- Members start in the order of (draw, member), and a member that failed goes before all that have not begun: old groups
  finish, however slow their task or however often it fails. Groups come back in the order of the draws.
- A failed member is tried again with the next attempt number; where all attempts failed, the last failure stays in its
  group as data. Past `max_failure_frac` failed attempts, `RolloutBreaker` stops the run.
- An environment whose trajectory failed or ran out of time is never used again.
- Cancellation (Ctrl-C, a deadline, an error elsewhere) reaches the engine (the request is ended) and the tool: what its
  box runs is killed (`ToolEnv.interrupt`).

What waits for what: a worker waits for the engine or an environment, never past its trajectory's deadline; `collect`
waits for the workers.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from quintain.agents.config import RolloutConfig
from quintain.agents.env_threads import EnvThreads, ThreadedEnv
from quintain.agents.loop_lag import LoopLagMeter
from quintain.agents.outcome import StopReason
from quintain.agents.policy import Policy
from quintain.agents.renderer import ChatRenderer, TemplateError
from quintain.agents.rollout import Assignment, RolloutSetup, run_trajectory
from quintain.agents.trajectory import Group, Trajectory
from quintain.envs import Task, ToolEnv

MIN_ATTEMPTS_TO_BREAK = 8
"""Fewer attempts say too little while retries are left."""
DEFAULT_ENV_THREADS = 16
"""Where nothing says how many boxes there are."""
CLOSE_GRACE_S = 5.0
"""How long `close` waits for environment calls that still run."""


class RolloutBreaker(RuntimeError):
    """Too many attempts failed; the message names the most common error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One task, drawn for one group."""

    number: int
    """Unique in the run and purpose; enters the seeds."""
    task: Task


@dataclass(slots=True, kw_only=True)
class CollectStats:
    """Counts of one `collect`."""

    num_planned: int = 0
    """Trajectories asked for."""
    num_attempts: int = 0
    """Finished attempts, retries included."""
    num_failed: int = 0
    """Attempts with an environment, infrastructure or verifier outcome."""
    num_retries: int = 0
    """Attempts made again."""
    num_abandoned_calls: int = 0
    """Environment calls given up while they ran."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failures by what broke."""
    loop_lag_max_s: float = 0.0
    """Longest time that the event loop left something waiting that was due."""


class RolloutRunner:
    """Makes groups of trajectories. Owns its event loop, threads and environments; use from one thread, then `close`.

    `collect` runs the loop in the calling thread, so Ctrl-C cancels the trajectories and waits for them before
    KeyboardInterrupt goes on.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        renderer: ChatRenderer,
        make_env: Callable[[], ToolEnv],
        config: RolloutConfig,
        seed: int,
        max_concurrent: int | None = None,
        env_threads: int | None = None,
    ) -> None:
        """`max_concurrent` goes before the config's; `env_threads` is for a config that names none.

        Raises TemplateError where the template rewrites history and `config.history` is `refuse`.
        """
        if config.history == "refuse" and (broken := renderer.rewrites_reasoning()):
            raise TemplateError(broken)
        self._policy = policy
        self._renderer = renderer
        self._make_env = make_env
        self._config = config
        self._seed = seed
        self._max_concurrent = max_concurrent or config.max_concurrent
        self._threads = EnvThreads(config.env_threads or env_threads or DEFAULT_ENV_THREADS)
        self._loop = asyncio.Runner()
        self._idle_envs: list[ThreadedEnv] = []
        self._closed = False
        self.stats = CollectStats()
        """Of the newest `collect`."""

    def collect(
        self,
        draws: Sequence[Draw],
        *,
        group_size: int,
        temperature: float | None = None,
        purpose: str = "train",
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> list[Group]:
        """`group_size` trajectories for each draw; blocks until all are done.

        `on_trajectory` is called, in this thread, with each trajectory that is final. Raises RolloutBreaker, and what
        `make_env` and `on_trajectory` raise. When it returns or raises, every trajectory has ended, every box is given
        back and the policy samples nothing: the weights may be changed.
        """
        numbers = Counter(draw.number for draw in draws)
        if any(count > 1 for count in numbers.values()):
            raise ValueError(f"draw number {numbers.most_common(1)[0][0]} was given twice; numbers name random streams")
        setup = RolloutSetup(policy=self._policy, renderer=self._renderer, config=self._config, temperature=temperature)
        collection = _Collection(self, setup, self._threads, self._max_concurrent, on_trajectory)
        for draw in draws:
            for member in range(group_size):
                collection.add(
                    Assignment(task=draw.task, draw=draw.number, member=member, run_seed=self._seed, purpose=purpose)
                )
        self.stats = collection.stats
        collection.stats.num_planned = len(collection.todo)
        try:
            self._loop.run(collection.run())
        except BaseException:
            # A KeyboardInterrupt that the program's own signal handler raises leaves tasks behind in the loop.
            self._loop.run(_cancel_all(self._policy))
            raise
        return [
            Group(
                task_id=draw.task.id,
                draw=draw.number,
                trajectories=tuple(collection.results[draw.number, member] for member in range(group_size)),
            )
            for draw in draws
        ]

    def close(self) -> None:
        """Close all environments and end the threads. Idempotent. The policy is not ours to close."""
        if self._closed:
            return
        self._closed = True
        envs, self._idle_envs = self._idle_envs, []
        try:
            self._loop.run(self._close(envs))
        finally:
            self._loop.close()
            self._threads.close()

    async def take_env(self) -> ThreadedEnv:
        """An environment that nobody uses, made where there is none."""
        if self._idle_envs:
            return self._idle_envs.pop()
        deadline_s = self._config.deadline_s
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                return ThreadedEnv(await self._threads.call(self._make_env), self._threads)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(f"making an environment took longer than rollout.deadline_s = {deadline_s}") from None

    async def give_back(self, env: ThreadedEnv) -> None:
        """Keep it for the next trajectories; it must not hold a box meanwhile."""
        if env.abandoned:
            return
        if env.env.sandbox_scope == "trajectory":
            await env.close()
        self._idle_envs.append(env)

    async def _close(self, envs: Sequence[ThreadedEnv]) -> None:
        await asyncio.gather(*(env.close() for env in envs))
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                while self._threads.num_stuck:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass  # the threads are daemons; their environments are lost


class _Collection:
    """The state of one `collect`."""

    def __init__(
        self,
        runner: RolloutRunner,
        setup: RolloutSetup,
        threads: EnvThreads,
        max_concurrent: int,
        on_trajectory: Callable[[Trajectory], None] | None,
    ) -> None:
        self._runner, self._setup, self._threads = runner, setup, threads
        self._max_concurrent = max_concurrent
        self._on_trajectory = on_trajectory
        self._num_abandoned_before = threads.num_abandoned
        self.todo: list[tuple[int, Assignment]] = []
        """A heap: place in the order of (draw, member), and what to make there."""
        self.results: dict[tuple[int, int], Trajectory] = {}
        self.stats = CollectStats()

    def add(self, assignment: Assignment) -> None:
        """Behind all that were added before."""
        heapq.heappush(self.todo, (len(self.todo), assignment))

    async def run(self) -> None:
        """Raises the first error of a worker after all of them have ended."""
        slots: list[AsyncExitStack] = []
        workers: list[asyncio.Task[None]] = []
        meter = LoopLagMeter()
        lag = asyncio.create_task(meter.run())
        try:
            for _ in range(min(self._max_concurrent, len(self.todo))):
                slots.append(AsyncExitStack())
                await slots[-1].enter_async_context(self._setup.policy.slot())
            workers = [asyncio.create_task(self._work(slot)) for slot in slots]
            if workers:
                await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for worker in workers:
                worker.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
            for slot in slots:  # a worker that was cancelled before it began has not left its slot
                await slot.aclose()
            await self._setup.policy.drain()  # rollouts past their deadline left what they had asked for behind
            lag.cancel()
            await asyncio.wait([lag])
            self.stats.loop_lag_max_s = meter.max_s
            self.stats.num_abandoned_calls = self._threads.num_abandoned - self._num_abandoned_before
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        self._break_if(self.stats.num_attempts)

    async def _work(self, slot: AsyncExitStack) -> None:
        env: ThreadedEnv | None = None
        try:
            async with slot:
                while self.todo:
                    place, assignment = heapq.heappop(self.todo)
                    if env is None:
                        env = await self._runner.take_env()
                    trajectory = await run_trajectory(self._setup, assignment, env)
                    if trajectory.outcome.is_failure or trajectory.stop_reason is StopReason.DEADLINE:
                        await env.close()
                        env = None
                    self._finish(place, assignment, trajectory)
        finally:
            if env is not None:
                await self._runner.give_back(env)

    def _finish(self, place: int, assignment: Assignment, trajectory: Trajectory) -> None:
        """Keep the trajectory, or put its next attempt where it was in the queue."""
        self.stats.num_attempts += 1
        if self._threads.num_stuck > self._threads.num_threads:
            raise RolloutBreaker(
                f"{self._threads.num_stuck} environment calls are past their deadline and never returned; "
                "give the environment's tools time limits of their own"
            )
        if trajectory.outcome.is_failure:
            self.stats.num_failed += 1
            self.stats.errors[f"{trajectory.stop_reason.value}: {trajectory.error}"] += 1
            self._break_if(max(self.stats.num_planned, MIN_ATTEMPTS_TO_BREAK))
            if assignment.attempt < self._setup.config.num_retries:
                self.stats.num_retries += 1
                heapq.heappush(self.todo, (place, replace(assignment, attempt=assignment.attempt + 1)))
                return
        self.results[assignment.draw, assignment.member] = trajectory
        if self._on_trajectory is not None:
            self._on_trajectory(trajectory)

    def _break_if(self, min_attempts: int) -> None:
        """Raises RolloutBreaker where too many of at least `min_attempts` attempts failed."""
        stats, limit = self.stats, self._setup.config.max_failure_frac
        if stats.num_attempts < min_attempts or stats.num_failed <= limit * stats.num_attempts:
            return
        error, count = stats.errors.most_common(1)[0]
        raise RolloutBreaker(
            f"{stats.num_failed} of {stats.num_attempts} rollout attempts failed, more than rollout.max_failure_frac = "
            f"{limit}; {count} of them with {error}"
        )


async def _cancel_all(policy: Policy) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await policy.drain()
