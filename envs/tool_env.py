"""`ToolEnv`: a Gymnasium environment whose actions are assistant messages and whose tools are Python methods.

    reset(seed, options={"task": …})  ->  ([system], user)
      | step(assistant with tool calls)     -> tool messages         every call checked first, run in order
      | …                                                            at most `max_calls_per_turn` a turn
      ` step(assistant without tool calls)  -> (), terminated        rewards are computed here, once
                                                                     (and where `max_turns` truncates)

Invariants: nothing a trajectory puts on `self` or in its box is there after the next `reset`; `step` never resets;
equal seed and actions give equal observations, rewards and infos (no times, no box ids); a box goes back to the pool on
every path. Trouble a model causes is an observation; trouble of ours is an exception.

Not here: turning text into calls, cutting long tool output, deadlines (all in `agents`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal

import datasets
import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from quintain.envs.boxes import BoxSource, SandboxScope
from quintain.envs.demonstrations import Part, build_dialogue
from quintain.envs.errors import EnvironmentArgumentsError, EnvironmentDefinitionError, NoTasksError, place_in
from quintain.envs.message import Message, Task, ToolCall, ToolSpec
from quintain.envs.rewards import Reward, evaluate_reward, rewards_of
from quintain.envs.spaces import MessageSpace, MessagesSpace
from quintain.envs.tasks import TaskTable, build_tasks
from quintain.envs.tools import Tool, ToolResult, run_call, tools_of
from quintain.envs.trajectory_state import Restorer, TrajectoryState
from quintain.sandbox import BlockingSandbox, SandboxPool
from quintain.sandbox.config import SandboxConfig

Split = Literal["train", "eval"]
Info = dict[str, Any]
SPLITS: tuple[Split, ...] = ("train", "eval")


class ToolEnv(gymnasium.Env[tuple[Message, ...], Message]):
    """Base class of environments. A subclass writes `rows`, at least one `@reward`, and usually `@tool`s.

    Life cycle: construct, then any number of `reset` + `step`s, then `close`; `reset` after `close` works again.
    """

    system_prompt: str = ""
    """First message of every trajectory; empty = none."""
    max_turns: int = 8
    """Assistant messages a trajectory; the last one truncates."""
    max_calls_per_turn: int = 4
    """Tool calls run a turn; the model is told which further ones were not."""
    needs_isolation: bool = True
    """False only where nothing the model writes can do harm outside a box (then `auto` may fall back to local)."""
    sandbox_scope: SandboxScope = "none"
    """`none`; `call`: a box is borrowed for each tool call; `trajectory`: one box from `reset` to the next `reset`."""
    tools: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """Plain functions that are tools too, besides the `@tool` methods."""
    state_class: ClassVar[type[TrajectoryState]] = TrajectoryState
    """Of what class `state` is made at every reset, without arguments."""
    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - gymnasium.Env declares it so

    def __init__(
        self,
        *,
        split: Split = "train",
        pool: SandboxPool | None = None,
        sandbox: SandboxConfig | Mapping[str, Any] | None = None,
        num_tasks: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """`pool`: where boxes come from; without one the environment opens its own from `sandbox` when it needs a box.
        `num_tasks`: use the first N tasks.

        Raises ValueError for an unknown split, EnvironmentDefinitionError for a tool that cannot be described or has
        no box.
        """
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: choose from {', '.join(SPLITS)}")
        self.split: Split = split
        self.render_mode = render_mode
        self.task_limit = num_tasks
        self._tools, self._rewards = _tools_and_rewards(type(self))
        self.tool_specs: tuple[ToolSpec, ...] = tuple(item.spec for item in self._tools.values())
        names = tuple(self._tools)
        self.action_space = MessageSpace(("assistant",), tool_names=names)
        self.observation_space = MessagesSpace()
        self._boxes = BoxSource(
            pool=pool,
            config=sandbox if isinstance(sandbox, SandboxConfig) else SandboxConfig(**(sandbox or {})),
            scope=self.sandbox_scope,
            needs_isolation=self.needs_isolation,
            owner=type(self).__name__,
        )
        self._table: TaskTable | None = None
        self._task: Task | None = None
        self._messages: list[Message] = []
        self._num_turns = 0
        self._live = False
        self.state: Any = self.state_class()
        self._restorer = Restorer(self, base=ToolEnv)

    # ---- what a subclass writes

    def rows(self, split: Split) -> Iterable[Mapping[str, Any]] | datasets.Dataset:
        """The rows of a split: each has a `prompt` and whatever tools and rewards need (`id` is optional)."""
        raise EnvironmentDefinitionError(
            f"{type(self).__name__} has no tasks; write `def rows(self, split): return [{{'prompt': …}}, …]`"
        )

    def refuse(self, row: Mapping[str, Any]) -> str | None:
        """The reason to leave a row out, in a few words; None keeps it."""
        return None

    def prepare(self) -> None:
        """Called at the end of `reset`, with `task` and the box in place: write files, set `self.state`."""

    def is_over(self) -> bool:
        """Whether the trajectory is over though the model still calls tools (a game is won). Asked after each turn."""
        return False

    def is_success(self, reward: float) -> bool:
        """What counts as solved, given the total reward."""
        return reward >= 1.0 - 1e-9

    def demonstrate(self, task: Task, *, clean: bool, rng: np.random.Generator) -> tuple[Message, ...] | None:
        """The conversation after the first observation, as a model should (`clean`) or badly might hold it.

        Tool results must be what the real tool answers; see `dialogue`. None = no demonstrations.
        """
        return None

    # ---- what a subclass reads

    @property
    def task(self) -> Task:
        """The current task. Raises ResetNeeded before the first reset."""
        if self._task is None:
            raise ResetNeeded(f"{type(self).__name__} has no task yet; call reset() first")
        return self._task

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation so far."""
        return tuple(self._messages)

    @property
    def answer(self) -> str:
        """The text of the closing assistant message; empty where the trajectory did not end with one."""
        last = self._messages[-1] if self._messages else None
        return last.content if last and last.role == "assistant" and not last.tool_calls else ""

    @property
    def num_turns(self) -> int:
        """Assistant messages so far."""
        return self._num_turns

    @property
    def box(self) -> BlockingSandbox:
        """The trajectory's box. Raises RuntimeError unless `sandbox_scope` is `trajectory` and `reset` was called."""
        return self._boxes.current

    def dialogue(self, *parts: Part) -> tuple[Message, ...]:
        """A demonstration from parts: text is an assistant message, `(tool, arguments)` a call and its result.

        The result comes from running the tool here, or is given: `(tool, arguments, result)`.
        Raises ValueError where the tool refuses the call or would need a box.
        """
        return build_dialogue(parts, self._tools, owner=self)

    # ---- tasks

    @property
    def tasks(self) -> datasets.Dataset:
        """The split's tasks: columns `id`, `prompt` and the rows' own. Raises as `build_tasks`."""
        return self._task_table.dataset

    @property
    def num_tasks(self) -> int:
        return len(self.tasks)

    def task_at(self, index: int) -> Task:
        """Raises IndexError."""
        return self._task_table.task(index)

    @property
    def _task_table(self) -> TaskTable:
        if self._table is None:
            self._table = self._build_table()
        return self._table

    def _build_table(self) -> TaskTable:
        owner = type(self).__name__
        try:
            return build_tasks(
                self.rows(self.split),
                owner=owner,
                split=self.split,
                refuse=None if type(self).refuse is ToolEnv.refuse else self.refuse,
                limit=self.task_limit,
            )
        except (NoTasksError, EnvironmentDefinitionError, EnvironmentArgumentsError):
            raise
        except (Exception, SystemExit) as error:  # `rows` is the user's: it may raise anything, or exit
            file = getattr(sys.modules.get(type(self).__module__), "__file__", None)
            raise EnvironmentDefinitionError(
                f"{owner}.rows({self.split!r}) failed: {place_in(error, file)}: {type(error).__name__}: {error}"
            ) from error

    # ---- Gymnasium

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], Info]:
        """Start a trajectory on `options["task"]`, else on a task drawn with `np_random`.

        Raises SandboxError where no box can be had, and whatever `prepare` raises; no box is kept then.
        """
        super().reset(seed=seed)
        self._live = False
        self._boxes.give_back()
        self._restorer.restore()
        task = (options or {}).get("task")
        if task is not None and not isinstance(task, Task):
            raise TypeError(f'options["task"] is {type(task).__name__}; give a Task, for example env.task_at(0)')
        chosen = task or self.task_at(int(self.np_random.integers(self.num_tasks)))
        self._task = chosen
        first = Message(role="user", content=chosen.prompt)
        opening = (Message(role="system", content=self.system_prompt), first) if self.system_prompt else (first,)
        self._messages = list(opening)
        self._num_turns = 0
        self._boxes.take(f"{self.split}/{chosen.id}")
        try:
            self.prepare()
        except BaseException:
            self._boxes.give_back()
            raise
        self._live = True
        return opening, _info()

    def step(self, action: Message) -> tuple[tuple[Message, ...], float, bool, bool, Info]:
        """Take one assistant message. `terminated` and `truncated` may both be True: that counts as terminated.

        Raises ResetNeeded outside a trajectory, TypeError for an action that is no assistant message, VerifierError,
        SandboxError, and what a tool raises besides ToolError; after any of these only `reset` goes on.
        """
        if not self._live:
            state = "has ended" if self._num_turns else "has not begun"
            raise ResetNeeded(f"step() on {type(self).__name__}: the trajectory {state}; call reset() first")
        if not self.action_space.contains(action):
            raise TypeError(f"an action is an assistant Message, not {action!r:.200}")
        self._live = False
        self._num_turns += 1
        self._messages.append(action)
        observation, events = self._run_calls(action.tool_calls)
        self._messages.extend(observation)
        terminated = not action.tool_calls or self.is_over()
        truncated = self._num_turns >= self.max_turns
        if not (terminated or truncated):
            self._live = True
            return observation, 0.0, False, False, _info(events=events)
        terms, metrics = self._judge()
        total = float(sum(terms.values()))
        success = bool(self.is_success(total))
        return observation, total, terminated, truncated, _info(terms, metrics, success, events)

    def render(self) -> str | None:  # type: ignore[override]
        """The conversation as text, in render mode `ansi`."""
        if self.render_mode != "ansi":
            return None
        lines = []
        for message in self._messages:
            calls = "".join(f"\n  -> {call.name}({call.arguments})" for call in message.tool_calls)
            lines.append(f"{message.role}: {message.content}{calls}")
        return "\n".join(lines)

    def interrupt(self) -> None:
        """Called from another thread, while a method runs whose result nobody wants any more: what its box runs is
        killed, and box calls raise SandboxError until `close`. Must return at once; override it (and call it on
        `super()`) where a tool waits for something else that can be ended."""
        self._boxes.interrupt()

    def close(self) -> None:
        """Give the box back, and close the pool if the environment opened its own. Idempotent."""
        self._live = False
        self._boxes.close()

    # ---- one turn

    def _run_calls(self, calls: tuple[ToolCall, ...]) -> tuple[tuple[Message, ...], dict[str, int]]:
        """One tool message for each call, in call order."""
        observation, events = [], Counter()
        for index, call in enumerate(calls):
            if index < self.max_calls_per_turn:
                result = run_call(self._tools, call, owner=self, lend=self._boxes.lend)
            else:
                limit = self.max_calls_per_turn
                text = f"Error: not run: call {index + 1} of this turn, and at most {limit} are run; call it again."
                result = ToolResult(content=text, event="calls_skipped")
            if result.event:
                events[result.event] += 1
            observation.append(
                Message(role="tool", content=result.content, tool_call_id=call.id, name=call.name or None)
            )
        return tuple(observation), dict(events)

    def _judge(self) -> tuple[dict[str, float], dict[str, float]]:
        """Weighted reward terms, and the metrics (weight 0) as they are."""
        terms, metrics = {}, {}
        for item in self._rewards:
            value = evaluate_reward(item, self)
            if item.weight:
                terms[item.name] = item.weight * value
            else:
                metrics[item.name] = value
        return terms, metrics


def _info(
    terms: Mapping[str, float] | None = None,
    metrics: Mapping[str, float] | None = None,
    success: bool = False,
    events: Mapping[str, int] | None = None,
) -> Info:
    return {
        "reward_terms": dict(terms or {}),
        "metrics": dict(metrics or {}),
        "success": success,
        "events": dict(events or {}),
    }


@cache
def _tools_and_rewards(cls: type[ToolEnv]) -> tuple[dict[str, Tool], tuple[Reward, ...]]:
    """Derived once a class: a run makes many instances."""
    tools, rewards = tools_of(cls), rewards_of(cls)
    if not any(item.weight for item in rewards):
        raise EnvironmentDefinitionError(
            f"{cls.__name__} has no reward; write a method `(self) -> float` and mark it `@reward`"
        )
    for item in tools.values():
        if item.needs_box and cls.sandbox_scope == "none":
            raise EnvironmentDefinitionError(
                f"tool `{item.spec.name}` of {cls.__name__} takes a box, but sandbox_scope is 'none'; "
                "set it to 'call' (stateless) or 'trajectory' (files stay from call to call)"
            )
    return tools, rewards
