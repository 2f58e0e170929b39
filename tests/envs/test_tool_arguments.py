"""What a model is told of tools, and what happens to each way of calling one wrongly."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import pytest
from pydantic import BaseModel
from small_envs import Desk, Unit, call

from quintain.envs import Message, ToolEnv, TrajectoryState, reward, tool
from quintain.envs.tools import tools_of
from quintain.sandbox import BlockingSandbox, Sandbox


@pytest.fixture
def desk() -> Desk:
    env = Desk()
    env.reset(seed=0)
    return env


def ask(env: Desk, name: str, arguments: str) -> tuple[Message, dict[str, int]]:
    """The one answer to one call, and the turn's events."""
    observation, value, terminated, truncated, info = env.step(call((name, arguments)))
    assert (len(observation), value, terminated, truncated) == (1, 0.0, False, False)
    return observation[0], info["events"]


def test_schema_comes_from_types_defaults_and_docstring() -> None:
    specs = {spec.name: spec for spec in Desk().tool_specs}
    assert list(specs) == ["search", "replace", "measure", "today", "fail"]
    assert specs["search"].description == "Search the documents."
    assert specs["search"].parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in a few words."},
            "limit": {"type": "integer", "default": 5, "description": "Most results."},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert specs["today"].parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    measure = specs["measure"].parameters["properties"]
    assert measure["length"] == {"type": "number"}
    assert measure["unit"]["enum"] == ["m", "ft"] and measure["unit"]["default"] == "m"
    assert measure["mode"]["enum"] == ["fast", "exact"]
    assert measure["tags"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert "$ref" not in json.dumps(specs["measure"].to_openai())


def test_values_arrive_with_their_python_types(desk: Desk) -> None:
    ask(desk, "measure", '{"length": 3, "unit": "ft", "mode": "exact", "tags": ["a"], "extra": {"x": 1}}')
    assert desk.state.executed == [
        {"length": 3.0, "unit": Unit.FOOT, "mode": "exact", "tags": ["a"], "extra": {"x": 1}}
    ]
    ask(desk, "measure", '{"length": 1.5}')
    assert desk.state.executed[-1] == {
        "length": 1.5,
        "unit": Unit.METRE,
        "mode": "fast",
        "tags": None,
        "extra": None,
    }


@pytest.mark.parametrize("text", ['{"query": "a",}', '{"query": ', "", "{", '{"query": NaN}', "[" * 5000, '"\\ud800"'])
def test_malformed_json_is_an_observation_that_names_tool_and_position(desk: Desk, text: str) -> None:
    """B04"""
    answer, events = ask(desk, "search", text)
    assert events == {"invalid_json": 1}
    assert '"search"' in answer.content and "line 1 column" in answer.content and len(answer.content) < 400
    assert desk.state.executed == []
    assert ask(desk, "search", '{"query": "next turn"}')[1] == {}


@pytest.mark.parametrize("name", ["serch", "Search", "search ", "x" * 10_000])
def test_unknown_tool_is_a_distinct_error_that_lists_the_known(desk: Desk, name: str) -> None:
    """B05"""
    answer, events = ask(desk, name, '{"query": "a"}')
    assert events == {"unknown_tool": 1}
    assert name[:80] in answer.content and "search, replace, measure, today, fail" in answer.content
    assert "argument" not in answer.content and len(answer.content) < 400


def test_call_without_a_readable_name_is_told_the_form(desk: Desk) -> None:
    """B05"""
    answer, events = ask(desk, "", "nonsense")
    assert events == {"invalid_json": 1} and "name" in answer.content and "search" in answer.content


def test_two_calls_of_one_tool_both_run_in_order_and_those_past_the_limit_are_named(desk: Desk) -> None:
    """B06"""
    texts = ["X", "Y", "Z", "W"]
    action = call(*(("search", json.dumps({"query": text, "limit": 1})) for text in texts))
    observation, _, _, _, info = desk.step(action)
    assert [message.tool_call_id for message in observation] == ["c0", "c1", "c2", "c3"]
    assert [message.content for message in observation[:3]] == ['["X 0"]', '["Y 0"]', '["Z 0"]']
    assert "not run" in observation[3].content and "call 4" in observation[3].content and "3" in observation[3].content
    assert [done["query"] for done in desk.state.executed] == ["X", "Y", "Z"]
    assert info["events"] == {"calls_skipped": 1}


@pytest.mark.parametrize(
    ("written", "meant"),
    [("true", True), ("false", False), ('"true"', True), ('"True"', True), ('"false"', False), ('"False"', False)],
)
def test_booleans_are_read_from_json_and_from_the_four_words(desk: Desk, written: str, meant: bool) -> None:
    """B07"""
    ask(desk, "replace", f'{{"text": "a", "replace_all": {written}}}')
    assert desk.state.executed == [{"text": "a", "replace_all": meant}]


@pytest.mark.parametrize("written", ['"yes"', '"no"', '"0"', '"1"', '""', '"on"', '"FALSE"', "0", "1", "null", "[]"])
def test_other_words_for_a_boolean_are_refused(desk: Desk, written: str) -> None:
    """B07"""
    answer, events = ask(desk, "replace", f'{{"text": "a", "replace_all": {written}}}')
    assert events == {"invalid_arguments": 1} and "replace_all" in answer.content
    assert desk.state.executed == []


@pytest.mark.parametrize(
    "text", ["2025-06-15T10:30:00Z", "3.10.5-beta", "null", "true", "{", "x = {'a': 1}\n" * 300, ""]
)
def test_text_fields_take_text_as_it_is(desk: Desk, text: str) -> None:
    """B08"""
    ask(desk, "replace", json.dumps({"text": text}))
    assert desk.state.executed == [{"text": text, "replace_all": False}]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"length": 1, "extra": "x = {'a': 1}\n" * 300}, "extra"),
        ({"length": "three"}, "length"),
        ({"length": "3"}, "length"),
        ({"length": True}, "length"),
        ({"length": None}, "length"),
        ({"length": 1, "tags": "a"}, "tags"),
        ({"length": 1, "tags": [1]}, "tags"),
        ({"length": 1, "unit": "yard"}, "unit"),
        ({"length": 1, "mode": "slow"}, "mode"),
        ({"length": 1, "extra": {"x": "1"}}, "extra"),
    ],
)
def test_mistyped_arguments_are_one_error_that_names_the_field(
    desk: Desk, arguments: dict[str, Any], field: str
) -> None:
    """B08, B11"""
    answer, events = ask(desk, "measure", json.dumps(arguments))
    assert events == {"invalid_arguments": 1}
    assert f'argument "{field}"' in answer.content and "Arguments: length (number)" in answer.content
    assert len(answer.content) < 600 and desk.state.executed == []


