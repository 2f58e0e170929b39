"""Tool calls of every family: the same table of cases, each written as that family's models write it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from call_writers import WRITERS, write

from quintain.agents.tool_calls import FAMILIES, detect_family, parser_for
from quintain.envs import ToolSpec

XML = ("qwen3_coder", "glm")
TOOLS = tuple(
    ToolSpec(
        name=name,
        description="A tool.",
        parameters={
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "flag": {"type": "boolean"},
                "count": {"type": "integer"},
                "nested": {"type": "object"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    )
    for name in ("write", "search")
)
END = {"harmony": "<|call|>"}


def parse(family: str, text: str, *, cut: bool = False, reasoning_open: bool = False):
    end = None if cut else END.get(family)
    return parser_for(family).parse(
        text, tools=TOOLS, call_id_prefix="call_0_", cut=cut, reasoning_open=reasoning_open, end_token=end
    )


def calls(reply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.message.tool_calls]


def one(family: str, arguments: dict[str, Any]) -> str:
    return write(family, [("write", arguments)])


def check_round_trip(family: str, wanted: Sequence[tuple[str, dict[str, Any]]]) -> None:
    reply = parse(family, write(family, wanted))
    assert calls(reply) == list(wanted)
    assert reply.num_malformed == 0 and not reply.events and reply.message.content == ""
    assert [call.id for call in reply.message.tool_calls] == [f"call_0_{i}" for i in range(len(wanted))]


def test_every_family_has_a_writer():
    assert set(WRITERS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "if (x) { y",
        "a } b",
        'say "}" {',
        "\\",
        "[{",
        "a\nb\tc",
        "2025-06-15T10:30:00Z",
        "3.10.5-beta",
        "true",
        "7",
        "null",
    ],
)
def test_text_arrives_as_it_was_written(family: str, text: str):
    """B01, B08"""
    check_round_trip(family, [("write", {"text": text})])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "mark",
    [
        "<tool_call>",
        "</think>",
        "<think>",
        "<|im_end|>",
        "[TOOL_CALLS]",
        "<|call|>",
        "<|tool_call_end|>",
        "</function>",
        "</tool_call>",
        "</parameter>",
        "</arg_value>",
        "<｜tool▁call▁end｜>",
        "```",
        "<|end|>",
        "</｜DSML｜invoke>",
    ],
)
def test_marks_inside_of_a_string_belong_to_the_string(family: str, mark: str):
    """B02"""
    check_round_trip(family, [("write", {"text": f"echo '{mark}' x"})])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "harmony"])
def test_a_call_drafted_in_reasoning_is_counted_and_not_returned(family: str):
    """B03"""
    draft, real = one(family, {"text": "A"}), one(family, {"text": "B"})
    reply = parse(family, f"<think>maybe {write(family, [('write', {'text': 'A'})], later=True)}</think>{real}")
    assert calls(reply) == [("write", {"text": "B"})]
    assert reply.events == {"call_in_reasoning": 1}
    opened = parse(
        family, f"hm {write(family, [('write', {'text': 'A'})], later=True)}</think>{real}", reasoning_open=True
    )
    assert calls(opened) == [("write", {"text": "B"})]
    lone = parse(family, f"{draft}</think>{real}")
    assert calls(lone) == [("write", {"text": "B"})] and lone.events == {"call_in_reasoning": 1}


def test_a_harmony_call_in_the_analysis_channel_is_counted_and_not_returned():
    """B03"""
    draft = "<|channel|>analysis to=functions.write <|constrain|>json<|message|>{}<|call|>"
    reply = parse("harmony", f"{draft}<|start|>assistant{one('harmony', {'text': 'B'})}")
    assert calls(reply) == [("write", {"text": "B"})] and reply.events == {"call_in_reasoning": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_be_read_is_handed_on_with_its_name_and_never_as_an_object(family: str):
    """B04"""
    text = one(family, {"count": 1})
    for broken in _broken_variants(family, text):
        reply = parse(family, broken)
        assert reply.num_malformed == 1, broken
        call = reply.message.tool_calls[0]
        assert call.name == "write"
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)


def _broken_variants(family: str, text: str) -> list[str]:
    if family == "qwen3_coder":
        return [text.replace("</parameter>", "")]
    if family == "glm":
        return [text.replace("</arg_value>", "")]
    if family == "deepseek_v32":
        return [text.replace("</｜DSML｜parameter>", "")]
    return [text.replace('"count": 1', '"count": 1,'), text.replace('"count": 1', '"count": ')]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_of_one_tool_stay_two_in_their_order(family: str):
    """B06"""
    if family == "harmony":  # one call a turn: the call's end is the turn's end
        return check_round_trip(family, [("search", {"text": "X"})])
    return check_round_trip(family, [("search", {"text": "X"}), ("search", {"text": "Y"}), ("write", {"count": 2})])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "arguments", [{"flag": False}, {"flag": True}, {"count": -3}, {"nested": {"a": [1, None, {"b": "}"}]}}]
)
def test_values_keep_their_types(family: str, arguments: dict[str, Any]):
    """B07"""
    check_round_trip(family, [("write", arguments)])


@pytest.mark.parametrize("family", XML)
@pytest.mark.parametrize("word", ["yes", "1.2.3", "True", "NaN", "x" * 4000])
def test_raw_text_that_is_no_json_stays_a_string_for_the_schema_check_to_judge(family: str, word: str):
    """B07, B08"""
    reply = parse(family, write(family, [("write", {"flag": word, "nested": word})]))
    assert calls(reply) == [("write", {"flag": word, "nested": word})]


@pytest.mark.parametrize("family", XML)
def test_null_is_null_only_where_the_schema_has_it(family: str):
    """B08"""
    reply = parse(family, write(family, [("write", {"text": "null", "note": "null"})]))
    assert calls(reply) == [("write", {"text": "null", "note": None})]


@pytest.mark.parametrize("family", FAMILIES)
def test_letters_are_not_escaped(family: str):
    """B09, A12"""
    reply = parse(family, one(family, {"text": "Málaga 北京 😀"}))
    assert "Málaga 北京 😀" in reply.message.tool_calls[0].arguments


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_a_limit_cut_is_no_call(family: str):
    """B10"""
    text = one(family, {"text": "a long text", "nested": {"a": 1}})
    end = text.rindex("long")
    reply = parse(family, text[:end], cut=True)
    assert reply.message.tool_calls == () and reply.unterminated
    assert reply.events == {"unterminated_call": 1}
    ended = parse(family, text[:end])
    assert ended.num_malformed == 1 and ended.message.tool_calls[0].name == "write"


@pytest.mark.parametrize("family", FAMILIES)
def test_names_that_no_tool_has_and_extra_arguments_are_handed_on(family: str):
    """B05, B11: the environment answers them."""
    reply = parse(family, write(family, [("serch", {"result": "x"})]))
    assert calls(reply) == [("serch", {"result": "x"})]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_without_a_call_is_content(family: str):
    """B12"""
    text = "<|channel|>final<|message|>x {y}" if family == "harmony" else "x {y}"
    reply = parse(family, text, cut=True)
    assert reply.message.tool_calls == () and reply.message.content == "x {y}" and not reply.events


def test_an_unknown_family_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r'"hermse".*hermes, qwen3_coder'):
        parser_for("hermse")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_tells_its_family(family: str):
    template = one(family, {"text": "x"})
    if family == "llama3":
        template = "<|python_tag|>"
    assert detect_family(template, ()) == family
    assert detect_family("no tools", ()) == "hermes"


def test_a_template_decides_before_the_vocabulary():
    assert detect_family('<tool_call>\n{"name"', ["<|python_tag|>", "<|eot_id|>"]) == "hermes"
    assert detect_family("{{ messages }}", ["<|python_tag|>"]) == "llama3"
