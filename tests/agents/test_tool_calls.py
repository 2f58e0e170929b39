"""Tool calls in sampled text: strings, reasoning, broken and cut calls."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_chat import assistant, call_text, renderer, roll

from quintain.agents.tool_calls import parse_reply
from quintain.envs import Message, ToolCall


def parse(text: str, *, reasoning_open: bool = False, cut: bool = False):
    return parse_reply(text, call_id_prefix="call_0_", reasoning_open=reasoning_open, cut=cut)


@pytest.mark.parametrize("text", ["if (x) { y", "a } b", 'say "}" {', "\\", "[{", "line\nbreak\ttab"])
def test_braces_inside_of_a_string_do_not_end_a_call(text: str):
    """B01"""
    arguments = json.dumps({"content": text})
    reply = parse(call_text("write", arguments))
    assert [(c.name, json.loads(c.arguments)) for c in reply.message.tool_calls] == [("write", {"content": text})]
    assert reply.num_malformed == 0 and reply.message.content == ""


@pytest.mark.parametrize("mark", ["</tool_call>", "<tool_call>", "</think>", "<think>", "<|im_end|>"])
def test_marks_inside_of_a_string_belong_to_the_string(mark: str):
    """B02"""
    arguments = json.dumps({"cmd": f"echo '{mark}'"})
    reply = parse(f"A {call_text('sh', arguments)} B")
    assert [c.arguments for c in reply.message.tool_calls] == [arguments]
    assert reply.message.content == "A  B"
    assert reply.message.reasoning is None


def test_a_call_whose_string_never_ends_is_handed_on_as_broken_and_not_run_as_something_else():
    """B02"""
    reply = parse('<tool_call>\n{"name": "sh", "arguments": {"cmd": "rm </tool_call> tail')
    (call,) = reply.message.tool_calls
    assert call.name == "sh" and reply.num_malformed == 1
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)


def test_a_call_drafted_in_reasoning_is_counted_and_never_returned():
    """B03"""
    reply = parse(f"<think>maybe {call_text('a')}</think>{call_text('b')}")
    assert [c.name for c in reply.message.tool_calls] == ["b"]
    assert reply.events == {"call_in_reasoning": 1}
    assert reply.message.reasoning is not None and "maybe" in reply.message.reasoning


@pytest.mark.parametrize("reasoning_open", [True, False])
def test_what_stands_before_a_lone_closing_tag_is_reasoning_calls_included(reasoning_open: bool):
    """B03, A14"""
    reply = parse(f"maybe {call_text('a')}</think>{call_text('b')}", reasoning_open=reasoning_open)
    assert [c.name for c in reply.message.tool_calls] == ["b"]
    assert reply.events == {"call_in_reasoning": 1}
    assert reply.message.content == ""


def test_a_broken_draft_does_not_swallow_the_end_of_the_reasoning():
    """B03"""
    reply = parse(f'<think>try <tool_call>{{"name": "a</think>{call_text("b")}')
    assert [c.name for c in reply.message.tool_calls] == ["b"]


def test_a_call_between_two_blocks_of_reasoning_runs():
    """B03"""
    reply = parse(f"<think>one</think>{call_text('a')}<think>two {call_text('x')}</think>{call_text('b')}")
    assert [c.name for c in reply.message.tool_calls] == ["a", "b"]
    assert reply.message.reasoning is not None and reply.message.reasoning.startswith("one")


def test_a_lone_closing_tag_ends_the_reasoning():
    """A14"""
    message = parse("2+2 is 4 </think> 4").message
    assert (message.reasoning, message.content) == ("2+2 is 4", "4")


@pytest.mark.parametrize("arguments", ['{"a": 1,}', '{"a": ', "{'a': 1}", '{"a": 1} }', "nope"])
def test_a_malformed_call_keeps_its_name_and_its_raw_text(arguments: str):
    """B04"""
    reply = parse(call_text("add", arguments))
    (call,) = reply.message.tool_calls
    assert call.name == "add" and arguments in call.arguments
    assert reply.num_malformed == 1


@pytest.mark.parametrize("body", ["", "42", "[1]", '"add"', "add(1, 2)"])
def test_a_call_that_is_no_object_is_malformed_and_has_no_name(body: str):
    """B04"""
    reply = parse(f"<tool_call>{body}</tool_call>")
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [("", body)]
    assert reply.num_malformed == 1


def test_arguments_written_as_a_json_string_are_unwrapped():
    """A15"""
    reply = parse(call_text("add", json.dumps('{"a": 1}')))
    assert reply.message.tool_calls[0].arguments == '{"a": 1}'


def test_missing_arguments_are_an_empty_object():
    assert parse('<tool_call>{"name": "now"}</tool_call>').message.tool_calls[0].arguments == "{}"


def test_two_calls_to_one_tool_keep_their_order_and_have_ids_of_their_own():
    """B06"""
    reply = parse("\n".join(call_text("search", f'{{"q": "{query}"}}') for query in "XY"))
    assert [(c.id, c.arguments) for c in reply.message.tool_calls] == [
        ("call_0_0", '{"q": "X"}'),
        ("call_0_1", '{"q": "Y"}'),
    ]


def test_text_that_is_not_ascii_stays_as_it_was_written():
    """B09"""
    arguments = '{"ciudad": "Málaga", "c": "北京"}'
    chat = renderer()
    reply = chat.parse(chat.encode_reply(call_text("go", arguments)), "stop", call_id_prefix="c")
    assert reply.message.tool_calls[0].arguments == arguments
    text = chat.assistant_text(assistant("", reply.message.tool_calls[0]))
    assert "北京" in text and "\\u" not in text
    prompt = chat.decode(chat.prompt_ids([Message(role="user", content="北京 😀")], ()))
    assert "北京 😀" in prompt


@pytest.mark.parametrize("cut", ['{"name": "rm", "argum', '{"name": "rm", "arguments": {}}', "", '{"a": "</tool_'])
def test_a_call_that_a_limit_cut_is_never_a_call(cut: str):
    """B10"""
    reply = parse(f"{call_text('ok')}\n<tool_call>{cut}", cut=True)
    assert [c.name for c in reply.message.tool_calls] == ["ok"]
    assert reply.unterminated and reply.events == {"unterminated_call": 1}
    assert reply.message.content.endswith(cut)


@pytest.mark.parametrize(
    ("tail", "name"),
    [('{"name": "f"}', "f"), ('{"name": "f", "argum', "f"), ("", ""), ('{"name": "f"}<tool_call>', "f")],
)
def test_a_call_without_an_end_in_a_reply_that_the_model_ended_is_malformed(tail: str, name: str):
    """B10: and its arguments are never valid JSON, so no tool can run with them."""
    reply = parse(f"so {call_text('ok')}\n<tool_call>{tail}")
    _, call = reply.message.tool_calls
    assert (call.name, call.arguments) == (name, f"<tool_call>{tail}")
    assert reply.message.content == "so" and reply.num_malformed == 1
    assert not reply.unterminated and reply.events == {"unterminated_call": 1}


def test_a_number_of_too_many_digits_is_malformed_and_does_not_raise():
    """B04"""
    arguments = f'{{"a": {"7" * 5000}}}'
    chat = renderer()
    reply = chat.parse(chat.encode_reply(call_text("add", arguments)), "stop", call_id_prefix="c")
    (call,) = reply.message.tool_calls
    assert call.name == "add" and arguments in call.arguments and reply.num_malformed == 1
    assert "7" * 5000 in chat.assistant_text(assistant("", ToolCall(id="c", name="add", arguments=arguments)))


def test_raw_line_breaks_in_a_string_reach_the_tool():
    """B09: the environment reads strict JSON; everything else stays as it was written."""
    written = '{"text": "one\ntwo\t\\"é\\"",\n "n": 1.50}'
    (call,) = parse(call_text("say", written)).message.tool_calls
    assert call.arguments == '{"text": "one\\ntwo\\t\\"é\\"",\n "n": 1.50}'
    (wrapped,) = parse(call_text("say", '"{\\"text\\": \\"one\\ntwo\\"}"')).message.tool_calls
    assert json.loads(wrapped.arguments) == {"text": "one\ntwo"}
    trajectory = roll([call_text("say", '{"text": "one\ntwo"}'), "done"])
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["one\ntwo"]
    assert trajectory.events == {}


@pytest.mark.parametrize(
    "text",
    ["<think>" + '<tool_call>{"a": "' * 4000 + "</tool_call>", '<tool_call>"</tool_call>" ' * 4000],
    ids=["drafts", "hidden-marks"],
)
def test_the_time_to_parse_does_not_grow_with_the_square_of_the_text(text: str):
    started = time.process_time()
    parse(text)
    assert time.process_time() - started < 1.5


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a", "arguments": {}}', '"', "{", "}", "é\n"]


@given(st.lists(st.sampled_from(MARKS), max_size=12).map("".join), st.booleans(), st.booleans())
def test_no_text_makes_the_parser_raise_or_run_an_unclosed_call(text: str, reasoning_open: bool, cut: bool):
    """B02, B10"""
    reply = parse(text, reasoning_open=reasoning_open, cut=cut)
    whole = [c for c in reply.message.tool_calls if not c.arguments.startswith("<tool_call>")]
    assert len(whole) <= text.count("</tool_call>")
    assert reply.text == text


def test_deeply_nested_json_is_malformed_and_does_not_raise():
    """B04"""
    reply = parse(call_text("a", "[" * 100_000 + "]" * 100_000))
    assert reply.num_malformed == 1
