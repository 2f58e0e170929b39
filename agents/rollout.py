"""One trajectory: env x policy -> turns, token rows, reward and a typed outcome. And one group of them.

    reset ──> messages ──render──> prompt ids ──policy──> completion ──parse──> message ──env.step──> new messages ─╮
                                       ^────────────── delta ids (only what the template adds) ────────────────────╯

Invariants:
- One absolute deadline a trajectory bounds generation, tools and reward together.
- `run_trajectory` returns a `Trajectory` whatever breaks; only cancellation passes through. A failure has reward NaN.
- Every row ends with a sampled token; a reply that was cut is never executed; no limit replaces the reward of a
  trajectory that the environment ended.

It does not retry and does not schedule: `scheduler.py` does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quintain.agents.completion import Completion, GenerateRequest, RequestKey, SamplingParams
from quintain.agents.config import RolloutConfig
from quintain.agents.env_threads import StepResult, ThreadedEnv
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.policy import Policy, PolicyError
from quintain.agents.renderer import ChatRenderer
from quintain.agents.rows import RowBuilder
from quintain.agents.seeds import derive_seed
from quintain.agents.tool_calls import ParsedReply
from quintain.agents.trajectory import Group, Trajectory, Turn
from quintain.envs import Message, Task, VerifierError
from quintain.sandbox import SandboxDied, SandboxError

_LOG = logging.getLogger(__name__)

FORMAT_EVENTS = ("invalid_json", "invalid_arguments", "unknown_tool")
"""What the environment counts for calls it refuses; with unterminated calls, the format errors."""

UNJUDGED = (StopReason.LENGTH, StopReason.MAX_TOKENS, StopReason.FORMAT, StopReason.DEADLINE)
"""Ends that are ours and not the environment's: `RolloutConfig.unjudged_reward` where it gave no reward terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """What all trajectories of a run share."""

    policy: Policy
    renderer: ChatRenderer
    config: RolloutConfig
    temperature: float | None = None
    """None = the config's; 0 = greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Which trajectory to make; all random streams follow from it.

    Example: ``Assignment(task=task, draw=12, member=3, attempt=0, run_seed=7, purpose="train")``
    """

    task: Task
    draw: int
    """The task draw (= group) number in the run."""
    member: int = 0
    attempt: int = 0
    run_seed: int = 0
    purpose: str = "train"
    """Enters every seed, so that evaluation does not share streams with training."""

    @property
    def task_seed(self) -> int:
        """For `env.reset`; shared by the group."""
        return derive_seed(self.run_seed, self.purpose, self.draw)

    def sampling_seed(self, turn: int) -> int:
        """One random stream a turn."""
        return derive_seed(self.run_seed, self.purpose, self.draw, self.member, self.attempt, turn)


@dataclass(frozen=True, slots=True)
class _End:
    """Why a trajectory is over."""

    outcome: Outcome
    stop_reason: StopReason
    error: str | None = None


async def run_trajectory(setup: RolloutSetup, assignment: Assignment, env: ThreadedEnv) -> Trajectory:
    """Make one trajectory. Raises only CancelledError; after a failure or a deadline, do not use `env` again."""
    rollout = _Rollout(setup, assignment, env)
    deadline = asyncio.timeout(setup.config.deadline_s)
    try:
        async with deadline:
            end = await rollout.run()
    except Exception as error:  # noqa: BLE001 - the rollout boundary: a bad rollout is data
        end = rollout.end_of_time() if deadline.expired() else _end_of_error(error, rollout.phase)
        if end.outcome.is_failure:
            _LOG.warning("draw %d member %d: %s", assignment.draw, assignment.member, end.error)
            _LOG.debug("the failure in full", exc_info=True)
    return rollout.trajectory(end)


async def run_group(
    setup: RolloutSetup, assignment: Assignment, envs: Sequence[ThreadedEnv], *, group_size: int
) -> Group:
    """The members of one group, at the same time, one environment each; failed members are kept, not retried."""
    members = [replace(assignment, member=member) for member in range(group_size)]
    trajectories = await asyncio.gather(
        *(run_trajectory(setup, member, env) for member, env in zip(members, envs, strict=True))
    )
    return Group(task_id=assignment.task.id, draw=assignment.draw, trajectories=tuple(trajectories))


