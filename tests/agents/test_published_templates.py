"""The token law under the published templates of every family, and loss masks equal to those of trl's templates."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_templates import TEMPLATES, renderer, template, tokenizer
from toy_chat import Parrot

from quintain.agents.chat_families import facts_of, with_family_ids
from quintain.agents.renderer import TemplateError
from quintain.envs import Message, ToolCall

TOOLS = Parrot().tool_specs
SCHEMAS: list[Any] = [spec.to_openai() for spec in TOOLS]
REASONS = {"qwen3", "glm-4.5", "glm-4.7", "deepseek-v3.2", "kimi-k2", "gpt-oss"}
"""These write a block for reasoning in every reply; a reply without it would be another text there."""
NO_TOOLS = {"llama3"}
ARGUMENTS_AS_TEXT = {"deepseek-v3"}


def as_dicts(name: str, messages: list[Message]) -> list[dict[str, Any]]:
    """The plain form that `apply_chat_template` takes, written independently of the renderer."""
    dicts = []
    for message in (with_family_ids(facts_of(TEMPLATES[name].family, template(name)), m) for m in messages):
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "tool":
            plain |= {"name": message.name, "tool_call_id": message.tool_call_id}
        if message.reasoning is not None:
            plain |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if name in ARGUMENTS_AS_TEXT else json.loads(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        dicts.append(plain)
    return dicts


def rendered(name: str, messages: list[Message], *, generation: bool) -> str:
    text = tokenizer(name).apply_chat_template(
        as_dicts(name, messages), tools=SCHEMAS, tokenize=False, add_generation_prompt=generation
    )
    assert isinstance(text, str)
    return text


def reply(name: str, turn: int, text: str, *, calls: bool) -> Message:
    call = ToolCall(id=f"call_{turn}_0", name="say", arguments=json.dumps({"text": text}, ensure_ascii=False))
    return Message(
        role="assistant",
        content="" if calls else f"so {turn}",
        tool_calls=(call,) if calls else (),
        reasoning=f"why {turn}" if name in REASONS else None,
    )


def result(turn: int, text: str) -> Message:
    return Message(role="tool", content=text, name="say", tool_call_id=f"call_{turn}_0")


def row_of(name: str, replies: list[Message], following: list[list[Message]], first: list[Message]) -> list[list[int]]:
    """The row as it is before each generation."""
    chat = renderer(name)
    prompts = [[*chat.prompt_ids(first, TOOLS)]]
    for message, new in zip(replies, following, strict=True):
        sampled = chat.encode_reply(chat.assistant_text(message))
        row = [*prompts[-1], *sampled]
        prompts.append([*row, *chat.delta_ids(row, message, new, TOOLS)])
    return prompts


# Without control marks and braces, and never empty; outer white space included.
WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters='<>{}[]|"\\｜', exclude_categories=["C", "Z"]),
    min_size=1,
    max_size=8,
)
TEXTS = st.tuples(st.sampled_from(["", " ", "\n", "  \n"]), WORDS, st.sampled_from(["", " ", "\n"])).map("".join)
APPEND_ONLY = sorted(set(TEMPLATES) - NO_TOOLS - {"deepseek-v3"})


@pytest.mark.parametrize("name", APPEND_ONLY)
@settings(max_examples=10, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_each_prompt_of_a_tool_loop_is_the_templates_own_text(name: str, texts: list[str]):
    """A02, A09, A11, B09"""
    first = [Message(role="user", content=texts[0])]
    replies = [reply(name, turn, text, calls=True) for turn, text in enumerate(texts)]
    results = [[result(turn, text)] for turn, text in enumerate(texts)]
    chat, messages = renderer(name), [*first]
    for turn, prompt in enumerate(row_of(name, replies, results, first)):
        assert chat.decode(prompt) == rendered(name, messages, generation=True), turn
        if turn < len(texts):
            messages += [replies[turn], *results[turn]]


EXTRA = {
    "glm-4.5": set(),
    "llama3": set(),
    "qwen2.5": {"\n"},  # the last character of the generation prompt, and the newline after the end of a turn
    "qwen3": {"\n"},  # the newline after the end of a turn
    "qwen3-2507": {"\n"},
    "gpt-oss": {"<|start|>assistant"},  # the generation prompt
}
"""What trl's masks train beyond ours, by family: text that the harness writes and no policy ever samples."""


