"""The spaces hold every message that can really occur, and sample reproducibly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintain.envs import Message, ToolCall
from quintain.envs.spaces import MessageSpace, MessagesSpace

ACTION, OBSERVATION = MessageSpace(("assistant",)), MessagesSpace()
HARD_TEXTS = ["", "a b", "héé", "x" * 2**20, "🎯👩‍🚀", "\x00\x07\x1b[31m", "\ud800", "<|im_end|>", "\n\t ", "北京"]


@pytest.mark.parametrize("text", HARD_TEXTS, ids=range(len(HARD_TEXTS)))
def test_every_real_text_is_contained(text: str) -> None:
    """J05"""
    call = ToolCall(id="c", name=text, arguments=text)
    assert ACTION.contains(Message(role="assistant", content=text, tool_calls=(call,), reasoning=text))
    assert OBSERVATION.contains((Message(role="tool", content=text, tool_call_id="c", name=text),))
    assert OBSERVATION.contains((Message(role="system", content=text), Message(role="user", content=text)))
    assert OBSERVATION.contains(())


@given(st.text(), st.text(), st.text())
def test_any_text_is_contained(content: str, name: str, arguments: str) -> None:
    """J05"""
    call = ToolCall(id="c", name=name, arguments=arguments)
    assert ACTION.contains(Message(role="assistant", content=content, tool_calls=(call, call)))


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        {"role": "assistant", "content": ""},
        Message(role="user", content=""),
        Message(role="assistant", content=5),  # type: ignore[arg-type]
        Message(role="assistant", content="", tool_calls=[]),  # type: ignore[arg-type]
        Message(role="assistant", content="", tool_calls=("x",)),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_action_is_outside(value: object) -> None:
    assert not ACTION.contains(value)
    assert not OBSERVATION.contains(value) and not OBSERVATION.contains((Message(role="assistant", content=""),))


def test_equal_seeds_give_equal_samples_and_samples_are_contained() -> None:
    spaces = [(MessageSpace(("assistant",), tool_names=("look",)), MessagesSpace()) for _ in range(2)]
    for space in (space for pair in spaces for space in pair):
        space.seed(3)
    drawn = [[(action.sample(), observation.sample()) for _ in range(50)] for action, observation in spaces]
    assert drawn[0] == drawn[1] and len({str(pair) for pair in drawn[0]}) > 40
    assert all(action in spaces[0][0] and observation in spaces[0][1] for action, observation in drawn[0])
    assert any(action.tool_calls for action, _ in drawn[0])


def test_samples_survive_json_and_spaces_compare_by_value() -> None:
    action, observation = MessageSpace(("assistant",), seed=1), MessagesSpace(seed=1)
    actions = [action.sample() for _ in range(20)]
    observations = [observation.sample() for _ in range(20)]
    assert action.from_jsonable(action.to_jsonable(actions)) == actions
    assert observation.from_jsonable(observation.to_jsonable(observations)) == observations
    assert action == MessageSpace(("assistant",)) != MessageSpace(("user",)) and observation == MessagesSpace()
    with pytest.raises(ValueError, match="robot"):
        MessageSpace(("robot",))  # type: ignore[arg-type]
