"""How a tool runs: coroutines, deadlines, processes, and what it is given besides the model's arguments."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_envs import call, say

from quintain.envs import Task, ToolEnv, TrajectoryState, reward, tool
from quintain.envs.errors import ToolDeadlineError
from quintain.sandbox import BlockingSandbox, Sandbox, SandboxPool


class Board(TrajectoryState):
    moves: int = 0


def place(piece: str, state: Board, task: Task) -> str:
    """Place a piece."""
    state.moves += 1
    return f"{piece} is move {state.moves} of {task.id}"


@tool(isolate="process", deadline_s=20.0)
def own_process() -> int:
    """Give a process id."""
    return os.getpid()


@tool(isolate="process", deadline_s=0.5)
def hang(pid_file: str) -> None:
    """Never come back, with a child of its own."""
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    os.system("sleep 600")


@tool(isolate="process", deadline_s=20.0, expected=(KeyError,))
def look(name: str) -> str:
    """Look something up."""
    return {"a": "1"}[name]


class Workshop(ToolEnv):
    sandbox_scope = "trajectory"
    max_turns = 100
    state_class = Board
    tools = (place, own_process, hang, look)

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": "work", "id": f"{split}-x"}]

    @tool(deadline_s=30.0)
    async def run(self, command: str, box: Sandbox, state: Board) -> str:
        """Run a command."""
        state.moves += 10
        return (await box.exec(command)).stdout

    @tool(deadline_s=0.3)
    async def wait(self) -> str:
        """Wait for ever."""
        await asyncio.sleep(3600)
        return "never"

    @tool(deadline_s=0.2)
    async def wait_for_the_box(self, box: Sandbox) -> str:
        """Wait for the box."""
        return (await box.exec("sleep 3")).stdout

    @tool(deadline_s=0.2)
    def stubborn(self) -> str:
        """Wait where nobody can stop it."""
        time.sleep(1.0)
        return "late"

    @tool(deadline_s=5.0)
    def quick(self, box: BlockingSandbox) -> str:
        """Be quick."""
        return box.exec("echo quick").stdout

    @tool(expected=(FileNotFoundError, TimeoutError))
    async def read(self, path: str) -> str:
        """Read a file."""
        if path == "slow":
            raise TimeoutError("the disk sleeps")
        raise FileNotFoundError(path)

    @reward
    def any(self) -> float:
        return 1.0


@pytest.fixture
def workshop(local_pool: SandboxPool) -> Iterator[Workshop]:
    env = Workshop(pool=local_pool)
    env.reset(seed=0)
    yield env
    env.close()


def ask(env: ToolEnv, name: str, arguments: str = "{}") -> tuple[str, dict[str, int]]:
    observation, *_, info = env.step(call((name, arguments)))
    return observation[0].content, info["events"]


def test_state_task_and_box_are_filled_in_and_hidden_from_the_model(workshop: Workshop) -> None:
    told = {spec.name: list(spec.parameters["properties"]) for spec in workshop.tool_specs}
    assert told["place"] == ["piece"] and told["run"] == ["command"] and told["quick"] == []
    assert ask(workshop, "place", '{"piece": "rook"}') == ("rook is move 1 of train-x", {})
    assert ask(workshop, "run", '{"command": "echo hi"}') == ("hi\n", {})
    assert ask(workshop, "quick") == ("quick\n", {})
    assert workshop.state.moves == 11
    workshop.reset(seed=0)
    assert type(workshop.state) is Board and workshop.state.moves == 0
    assert "unknown argument" in ask(workshop, "place", '{"piece": "rook", "state": {}}')[0]


def test_a_coroutine_past_its_deadline_is_stopped_and_the_model_reads_so(workshop: Workshop) -> None:
    assert ask(workshop, "wait") == ("Error: wait took longer than 0.3 s and was stopped.", {"tool_timeout": 1})
    assert ask(workshop, "wait_for_the_box")[1] == {"tool_timeout": 1}
    assert workshop.step(say("done"))[1] == 1.0


def test_a_plain_tool_past_its_deadline_ends_the_trajectory_since_nobody_can_stop_it(workshop: Workshop) -> None:
    with pytest.raises(ToolDeadlineError, match=r"`stubborn` took longer than its deadline of 0.2 s and can't be stop"):
        ask(workshop, "stubborn")


def test_a_tool_in_a_process_is_killed_with_all_it_started(workshop: Workshop, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    first = ask(workshop, "own_process")[0]
    assert int(first) != os.getpid() and ask(workshop, "own_process")[0] == first, "the process is used again"
    content, events = ask(workshop, "hang", f'{{"pid_file": "{pid_file}"}}')
    assert events == {"tool_timeout": 1} and "took longer than 0.5 s" in content
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]
    assert ask(workshop, "own_process")[1] == {}


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("read", '{"path": "x.txt"}', "Error: x.txt"),
        ("read", '{"path": "slow"}', "Error: the disk sleeps"),
        ("look", '{"name": "b"}', "Error: 'b'"),
    ],
)
def test_errors_a_tool_expects_are_for_the_model(workshop: Workshop, name: str, arguments: str, text: str) -> None:
    assert ask(workshop, name, arguments) == (text, {"tool_error": 1})


def test_settings_that_cannot_be_are_refused() -> None:
    for settings in ({"deadline_s": 0}, {"max_output_tokens": 7}, {"isolate": "thread"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            tool(**settings)  # type: ignore[call-overload]
