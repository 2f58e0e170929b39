"""Cancellation reaches the tool, what its box runs, and the engine."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from toy_chat import TASK, Parrot, call_text, renderer

from quintain.agents.config import RolloutConfig
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.scheduler import Draw, RolloutRunner
from quintain.agents.scripted_policy import ScriptedPolicy, ScriptedReply
from quintain.agents.simulated_policy import Latency, SimulatedPolicy, scripted_tokens
from quintain.envs import Task, ToolEnv, reward, tool
from quintain.sandbox import BlockingSandbox, SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

DRAW = Draw(number=1, task=TASK)


class Counting(ToolEnv):
    """Its tool runs a command that writes a line every 50 ms for a minute."""

    needs_isolation = False

    def rows(self, split: str) -> list[Mapping[str, Any]]:
        return [{"prompt": "count"}]

    @tool
    def count(self, box: BlockingSandbox) -> str:
        """Count for a long time."""
        file = self.task.data["file"]
        return box.exec(f"for i in $(seq 1200); do echo $i >> {file}; sleep 0.05; done", timeout_s=60).stdout

    @reward
    def right(self) -> float:
        return 1.0


def env_class(scope: str) -> type[Counting]:
    return type("CountingIn", (Counting,), {"sandbox_scope": scope})


@contextmanager
def counting_run(
    scope: str, policy: ScriptedPolicy | None = None, **config: Any
) -> Iterator[tuple[RolloutRunner, SandboxPool]]:
    chat = renderer()
    cls = env_class(scope)
    sandbox = SandboxConfig(type="local", pool_size=1, acquire_timeout_s=20.0)
    with open_pool(sandbox, needs_isolation=False, owner="test") as pool:
        made = RolloutRunner(
            policy=policy or ScriptedPolicy([call_text("count", "{}")], renderer=chat),
            renderer=chat,
            make_env=lambda: cls(pool=pool),
            config=RolloutConfig(max_new_tokens=256, **config),
            seed=1,
        )
        try:
            yield made, pool
        finally:
            made.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stands_still(file: Path) -> bool:
    before = file.read_text()
    time.sleep(0.3)
    return file.read_text() == before


def counting(file: Path) -> Draw:
    return Draw(number=1, task=Task(id="t", prompt="count", data={"file": str(file)}))


@pytest.mark.parametrize("scope", ["call", "trajectory"])
def test_a_deadline_kills_what_the_tool_runs_and_the_box_is_free_again(scope: str, tmp_path: Path):
    """E02"""
    file = tmp_path / "count"
    with counting_run(scope, deadline_s=2.0) as (rollouts, pool):
        (group,) = rollouts.collect([counting(file)], group_size=1)
        assert (group.trajectories[0].outcome, group.trajectories[0].stop_reason) == (
            Outcome.TRUNCATED,
            StopReason.DEADLINE,
        )
        assert rollouts.stats.num_abandoned_calls == 1
        pool.release(pool.acquire())  # the only box: raises where the killed command still holds it
    assert file.exists() and stands_still(file)


def test_ctrl_c_kills_what_the_tool_runs_and_ends_what_the_engine_samples(tmp_path: Path):
    """E02, J07"""

    file = tmp_path / "count"

    def interrupt() -> None:
        wait_for(lambda: file.exists() and sampling.is_set())
        os.kill(os.getpid(), signal.SIGINT)

    sampling = threading.Event()
    ended: list[int] = []

    class Watched(ScriptedPolicy):
        async def generate(self, request: Any) -> Any:
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                ended.append(request.key.member)
                raise

    def answer(request: Any) -> ScriptedReply | str:
        if request.key.member == 0:
            return call_text("count", "{}")
        sampling.set()
        return ScriptedReply(text="done", delay_s=math.inf)

    policy = Watched(answer, renderer=renderer())
    started = time.monotonic()
    with counting_run("call", policy) as (rollouts, pool):
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            rollouts.collect([counting(file)], group_size=2)
        pool.release(pool.acquire())
    assert ended == [1] and policy.num_slots == 0
    assert time.monotonic() - started < 40  # the command would have taken 60 s
    assert stands_still(file)


def test_a_request_whose_trajectory_is_out_of_time_gives_its_place_in_the_engine_back():
    chat = renderer()
    policy = SimulatedPolicy(scripted_tokens(["done"], renderer=chat), latency=Latency(request_s=60.0), max_running=1)
    config = RolloutConfig(max_new_tokens=64, deadline_s=0.2, num_retries=0, max_failure_frac=1.0)
    rollouts = RolloutRunner(policy=policy, renderer=chat, make_env=Parrot, config=config, seed=1)
    try:
        (group,) = rollouts.collect([DRAW], group_size=4)
    finally:
        rollouts.close()
    assert {t.stop_reason for t in group.trajectories} == {StopReason.DEADLINE}
    assert policy.num_aborted == 4 and policy.num_running == policy.num_queued == 0


def test_an_interrupted_environment_can_be_used_again_after_close():
    sandbox = SandboxConfig(type="local", pool_size=1)
    with open_pool(sandbox, needs_isolation=False, owner="test") as pool:
        env = env_class("trajectory")(pool=pool)
        env.reset(seed=1)
        env.interrupt()
        with pytest.raises(Exception, match="interrupted"):
            env.box.exec("true")
        env.close()
        env.reset(seed=1)
        assert env.box.exec("echo on").stdout == "on\n"
        env.close()


class Stubborn(Parrot):
    """Cannot even be interrupted."""

    gate = threading.Event()

    def step(self, action: Any) -> Any:
        self.gate.wait(20)
        return super().step(action)

    def interrupt(self) -> None:
        raise ZeroDivisionError("in the environment's own way to stop")


def test_an_environment_that_fails_to_stop_hurts_nobody_else():
    chat = renderer()
    config = RolloutConfig(max_new_tokens=64, deadline_s=0.3)
    policy = ScriptedPolicy(["done"], renderer=chat)
    rollouts = RolloutRunner(policy=policy, renderer=chat, make_env=Stubborn, config=config, seed=1)
    try:
        (group,) = rollouts.collect([DRAW], group_size=2)
        Stubborn.gate.set()
    finally:
        rollouts.close()
    assert {t.stop_reason for t in group.trajectories} == {StopReason.DEADLINE}
    assert rollouts.stats.num_abandoned_calls == 2