@pytest.mark.parametrize("written", ["1e999", "[-1e999]", '{"deep": [1e999]}'])
def test_a_number_too_large_for_a_float_is_refused_in_untyped_arguments_too(written: str) -> None:
    def keep(value: Any) -> str:
        """Keep a value."""
        return repr(value)

    class Keeping(Desk):
        tools = (keep,)

    env = Keeping()
    env.reset(seed=0)
    answer, events = ask(env, "keep", f'{{"value": {written}}}')
    assert events == {"invalid_arguments": 1} and 'argument "value"' in answer.content


@pytest.mark.parametrize("value", ["1.0", '"1"', '"1e3"', "true", "1.5", "null"])
def test_integers_are_json_integers(desk: Desk, value: str) -> None:
    """B08"""
    answer, events = ask(desk, "search", f'{{"query": "a", "limit": {value}}}')
    assert (events == {"invalid_arguments": 1}) and '"limit"' in answer.content


def test_non_ascii_stays_as_written_in_schemas_arguments_and_results(desk: Desk) -> None:
    """B09"""
    observation, *_ = desk.step(call(("search", '{"query": "北京 Málaga", "limit": 1}'), ("measure", '{"length": 1}')))
    assert observation[0].content == '["北京 Málaga 0"]' and "北京" in observation[1].content
    answer, _ = ask(desk, "search", '{"ciudad": "Málaga", "北": 1}')
    assert "ciudad" in answer.content and "北" in answer.content and "\\u" not in answer.content


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("today", '{"result": "x"}', ['unknown argument "result"', "no arguments"]),
        ("search", "{}", ['missing argument "query"', "query (string)", "limit (integer, optional)"]),
        ("search", '{"quary": "a"}', ['unknown argument "quary"', 'missing argument "query"']),
        ("search", '{"query": 5}', ['argument "query"', "string"]),
        ("search", '["a"]', ["must be a JSON object", "query (string)"]),
        ("search", '"a"', ["must be a JSON object"]),
        ("search", "null", ["must be a JSON object"]),
    ],
)
def test_wrong_arguments_execute_nothing_and_name_field_and_valid_names(
    desk: Desk, name: str, arguments: str, words: list[str]
) -> None:
    """B11"""
    answer, events = ask(desk, name, arguments)
    assert events == {"invalid_arguments": 1} and desk.state.executed == []
    for word in words:
        assert word in answer.content


