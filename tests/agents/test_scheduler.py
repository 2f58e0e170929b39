"""`RolloutRunner`: order, seeds, slots, retries, the breaker, and what is closed when."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from toy_chat import TASK, Parrot, call_text, renderer

from quintain.agents.completion import GenerateRequest
from quintain.agents.config import RolloutConfig
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.policy import PolicyError
from quintain.agents.scheduler import Draw, RolloutBreaker, RolloutRunner
from quintain.agents.scripted_policy import Script, ScriptedPolicy, ScriptedReply
from quintain.agents.trajectory import Group, Trajectory
from quintain.envs import Message, ToolEnv
from quintain.sandbox import open_pool
from quintain.sandbox.config import SandboxConfig

DRAWS = [Draw(number=number, task=TASK) for number in (7, 3, 5)]


@contextmanager
def runner(
    script: Script,
    *,
    env: Callable[[], ToolEnv] = Parrot,
    policy: ScriptedPolicy | None = None,
    seed: int = 1,
    **config: Any,
) -> Iterator[RolloutRunner]:
    chat = renderer()
    made = RolloutRunner(
        policy=policy or ScriptedPolicy(script, renderer=chat),
        renderer=chat,
        make_env=env,
        config=RolloutConfig(**{"max_new_tokens": 256, **config}),
        seed=seed,
    )
    try:
        yield made
    finally:
        made.close()


def trajectories(groups: list[Group]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]


def test_groups_come_back_in_the_order_of_the_draws_and_members():
    with runner([call_text(), "done"]) as rollouts:
        seen: list[Trajectory] = []
        groups = rollouts.collect(DRAWS, group_size=2, on_trajectory=seen.append)
    assert [(g.draw, [t.member for t in g.trajectories]) for g in groups] == [(7, [0, 1]), (3, [0, 1]), (5, [0, 1])]
    assert sorted(map(id, seen)) == sorted(map(id, trajectories(groups)))
    assert all(t.reward == 1.0 for t in seen)


def seeds_of(policy: ScriptedPolicy) -> set[tuple[Any, int]]:
    return {(request.key, request.seed) for request in policy.requests}


def test_seeds_follow_from_run_purpose_draw_member_and_turn_and_from_nothing_else():
    found: dict[Any, set[tuple[Any, int]]] = {}
    for seed, purpose, concurrent in [(1, "train", 6), (1, "train", 1), (2, "train", 6), (1, "eval", 6)]:
        policy = ScriptedPolicy([call_text(), "done"], renderer=renderer())
        with runner((), policy=policy, seed=seed, max_concurrent=concurrent) as rollouts:
            groups = rollouts.collect(DRAWS, group_size=2, purpose=purpose)
        found[seed, purpose, concurrent] = seeds_of(policy)
        assert all(len({t.seed for t in group.trajectories}) == 1 for group in groups)
        assert len({group.trajectories[0].seed for group in groups}) == 3
    first = found[1, "train", 6]
    assert len({seed for _, seed in first}) == len(first) == 12
    assert found[1, "train", 1] == first
    assert found[2, "train", 6].isdisjoint(first) and found[1, "eval", 6].isdisjoint(first)


def test_every_worker_holds_its_slot_before_the_first_request_and_members_start_in_order():
    asked: list[tuple[int, tuple[int, int]]] = []

    def answer(request: GenerateRequest) -> str:
        asked.append((policy.num_slots, (request.key.draw, request.key.member)))
        return "done"

    policy = ScriptedPolicy(answer, renderer=renderer())
    with runner((), policy=policy, max_concurrent=3, env_threads=1) as rollouts:
        rollouts.collect(DRAWS, group_size=2)
    assert asked[0][0] == 3 and policy.max_slots == 3 and policy.num_slots == 0
    assert [key for _, key in asked] == [(7, 0), (7, 1), (3, 0), (3, 1), (5, 0), (5, 1)]


class Counted(Parrot):
    """Counts its instances."""

    made = 0
    closed = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        type(self).made += 1

    def close(self) -> None:
        super().close()
        type(self).closed += 1


def counted(**attributes: Any) -> type[Counted]:
    return type("CountedOnce", (Counted,), attributes)


def test_environments_are_used_again_and_closed_with_the_runner():
    env = counted()
    with runner(["done"], env=env, max_concurrent=2) as rollouts:
        for _ in range(3):
            rollouts.collect(DRAWS, group_size=2)
        assert (env.made, env.closed) == (2, 0)
    assert (env.made, env.closed) == (2, 2)


def test_an_environment_that_holds_a_box_gives_it_back_at_the_end_of_each_collect():
    """J06"""

    class Boxed(Parrot):
        sandbox_scope = "trajectory"

    config = SandboxConfig(type="local", pool_size=2, acquire_timeout_s=5.0)
    with open_pool(config, needs_isolation=False, owner="test") as pool:
        with runner(["done"], env=lambda: Boxed(pool=pool), max_concurrent=2) as rollouts:
            groups = rollouts.collect(DRAWS, group_size=2)
            boxes = [pool.acquire(), pool.acquire()]  # raises where a box is still held
        for box in boxes:
            pool.release(box)
    assert all(t.outcome is Outcome.COMPLETED for t in trajectories(groups))


def fails_once(request: GenerateRequest) -> str | Exception:
    return PolicyError("hiccup") if request.key.attempt == 0 and request.key.member == 0 else "done"


def test_a_failed_member_is_tried_again_with_other_seeds_and_then_counts():
    """C15"""
    policy = ScriptedPolicy(fails_once, renderer=renderer())
    env = counted()
    with runner((), policy=policy, env=env, max_concurrent=1) as rollouts:
        groups = rollouts.collect(DRAWS, group_size=2)
        stats = rollouts.stats
    assert [t.attempt for t in trajectories(groups)] == [1, 0, 1, 0, 1, 0]
    assert all(t.outcome is Outcome.COMPLETED for t in trajectories(groups))
    assert (stats.num_planned, stats.num_attempts, stats.num_failed, stats.num_retries) == (6, 9, 3, 3)
    assert len({request.seed for request in policy.requests}) == 9
    assert env.made == 4  # a failed one is never used again


def test_a_failed_member_goes_before_those_that_have_not_begun():
    asked: list[tuple[int, int, int]] = []

    def answer(request: GenerateRequest) -> str | Exception:
        asked.append((request.key.draw, request.key.member, request.key.attempt))
        return PolicyError("hiccup") if request.key.attempt < 2 and request.key.member == 0 else "done"

    with runner(answer, max_concurrent=1, max_failure_frac=0.9) as rollouts:
        rollouts.collect(DRAWS, group_size=2)
    assert asked == [(d, m, a) for d in (7, 3, 5) for m, attempts in ((0, 3), (1, 1)) for a in range(attempts)]


def test_a_task_that_is_30_times_slower_keeps_its_share_and_its_place():
    """D14: the slow ones and their retries start in their turn, beside the quick ones and not after them."""
    slow, quick_s = {2, 9}, 0.005
    started: list[tuple[int, int, int]] = []

    def answer(request: GenerateRequest) -> ScriptedReply | Exception:
        key = request.key
        started.append((key.draw, key.member, key.attempt))
        if key.draw in slow and key.attempt == 0:
            return PolicyError("hiccup")
        return ScriptedReply(text="done", delay_s=quick_s * (30 if key.draw in slow else 1))

    draws = [Draw(number=number, task=TASK) for number in range(16)]
    with runner(answer, max_concurrent=8) as rollouts:
        groups = rollouts.collect(draws, group_size=4)
    assert [t.outcome for t in trajectories(groups)] == [Outcome.COMPLETED] * 64
    assert sum(t.draw in slow for t in trajectories(groups)) == 8
    assert [key for key in started if key[2] == 0] == sorted(key for key in started if key[2] == 0)
    last_begins = started.index((15, 0, 0))
    assert all(started.index((draw, member, 1)) < last_begins for draw in slow for member in range(4))


def test_the_members_of_a_group_share_one_encoded_prompt():
    with runner(["done"]) as rollouts:
        groups = rollouts.collect(DRAWS, group_size=4)
    prompts = {id(t.turns[0].prompt_token_ids) for t in trajectories(groups)}
    assert len(prompts) == 1  # the three draws are of one task


def test_what_blocks_the_event_loop_is_measured():
    def answer(request: GenerateRequest) -> str:
        if request.key.member == 1:
            time.sleep(0.3)  # in the loop's own thread
        return "done"

    with runner(answer) as rollouts:
        rollouts.collect(DRAWS[:1], group_size=2)
        assert rollouts.stats.loop_lag_max_s > 0.2


def test_a_member_that_fails_every_time_stays_in_its_group_as_data():
    """C15"""
    script: Script = lambda request: PolicyError("down") if request.key.member == 0 else "done"  # noqa: E731
    seen: list[Trajectory] = []
    with runner(script, num_retries=1) as rollouts:
        (group,) = rollouts.collect(DRAWS[:1], group_size=4, on_trajectory=seen.append)
    first = group.trajectories[0]
    assert (first.outcome, first.attempt) == (Outcome.INFRASTRUCTURE, 1) and math.isnan(first.reward)
    assert [t.member for t in group.valid] == [1, 2, 3] and len(seen) == 4


def test_too_many_failures_stop_the_run_and_name_the_most_common_one():
    """D02"""
    policy = ScriptedPolicy([PolicyError("no engine at port 1")], renderer=renderer())
    with (
        runner((), policy=policy, max_concurrent=2, num_retries=5) as rollouts,
        pytest.raises(RolloutBreaker, match="no engine at port 1"),
    ):
        rollouts.collect(DRAWS, group_size=4)
    assert len(policy.requests) <= 14 and policy.num_slots == 0


def test_a_single_failing_trajectory_uses_its_retries_before_it_stops_the_run():
    policy = ScriptedPolicy([PolicyError("down")], renderer=renderer())
    with runner((), policy=policy, num_retries=2) as rollouts, pytest.raises(RolloutBreaker, match="3 of 3"):
        rollouts.collect(DRAWS[:1], group_size=1)


def test_a_dead_engine_stops_the_run_within_one_deadline():
    """D02"""
    started = time.monotonic()
    script = [ScriptedReply(text="done", delay_s=math.inf)]
    with runner(script, deadline_s=0.3) as rollouts, pytest.raises(RolloutBreaker, match="deadline"):
        rollouts.collect(DRAWS, group_size=4)
    assert time.monotonic() - started < 3.0


class Stuck(Counted):
    """Its steps return when the test says so."""

    gate = threading.Event()

    def step(self, action: Message):
        self.gate.wait(20)
        return super().step(action)


def test_stuck_environments_do_not_take_the_threads_from_the_others():
    """D02"""

    class Some(Stuck):
        gate = threading.Event()

        def step(self, action: Message):
            if self.task.prompt == "stuck":
                return super().step(action)
            return Parrot.step(self, action)

    draws = [
        Draw(number=n, task=type(TASK)(id=str(n), prompt="stuck" if n < 2 else "p", data=TASK.data)) for n in range(6)
    ]
    with runner(["done"], env=Some, env_threads=2, max_concurrent=2, deadline_s=0.3) as rollouts:
        groups = rollouts.collect(draws, group_size=1)
        assert [g.trajectories[0].stop_reason for g in groups] == [StopReason.DEADLINE] * 2 + [
            StopReason.TERMINATED
        ] * 4
        assert rollouts.stats.num_abandoned_calls == 2
        assert Some.closed == 0
        Some.gate.set()
    assert Some.made == 4 and Some.closed == 4


def test_an_environment_that_cannot_be_made_stops_the_run():
    def broken() -> ToolEnv:
        raise FileNotFoundError("tasks.parquet")

    with runner(["done"], env=broken) as rollouts, pytest.raises(FileNotFoundError, match="tasks"):
        rollouts.collect(DRAWS, group_size=2)


def test_a_draw_number_that_is_given_twice_is_refused():
    with runner(["done"]) as rollouts, pytest.raises(ValueError, match="draw number 7"):
        rollouts.collect([DRAWS[0], DRAWS[0]], group_size=1)


@pytest.mark.parametrize("own_handler", [False, True])
def test_ctrl_c_cancels_the_trajectories_and_leaves_nothing_behind(own_handler: bool):
    """J07"""
    env = counted()
    waiting = threading.Event()

    def answer(request: GenerateRequest) -> ScriptedReply:
        waiting.set()
        return ScriptedReply(text="done", delay_s=math.inf)

    def interrupt() -> None:
        waiting.wait(10)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    policy = ScriptedPolicy(answer, renderer=renderer())
    before = signal.signal(signal.SIGINT, handler) if own_handler else None
    try:
        with runner((), policy=policy, env=env, max_concurrent=4) as rollouts:
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                rollouts.collect(DRAWS, group_size=4)
            assert policy.num_slots == 0
            waiting.clear()
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    assert env.made == env.closed == 4


def test_an_error_of_the_callback_comes_out_and_ends_the_others():
    def complain(trajectory: Trajectory) -> None:
        raise ZeroDivisionError("in the callback")

    policy = ScriptedPolicy(["done"], renderer=renderer())
    with runner((), policy=policy) as rollouts, pytest.raises(ZeroDivisionError):
        rollouts.collect(DRAWS, group_size=2, on_trajectory=complain)
    assert policy.num_slots == 0


def test_the_overhead_of_a_turn_is_below_a_millisecond():
    with runner([call_text(), "done"]) as rollouts:
        draws = [Draw(number=number, task=TASK) for number in range(16)]
        took = []
        for _ in range(3):
            started = time.process_time()
            groups = rollouts.collect(draws, group_size=8)
            took.append(time.process_time() - started)
            assert sum(len(t.turns) for t in trajectories(groups)) == 256
    assert min(took) / 256 < 1e-3


def test_a_closed_runner_can_be_closed_again():
    with runner(["done"]) as rollouts:
        rollouts.close()