@pytest.mark.parametrize("name", sorted(EXTRA))
def test_loss_masks_equal_those_of_trls_training_templates(name: str):
    """A06: the same ids; the same mask, but for what a policy never samples."""
    first, tools = Message(role="user", content="go"), name not in NO_TOOLS
    between = result(0, "hello") if tools else Message(role="user", content="more")
    conversation = [first, reply(name, 0, "a b", calls=tools), between, reply(name, 1, "x", calls=False)]
    if name == "gpt-oss":  # it drops the reasoning of calls once there is an answer
        conversation[1] = replace(conversation[1], reasoning=None)
    chat = renderer(name)
    ids, mask = chat.demonstration_row(conversation, TOOLS)
    theirs: Any = tokenizer(name, training=True).apply_chat_template(
        as_dicts(name, conversation), tools=SCHEMAS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert list(ids) == theirs["input_ids"][: len(ids)]
    assert chat.decode(theirs["input_ids"][len(ids) :]) in {"", *EXTRA[name]}
    pairs = [*zip(ids, mask, map(bool, theirs["assistant_masks"]), strict=False)]
    assert not [token for token, ours, trl in pairs if ours and not trl] and any(mask)
    runs = groupby(pairs, key=lambda pair: pair[1] != pair[2])
    assert {chat.decode([token for token, _, _ in run]) for differs, run in runs if differs} == EXTRA[name]


def test_a_training_template_that_writes_no_reasoning_where_its_prompt_opens_some_is_refused():
    """A14: DeepSeek V3 in trl's form."""
    conversation = [Message(role="user", content="go"), reply("deepseek-v3", 0, "a", calls=False)]
    with pytest.raises(TemplateError, match="reasoning"):
        renderer("deepseek-v3").demonstration_row(conversation, TOOLS)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_families_are_recognised_and_stop_at_all_their_ends(name: str):
    """A02, A05"""
    chat, published = renderer(name), TEMPLATES[name]
    ends = {
        "llama3": {"<|eot_id|>", "<|eom_id|>"},
        "glm": {"<|user|>", "<|observation|>", "<|endoftext|>"},
        "harmony": {"<|call|>", "<|return|>"},
        "kimi_k2": {"<|im_end|>", "[EOS]"},
    }
    assert chat.family == published.family
    assert {chat.decode([i]) for i in chat.stop_token_ids} == ends.get(published.family, {published.eos})


HOSTILE = "".join(sorted({token for published in TEMPLATES.values() for token in published.control}))


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - NO_TOOLS))
def test_control_marks_of_any_family_stay_plain_text_in_results_prompts_and_made_up_names(name: str):
    """A10"""
    chat = renderer(name)
    controls = set(chat.tokenizer.get_added_vocab().values())
    counts = []
    for text in ("hello", HOSTILE):
        call = ToolCall(id="call_0_0", name=text, arguments="{}")
        said = Message(role="assistant", content="", tool_calls=(call,))
        answer = Message(role="tool", content=text, name=text, tool_call_id="call_0_0")
        ids = chat.prompt_ids([Message(role="user", content=text)], TOOLS)
        ids += chat.delta_ids((*ids, chat.encode_plain("x")[0]), said, [answer], TOOLS)
        counts.append(sum(i in controls for i in ids))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - NO_TOOLS))
def test_an_end_that_was_not_sampled_is_written_untrained_and_never_twice(name: str):
    """A05"""
    chat = renderer(name)
    message, new = reply(name, 0, "a", calls=True), [result(0, "b")]
    unended = chat.encode_plain("cut")
    whole = chat.delta_ids(unended, message, new, TOOLS)
    end = whole[0]
    assert chat.delta_ids((*unended, end), message, new, TOOLS) == whole[1:]
    assert end in chat.stop_token_ids


