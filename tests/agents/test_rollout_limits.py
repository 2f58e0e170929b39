"""Where a trajectory stops: turns, tokens, time, format errors."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
from toy_chat import Parrot, call_text, renderer, roll

from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.scripted_policy import ScriptedPolicy, ScriptedReply
from quintain.envs import Message, Task


def end_of(trajectory) -> tuple[Outcome, StopReason]:
    return trajectory.outcome, trajectory.stop_reason


class Recorder(Parrot):
    """Keeps the actions it got."""

    def prepare(self) -> None:
        self.actions: list[Message] = []

    def step(self, action: Message):
        self.actions.append(action)
        return super().step(action)


def test_the_limit_of_one_turn_does_not_cut_the_row():
    """A08: three turns of 6 tokens, a limit of 8 a turn."""
    chat = renderer()
    short = chat.encode_plain("x") + chat.encode_reply("<tool_call>{}</tool_call>")
    assert len(short) == 6
    trajectory = roll([short, short, short], max_new_tokens=8, max_format_errors=9, env=lambda: limited(3))
    assert len(trajectory.turns) == 3
    (row,) = trajectory.rows
    assert row.num_sampled_tokens == 18 and row.token_ids[-6:] == short


def limited(max_turns: int) -> Parrot:
    env = Parrot()
    env.max_turns = max_turns
    return env


def test_a_reply_cut_by_length_is_flagged_and_not_handed_to_the_environment():
    """A13, B10"""
    env = Recorder()
    script = [call_text(), call_text(), call_text(arguments='{"text": "' + "long " * 50 + '"}')]
    trajectory = roll(script, env=lambda: env, max_new_tokens=len(renderer().encode_reply(call_text())))
    assert end_of(trajectory) == (Outcome.TRUNCATED, StopReason.LENGTH)
    assert trajectory.truncated and not trajectory.terminated
    assert trajectory.turns[2].completion.finish_reason == "length"
    assert trajectory.messages[-1].tool_calls == () and trajectory.events["unterminated_call"] == 1
    assert len(env.actions) == 2 and trajectory.turns[2].observation == ()
    assert trajectory.reward == 0.0 and trajectory.reward_terms == {}


def test_a_cut_reply_with_a_whole_call_is_not_run_either():
    """A13"""
    env = Recorder()
    chat = renderer()
    reply = ScriptedReply(token_ids=chat.encode_reply(call_text())[:-1], finish_reason="length")
    assert roll([reply], env=lambda: env).stop_reason is StopReason.LENGTH
    assert env.actions == []


def test_a_reply_whose_last_allowed_token_ends_the_turn_is_whole():
    """A13"""
    chat = renderer()
    reply = ScriptedReply(token_ids=chat.encode_reply("done"), finish_reason="length")
    assert end_of(roll([reply])) == (Outcome.COMPLETED, StopReason.TERMINATED)


@pytest.mark.parametrize("limit", [200, 256])
def test_a_huge_tool_result_never_breaks_the_budget_of_its_own_or_of_the_row(limit: int):
    """A16"""
    chat = renderer()

    class Talker(Parrot):
        reply = "北" * 2000

    trajectory = roll([call_text(), "done"], env=Talker, max_tool_tokens=limit)
    (tool,) = (m for m in trajectory.messages if m.role == "tool")
    assert len(chat.encode_plain(tool.content)) <= limit and "\ufffd" not in tool.content
    assert trajectory.events["tool_output_cut"] == 1
    assert trajectory.turns[0].observation == (tool,)
    small = roll([call_text(), "done"], env=Talker, max_tool_tokens=limit, max_trajectory_tokens=150)
    assert end_of(small) == (Outcome.TRUNCATED, StopReason.MAX_TOKENS)
    assert sum(len(row.token_ids) for row in small.rows) <= 150


def with_context(script: Any, context: int) -> ScriptedPolicy:
    return ScriptedPolicy(script, renderer=renderer(), context_tokens=context)


def prompt_length() -> int:
    return len(renderer().prompt_ids([Message(role="user", content="say it")], Parrot().tool_specs))


@pytest.mark.parametrize("room", [1, 4, 16, 40])
def test_no_request_is_larger_than_the_row_may_become(room: int):
    """A17: the fake engine refuses what does not fit its context, and is never asked for it."""
    limit = prompt_length() + room
    policy = with_context([call_text()], limit)
    trajectory = roll((), policy=policy, max_trajectory_tokens=limit, max_new_tokens=16)
    assert trajectory.outcome is Outcome.TRUNCATED
    assert policy.requests[0].sampling.max_new_tokens == min(16, room)
    assert trajectory.stop_reason is (StopReason.MAX_TOKENS if room < 16 else StopReason.LENGTH)


def test_a_prompt_that_fills_the_row_is_truncated_before_anything_is_sent():
    """A17"""
    policy = with_context(["done"], prompt_length())
    trajectory = roll((), policy=policy, max_trajectory_tokens=prompt_length())
    assert end_of(trajectory) == (Outcome.TRUNCATED, StopReason.MAX_TOKENS)
    assert policy.requests == [] and trajectory.rows == () and trajectory.reward == 0.0


def test_a_trajectory_that_ends_exactly_at_the_limit_keeps_its_reward():
    """A17"""
    limit = prompt_length() + len(renderer().encode_reply("done"))
    trajectory = roll((), policy=with_context(["done"], limit), max_trajectory_tokens=limit)
    assert end_of(trajectory) == (Outcome.COMPLETED, StopReason.TERMINATED)
    assert trajectory.reward == 1.0 and len(trajectory.rows[0].token_ids) == limit


def test_a_prompt_past_the_models_context_is_truncated_before_anything_is_sent():
    """A17"""
    policy = with_context([call_text(arguments='{"text": "' + "long " * 40 + '"}'), "done"], prompt_length() + 200)
    trajectory = roll((), policy=policy, max_tool_tokens=256, max_trajectory_tokens=4096)
    assert end_of(trajectory) == (Outcome.TRUNCATED, StopReason.MAX_TOKENS)
    assert len(policy.requests) == 1 and len(trajectory.turns) == 1
    assert end_of(roll((), policy=with_context(["done"], 8))) == (Outcome.TRUNCATED, StopReason.MAX_TOKENS)


@pytest.mark.parametrize(
    ("script", "limits", "reason"),
    [
        ([call_text()], {"max_new_tokens": 4}, StopReason.LENGTH),
        ([call_text()], {"max_trajectory_tokens": 8}, StopReason.MAX_TOKENS),
        ([call_text(arguments="{broken")], {"max_format_errors": 1}, StopReason.FORMAT),
        ([call_text(), ScriptedReply(text="done", delay_s=math.inf)], {"deadline_s": 0.3}, StopReason.DEADLINE),
    ],
)
def test_an_end_before_the_environment_judged_has_the_reward_that_the_recipe_says(
    script: Any, limits: dict[str, Any], reason: StopReason
):
    trajectory = roll(script, unjudged_reward=-1.0, **limits)
    assert (trajectory.stop_reason, trajectory.reward, trajectory.reward_terms) == (reason, -1.0, {})
    assert roll(script, **limits).reward == 0.0


def test_what_the_environment_judged_keeps_its_reward():
    assert roll([call_text()], env=lambda: limited(2), unjudged_reward=-1.0).reward == 0.0
    assert roll(["wrong"], unjudged_reward=-1.0).reward == 0.0


def test_malformed_calls_are_answered_and_the_trajectory_goes_on():
    """B04, B05"""
    broken, unknown = call_text(arguments='{"text": 1,}'), call_text("serch")
    trajectory = roll([broken, unknown, call_text(), "done"], max_format_errors=3)
    assert end_of(trajectory) == (Outcome.COMPLETED, StopReason.TERMINATED)
    answers = [m.content for m in trajectory.messages if m.role == "tool"]
    assert "say" in answers[0] and "serch" in answers[1] and "say" in answers[1] and answers[2] == "hello"
    assert [turn.num_format_errors for turn in trajectory.turns] == [1, 1, 0, 0]
    assert trajectory.events == {"invalid_json": 1, "unknown_tool": 1}


def test_endless_format_errors_end_the_trajectory_with_a_reason_of_their_own():
    """B12"""
    trajectory = roll([call_text(arguments="{broken")], max_format_errors=3)
    assert end_of(trajectory) == (Outcome.POLICY, StopReason.FORMAT)
    assert len(trajectory.turns) == 3 and trajectory.reward == 0.0
    assert sum(turn.num_format_errors for turn in trajectory.turns) == 3


def test_a_call_without_an_end_is_answered_with_an_error_and_is_no_final_answer():
    """B10"""
    trajectory = roll(['<tool_call>\n{"name": "say", "arguments": {"text": "x"}}', "done"])
    assert end_of(trajectory) == (Outcome.COMPLETED, StopReason.TERMINATED) and len(trajectory.turns) == 2
    (answer,) = (m.content for m in trajectory.messages if m.role == "tool")
    assert "not valid JSON" in answer
    assert [turn.num_format_errors for turn in trajectory.turns] == [1, 0]


def test_several_calls_of_one_turn_run_in_order_and_those_past_the_limit_are_named():
    """B06"""
    calls = "\n".join(call_text(arguments=f'{{"text": "{n}"}}') for n in "abcde")
    trajectory = roll([calls, "done"])
    answers = [(m.tool_call_id, m.content) for m in trajectory.messages if m.role == "tool"]
    assert [content for _, content in answers[:4]] == ["a", "b", "c", "d"]
    assert len(answers) == 5 and len({call_id for call_id, _ in answers}) == 5
    assert trajectory.events["calls_skipped"] == 1


def test_the_limit_of_turns_truncates_with_the_reward_of_the_environment():
    trajectory = roll([call_text()], env=lambda: limited(2))
    assert end_of(trajectory) == (Outcome.TRUNCATED, StopReason.MAX_TURNS)
    assert trajectory.truncated and not trajectory.terminated and trajectory.reward_terms == {"right": 0.0}


def test_solved_on_the_very_last_turn_counts_as_terminated_and_keeps_both_flags():
    """J02"""
    trajectory = roll([call_text(), "done"], env=lambda: limited(2))
    assert end_of(trajectory) == (Outcome.COMPLETED, StopReason.TERMINATED)
    assert trajectory.terminated and trajectory.truncated
    assert trajectory.reward == 1.0 and trajectory.success


def test_an_engine_that_never_answers_ends_the_trajectory_at_its_deadline():
    """D02"""
    started = time.monotonic()
    trajectory = roll([ScriptedReply(text="done", delay_s=math.inf)], deadline_s=0.2)
    assert time.monotonic() - started < 2.0
    assert end_of(trajectory) == (Outcome.INFRASTRUCTURE, StopReason.DEADLINE)
    assert math.isnan(trajectory.reward) and "generate" in str(trajectory.error)


class Sleeper(Parrot):
    """Its tool takes longer than anybody waits."""

    sleep_s = 3.0
    closed = False

    def rows(self, split: str) -> list[Mapping[str, Any]]:
        return [{"prompt": "p"}]

    def step(self, action: Message):
        time.sleep(self.sleep_s)
        return super().step(action)

    def close(self) -> None:
        self.closed = True
        super().close()


def test_a_tool_that_blocks_past_the_deadline_ends_the_trajectory_with_what_was_sampled():
    """D02"""
    env = Sleeper()
    started = time.monotonic()
    trajectory = roll([call_text(), "done"], env=lambda: env, deadline_s=0.2)
    assert time.monotonic() - started < 2.5
    assert end_of(trajectory) == (Outcome.TRUNCATED, StopReason.DEADLINE)
    assert trajectory.reward == 0.0 and len(trajectory.turns) == 1 and trajectory.rows
    assert not env.closed  # it is still in use by the call that nobody waits for
    deadline = time.monotonic() + 10.0
    while not env.closed and time.monotonic() < deadline:
        time.sleep(0.02)
    assert env.closed


def test_one_deadline_bounds_the_whole_trajectory_and_not_each_call():
    """D02"""
    started = time.monotonic()
    slow = ScriptedReply(text=call_text(), delay_s=0.1)
    trajectory = roll([slow], deadline_s=0.35, task=Task(id="t", prompt="p", data={"answer": "done"}))
    assert 0.3 < time.monotonic() - started < 3.0
    assert end_of(trajectory) == (Outcome.TRUNCATED, StopReason.DEADLINE)
    assert 1 <= len(trajectory.turns) <= 3
