"""The life of a trajectory: reset, steps, limits, rewards, and what is forgotten afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from small_envs import Desk, Notebook, call, say

from quintain.envs import Message, ToolEnv, VerifierError, reward
from quintain.sandbox import SandboxError, SandboxPool


def test_first_observation_is_the_prompt_behind_the_system_prompt() -> None:
    env = Desk()
    task = env.task_at(3)
    observation, info = env.reset(options={"task": task})
    assert observation == (Message(role="user", content="train question 3"),)
    assert info == {"reward_terms": {}, "metrics": {}, "success": False, "events": {}}
    env.system_prompt = "Be brief."
    observation, _ = env.reset(options={"task": task})
    assert [message.role for message in observation] == ["system", "user"]


def test_message_without_calls_ends_the_trajectory_with_its_rewards() -> None:
    env = Desk()
    env.reset(options={"task": env.task_at(3)})
    env.step(call(("today", "{}")))
    observation, value, terminated, truncated, info = env.step(say("3"))
    assert (observation, value, terminated, truncated) == ((), 1.0, True, False)
    assert info == {"reward_terms": {"right": 1.0}, "metrics": {"num_messages": 4.0}, "success": True, "events": {}}
    assert [message.role for message in env.messages] == ["user", "assistant", "tool", "assistant"]


def test_resets_after_a_seed_are_reproducible_and_instances_do_not_disturb_each_other() -> None:
    """J01"""
    first, second = Desk(), Desk()
    prompts = [[], []]
    for seed in (7, None, None, None):
        prompts[0].append(first.reset(seed=seed)[0][0].content)
    np.random.seed(1)
    for seed in (7, None, None, None):
        prompts[1].append(second.reset(seed=seed)[0][0].content)
        first.reset()
    assert prompts[0] == prompts[1] and len(set(prompts[0])) > 1


def test_turn_limit_on_the_ending_step_sets_both_flags_and_keeps_the_reward() -> None:
    """J02"""
    env = Desk()
    env.max_turns = 2
    env.reset(options={"task": env.task_at(3)})
    assert env.step(call(("today", "{}")))[2:4] == (False, False)
    _, value, terminated, truncated, info = env.step(say("3"))
    assert (value, terminated, truncated, info["success"]) == (1.0, True, True, True)


def test_turn_limit_runs_the_last_calls_then_truncates_with_rewards() -> None:
    env = Desk()
    env.max_turns = 1
    env.reset(options={"task": env.task_at(3)})
    observation, value, terminated, truncated, info = env.step(call(("today", "{}")))
    assert observation[0].content == "2025-06-15"
    assert (value, terminated, truncated) == (0.0, False, True) and info["reward_terms"] == {"right": 0.0}


def test_step_never_resets_and_after_the_end_only_reset_goes_on() -> None:
    """J04"""
    env = Desk()
    with pytest.raises(ResetNeeded, match="has not begun"):
        env.step(say("0"))
    env.reset(options={"task": env.task_at(3)})
    _, _, _, _, info = env.step(say("3"))
    assert info["reward_terms"] == {"right": 1.0}
    before = (env.messages, env.task, env.num_turns)
    with pytest.raises(ResetNeeded, match="has ended; call reset"):
        env.step(say("4"))
    assert (env.messages, env.task, env.num_turns) == before


@pytest.mark.parametrize("action", ["text", None, Message(role="user", content="x"), {"role": "assistant"}])
def test_an_action_that_is_no_assistant_message_is_refused_and_takes_no_turn(action: Any) -> None:
    env = Desk()
    env.reset(seed=0)
    with pytest.raises(TypeError, match="assistant Message"):
        env.step(action)
    assert env.num_turns == 0 and env.step(say("x"))[2]


def test_nothing_of_a_trajectory_is_seen_by_the_next(pool: SandboxPool) -> None:
    """J06"""
    env, other = Notebook(pool=pool), Notebook(pool=pool)
    env.reset(seed=0)
    write = ("write", '{"text": "secret"}')
    first = env.step(call(write))[0][0].content
    again = env.step(call(("write", '{"text": "more"}')))[0][0].content
    assert "secret" in again and "'added'" in again
    env.reset(seed=0)
    assert env.step(call(write))[0][0].content == first
    other.reset(seed=0)
    assert other.step(call(write))[0][0].content == first
    env.close()
    other.close()


def test_boxes_come_back_on_every_path(pool: SandboxPool) -> None:
    """J06: the pool holds two boxes; twenty-five resets some failing in `prepare`, use up none."""
    for _ in range(5):
        env = Notebook(pool=pool, fail_in_prepare=3)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="prepare failed"):
                env.reset(seed=0)
        with pytest.raises(ResetNeeded):
            env.step(say("x"))
        env.reset(seed=0)
        env.reset(seed=1)
        env.close()
        env.close()
    boxes = [pool.acquire(), pool.acquire()]
    for box in boxes:
        pool.release(box)


def test_box_is_void_after_close_and_reset_takes_another(pool: SandboxPool) -> None:
    env = Notebook(pool=pool)
    with pytest.raises(RuntimeError, match="call reset"):
        _ = env.box
    env.reset(seed=0)
    box = env.box
    env.close()
    with pytest.raises(SandboxError):
        box.exec("true")
    env.reset(seed=0)
    assert env.box.exec("echo hi").stdout == "hi\n"
    env.close()


def judged_by(function: Callable[[Any], Any], weight: float = 1.0) -> ToolEnv:
    class Judged(Desk):
        right = reward(weight=weight)(function)  # type: ignore[assignment]

    env = Judged()
    env.reset(seed=0)
    return env


def boom(self: Any) -> float:
    raise KeyError("answer")


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize(
    "function",
    [boom, lambda self: math.nan, lambda self: math.inf, lambda self: None, lambda self: "1", lambda self: [1.0]],
)
def test_reward_that_fails_is_a_verifier_error_and_never_a_number(function: Any, weight: float) -> None:
    env = judged_by(function, weight)
    with pytest.raises(VerifierError, match="reward `right`"):
        env.step(say("x"))
    with pytest.raises(ResetNeeded):
        env.step(say("x"))


def test_sandbox_trouble_in_a_reward_stays_sandbox_trouble() -> None:
    def broken(self: Any) -> float:
        raise SandboxError("the box is gone")

    with pytest.raises(SandboxError, match="the box is gone"):
        judged_by(broken).step(say("x"))


@pytest.mark.parametrize("value", [True, np.True_, np.float32(1.0), 1])
def test_truths_and_numpy_numbers_are_rewards(value: Any) -> None:
    _, total, _, _, info = judged_by(lambda self: value, 0.5).step(say("x"))
    assert total == 0.5 and info["reward_terms"] == {"right": 0.5} and info["success"] is False


def test_weights_must_be_numbers_and_an_environment_needs_a_reward() -> None:
    with pytest.raises(ValueError, match="weight"):
        reward(weight=math.nan)

    class Unjudged(Desk):
        right = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match="has no reward"):
        Unjudged()


def test_an_environment_may_end_a_trajectory_itself() -> None:
    class Game(Desk):
        def is_over(self) -> bool:
            return len(self.state.executed) == 2

        def is_success(self, reward: float) -> bool:
            return self.is_over()

    env = Game()
    env.reset(seed=0)
    assert env.step(call(("today", "{}")))[2] is False
    observation, _, terminated, _, info = env.step(call(("today", "{}")))
    assert terminated and info["success"] and observation[0].content == "2025-06-15"


def test_render_shows_the_conversation() -> None:
    env = Desk(render_mode="ansi")
    env.reset(options={"task": env.task_at(0)})
    env.step(call(("today", "{}")))
    assert env.render() == "user: train question 0\nassistant: \n  -> today({})\ntool: 2025-06-15"