def _end_of_error(error: Exception, phase: str) -> _End:
    """Who is answerable for an exception that came up in `phase`."""
    text = f"{type(error).__name__} in {phase}: {error}"
    if isinstance(error, SandboxDied):
        return _End(Outcome.INFRASTRUCTURE, StopReason.SANDBOX_DIED, text)
    if isinstance(error, SandboxError):
        return _End(Outcome.INFRASTRUCTURE, StopReason.SANDBOX_ERROR, text)
    if isinstance(error, VerifierError):
        return _End(Outcome.VERIFIER, StopReason.VERIFIER_ERROR, text)
    if phase in ("env.reset", "env.step") and not isinstance(error, PolicyError):
        return _End(Outcome.ENVIRONMENT, StopReason.ENVIRONMENT_ERROR, text)
    return _End(Outcome.INFRASTRUCTURE, StopReason.ENGINE_ERROR, text)


class _Rollout:
    """The state of one trajectory while it is made."""

    def __init__(self, setup: RolloutSetup, assignment: Assignment, env: ThreadedEnv) -> None:
        self._setup, self._assignment, self._env = setup, assignment, env
        self._config, self._renderer = setup.config, setup.renderer
        self._tools = env.env.tool_specs
        self.phase: Literal["env.reset", "rendering", "generate", "env.step"] = "env.reset"
        self._messages: list[Message] = []
        # As the template sees it: replies as sampled text, so that nothing is re-spaced or re-ordered.
        self._history: list[Message] = []
        self._new: tuple[Message, ...] = ()
        self._turns: list[Turn] = []
        self._rows = [RowBuilder()]
        self._num_format_errors = 0
        self._reward = 0.0
        self._reward_terms: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._success = self._terminated = self._truncated = False
        self._events: Counter[str] = Counter()
        self._generate_s = self._turn_generate_s = self._env_s = 0.0
        self._started = time.perf_counter()

    async def run(self) -> _End:
        """From reset to the end."""
        started = time.perf_counter()
        try:
            options = {"task": self._assignment.task}
            messages, _ = await self._env.reset(seed=self._assignment.task_seed, options=options)
        finally:
            self._env_s += time.perf_counter() - started
        self._messages += messages
        self._new = tuple(messages)
        while True:
            end = await self._turn()
            if end is not None:
                return end

    def end_of_time(self) -> _End:
        """The deadline passed."""
        error = f"the deadline of {self._config.deadline_s} s passed in {self.phase}"
        if not self._turns:
            return _End(Outcome.INFRASTRUCTURE, StopReason.DEADLINE, f"{error}, before anything was sampled")
        return _End(Outcome.TRUNCATED, StopReason.DEADLINE, error)

    def trajectory(self, end: _End) -> Trajectory:
        """All that happened."""
        has_reward = end.outcome.is_trainable
        reward = self._reward
        if end.stop_reason in UNJUDGED and not self._reward_terms:
            reward += self._config.unjudged_reward
        return Trajectory(
            task_id=self._assignment.task.id,
            draw=self._assignment.draw,
            member=self._assignment.member,
            attempt=self._assignment.attempt,
            seed=self._assignment.task_seed,
            messages=tuple(self._messages),
            turns=tuple(self._turns),
            rows=tuple(row.build() for row in self._rows if len(row)),
            reward=reward if has_reward else math.nan,
            reward_terms=dict(self._reward_terms) if has_reward else {},
            success=self._success and has_reward,
            terminated=self._terminated,
            truncated=self._truncated or end.outcome is Outcome.TRUNCATED,
            outcome=end.outcome,
            stop_reason=end.stop_reason,
            error=end.error,
            events=dict(self._events),
            metrics=dict(self._metrics) if has_reward else {},
            generate_s=self._generate_s,
            env_s=self._env_s,
            duration_s=time.perf_counter() - self._started,
        )

    async def _turn(self) -> _End | None:
        """One generation and one environment step; the end, if this was it."""
        self.phase = "rendering"
        prompt_ids = self._prompt()
        if isinstance(prompt_ids, _End):
            return prompt_ids
        self._history += self._new
        budget, context = self._config.max_trajectory_tokens, self._setup.policy.max_context_tokens
        most = budget if context is None else min(budget, context)
        room = most - len(self._rows[-1]) - len(prompt_ids)
        if room < 1:
            return _End(Outcome.TRUNCATED, StopReason.MAX_TOKENS)
        completion = await self._generate(prompt_ids, min(self._config.max_new_tokens, room))
        if completion.finish_reason == "abort":
            return _End(Outcome.INFRASTRUCTURE, StopReason.ENGINE_ERROR, "the engine aborted the request")
        self.phase = "rendering"
        self._rows[-1].append(prompt_ids, completion)
        reply = self._take_reply(prompt_ids, completion)
        if self._was_cut(completion):
            capped = room < self._config.max_new_tokens
            return _End(Outcome.TRUNCATED, StopReason.MAX_TOKENS if capped else StopReason.LENGTH)
        return await self._step(reply)

    def _prompt(self) -> tuple[int, ...] | _End:
        """What is put behind the row before the next generation; starts another row where history was rewritten."""
        if not self._turns:
            return self._renderer.prompt_ids(self._new, self._tools)
        broken = None
        if self._config.history != "append":
            broken = self._renderer.history_break(self._history, self._new, self._tools)
        if broken is None:
            last = self._turns[-1]
            return self._renderer.delta_ids(last.completion.token_ids, last.message, self._new, self._tools)
        if self._config.history == "refuse":
            return _End(Outcome.INFRASTRUCTURE, StopReason.PREFIX_BROKEN, broken)
        self._rows.append(RowBuilder())
        self._events["row_forked"] += 1
        return self._renderer.prompt_ids([*self._history, *self._new], self._tools)

    async def _generate(self, prompt_ids: tuple[int, ...], max_new_tokens: int) -> Completion:
        turn, job, setup = len(self._turns), self._assignment, self._setup
        temperature = self._config.temperature if setup.temperature is None else setup.temperature
        request = GenerateRequest(
            key=RequestKey(draw=job.draw, member=job.member, attempt=job.attempt, turn=turn),
            prompt_ids=(*self._rows[-1].token_ids, *prompt_ids),
            sampling=SamplingParams(
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self._renderer.stop_token_ids,
            ),
            seed=job.sampling_seed(turn),
        )
        self.phase = "generate"
        started = time.perf_counter()
        try:
            return await setup.policy.generate(request)
        finally:
            self._turn_generate_s = time.perf_counter() - started
            self._generate_s += self._turn_generate_s

    def _take_reply(self, prompt_ids: tuple[int, ...], completion: Completion) -> ParsedReply:
        """Record the turn as it stands before the environment has answered."""
        index = len(self._turns)
        reply = self._renderer.parse(
            completion.token_ids, completion.finish_reason, call_id_prefix=f"call_{index}_", tools=self._tools
        )
        self._messages.append(reply.message)
        self._history.append(self._renderer.history_message(reply))
        self._events.update(reply.events)
        self._num_format_errors += reply.unterminated
        self._turns.append(
            Turn(
                index=index,
                prompt_token_ids=prompt_ids,
                completion=completion,
                message=reply.message,
                observation=(),
                reward=0.0,
                num_format_errors=int(reply.unterminated),
                generate_s=self._turn_generate_s,
                env_s=0.0,
            )
        )
        return reply

    def _was_cut(self, completion: Completion) -> bool:
        ended = completion.token_ids[-1:] and completion.token_ids[-1] in self._renderer.stop_token_ids
        return completion.finish_reason == "length" and not ended

    async def _step(self, reply: ParsedReply) -> _End | None:
        self.phase = "env.step"
        started = time.perf_counter()
        try:
            result: StepResult = await self._env.step(reply.message)
        finally:
            env_s = time.perf_counter() - started
            self._env_s += env_s
        observation, reward, self._terminated, self._truncated, info = result
        if not math.isfinite(reward):
            raise VerifierError(f"the reward is {reward}; a reward that cannot be computed must raise")
        events = info.get("events", {})
        num_errors = sum(events.get(name, 0) for name in FORMAT_EVENTS)
        self._new = tuple(self._cut(message) for message in observation)
        self._messages += self._new
        self._reward += float(reward)
        self._reward_terms = info.get("reward_terms", {})
        self._metrics = info.get("metrics", {})
        self._success = bool(info.get("success", False))
        self._events.update(events)
        self._num_format_errors += num_errors
        turn = self._turns[-1]
        self._turns[-1] = replace(
            turn,
            observation=self._new,
            reward=float(reward),
            num_format_errors=turn.num_format_errors + num_errors,
            env_s=env_s,
        )
        if self._terminated:
            return _End(Outcome.COMPLETED, StopReason.TERMINATED)
        if self._truncated:
            return _End(Outcome.TRUNCATED, StopReason.MAX_TURNS)
        if self._num_format_errors >= self._config.max_format_errors:
            return _End(Outcome.POLICY, StopReason.FORMAT)
        return None

    def _cut(self, message: Message) -> Message:
        """A tool result within its limit of tokens: the run's, or the tool's own where that is lower."""
        if message.role != "tool":
            return message
        own = next((spec.max_output_tokens for spec in self._tools if spec.name == message.name), None)
        limit = min(own or self._config.max_tool_tokens, self._config.max_tool_tokens)
        content, num_cut = self._renderer.cut_tokens(message.content, limit)
        if not num_cut:
            return message
        self._events["tool_output_cut"] += 1
        return replace(message, content=content)