def test_llamas_other_end_of_turn_is_not_followed_by_a_second_one():
    """A05"""
    chat = renderer("llama3.1")
    eom = chat.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    delta = chat.delta_ids((eom,), reply("llama3.1", 0, "a", calls=True), [result(0, "b")], TOOLS)
    assert chat.decode(delta).startswith("<|start_header_id|>ipython")


def test_harmony_history_writes_another_end_after_an_answer_and_that_is_a_rewrite():
    """A03, A05"""
    chat, said = renderer("gpt-oss"), reply("gpt-oss", 0, "x", calls=False)
    more = [Message(role="user", content="more")]
    reason = chat.history_break([Message(role="user", content="go"), replace(said, reasoning=None)], more, TOOLS)
    assert reason is not None and "<|return|>" in reason and "<|end|>" in reason
    delta = chat.decode(chat.delta_ids(chat.encode_reply(chat.assistant_text(said)), said, more, TOOLS))
    assert delta.startswith("<|start|>user")


def test_qwen3_keeps_reasoning_in_a_tool_loop_and_drops_it_behind_the_next_question():
    """A03"""
    chat = renderer("qwen3")
    history = [Message(role="user", content="go"), Message(role="assistant", content="<think>\nwhy\n</think>\n\nso")]
    assert chat.history_break(history, [result(0, "b")], TOOLS) is None
    assert "<think>" in str(chat.history_break(history, [Message(role="user", content="more")], TOOLS))


def test_whole_conversations_are_written_played_and_read_again():
    """What the template writes for a reply is read as the same reply by the family's parser."""
    for name in APPEND_ONLY:
        chat, said = renderer(name), reply(name, 0, 'a "b" 北京', calls=True)
        text = chat.assistant_text(said)
        parsed = chat.parse(chat.encode_reply(text), "stop", call_id_prefix="call_0_", tools=TOOLS).message
        assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("say", {"text": 'a "b" 北京'})], name
        assert parsed.reasoning == said.reasoning and parsed.content == "", name


def test_mistral_moves_the_list_of_tools_to_the_newest_question_and_that_is_a_rewrite():
    """A03"""
    chat, said = renderer("mistral"), reply("mistral", 0, "x", calls=False)
    history = [Message(role="user", content="go"), said]
    assert "AVAILABLE_TOOLS" in str(chat.history_break(history, [Message(role="user", content="more")], TOOLS))


@pytest.mark.parametrize(
    ("name", "given_id", "written"),
    [
        ("mistral", "call_0_0", None),
        ("mistral", "Ab3Ab3Ab3", '"call_id": "Ab3Ab3Ab3"'),
        ("kimi-k2", "call_0_1", "## Return of functions.say:1\n"),
        ("kimi-k2", "functions.say:7", "## Return of functions.say:7\n"),
    ],
)
def test_call_ids_have_the_familys_form_and_the_models_own_ones_stay(name: str, given_id: str, written: str | None):
    chat = renderer(name)
    call = ToolCall(id=given_id, name="say", arguments="{}")
    answer = Message(role="tool", content="b", name="say", tool_call_id=given_id)
    text = chat.decode(chat.delta_ids((), Message(role="assistant", content="", tool_calls=(call,)), [answer], TOOLS))
    if written is None:
        assert re.search(r'"call_id": "[A-Za-z0-9]{9}"', text)
    else:
        assert written in text


def test_what_a_template_writes_as_json_is_escaped_and_not_in_ascii():
    """A15, B09: Llama and gpt-oss quote a tool's result."""
    for name in ("llama3.1", "gpt-oss"):
        message = reply(name, 0, "a", calls=True)
        text = renderer(name).decode(renderer(name).delta_ids((), message, [result(0, 'say "北京"')], TOOLS))
        assert r'"say \"北京\""' in text