def test_a_model_that_never_calls_right_is_counted_and_stopped_by_the_turn_limit() -> None:
    """B12"""
    env = Desk()
    env.max_turns = 5
    env.reset(seed=0)
    ended, errors, steps = False, 0, 0
    while not ended:
        _, _, terminated, truncated, info = env.step(call(("search", "not json")))
        errors, steps, ended = errors + info["events"]["invalid_json"], steps + 1, terminated or truncated
    assert (steps, errors, terminated, truncated) == (5, 5, False, True)


def test_expected_trouble_is_an_observation_and_a_bug_leaves_step(desk: Desk) -> None:
    answer, events = ask(desk, "fail", '{"kind": "tool"}')
    assert answer.content == "Error: the drawer is locked" and events == {"tool_error": 1}
    with pytest.raises(RuntimeError, match="a bug in the environment"):
        desk.step(call(("fail", '{"kind": "bug"}')))


def shout(text: str) -> str:
    """Say it loud."""
    return text.upper()


def test_a_plain_function_is_a_tool_too() -> None:
    class Shouting(Desk):
        tools = (shout,)

    env = Shouting()
    env.reset(seed=0)
    assert ask(env, "shout", '{"text": "a"}')[0].content == "A"
    assert [spec.name for spec in env.tool_specs][-1] == "shout"


def no_docstring(text: str) -> str:
    return text


def no_type(text) -> str:
    """Say."""
    return text


def anything(*texts: str) -> str:
    """Say."""
    return ""


def unspeakable(stream: BytesIO) -> str:
    """Say."""
    return ""


class Node(BaseModel):
    below: list[Node] = []


def endless(node: Node) -> str:
    """Say."""
    return ""


async def blocking(box: BlockingSandbox) -> str:
    """Say."""
    return ""


def awaiting(box: Sandbox) -> str:
    """Say."""
    return ""


@tool(isolate="process")
def stateful(state: TrajectoryState) -> str:
    """Say."""
    return ""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, "has no docstring"),
        (no_type, "`text` has no type"),
        (anything, "name each"),
        (unspeakable, "cannot be put into words.*BytesIO"),
        (endless, "Node, refers to itself"),
        (blocking, "annotate `box` with `Sandbox`: await"),
        (awaiting, "annotate `box` with `BlockingSandbox`"),
        (stateful, "no environment, state or box"),
    ],
)
def test_tools_that_cannot_be_described_are_refused_with_the_remedy(function: Any, words: str) -> None:
    class Bad(Desk):
        tools = (function,)

    with pytest.raises(TypeError, match=words):
        Bad()


def test_overriding_a_tool_replaces_or_removes_it() -> None:
    class Less(Desk):
        today = None  # type: ignore[assignment]

        @tool
        def search(self, words: str) -> str:
            """Search otherwise."""
            return words

    assert list(tools_of(Less)) == ["search", "replace", "measure", "fail"]
    assert tools_of(Less)["search"].spec.description == "Search otherwise."


def test_a_tool_that_takes_a_box_needs_a_scope() -> None:
    class Scopeless(ToolEnv):
        @tool
        def run(self, sandbox: BlockingSandbox) -> str:
            """Run."""
            return ""

        @reward
        def any(self) -> float:
            return 1.0

    with pytest.raises(TypeError, match="sandbox_scope is 'none'"):
        Scopeless()
