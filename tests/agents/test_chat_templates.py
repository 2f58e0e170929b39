"""What chat templates do: rewriting history, arguments as text or mapping, demonstrations."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_chat import (
    CHATML,
    DROPS_REASONING,
    OPENS_REASONING,
    Parrot,
    as_dicts,
    assistant,
    call_text,
    renderer,
    roll,
    tokenizer,
)
from transformers import PreTrainedTokenizerFast

from quintain.agents.config import RolloutConfig
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.renderer import ChatRenderer, TemplateError
from quintain.agents.scheduler import RolloutRunner
from quintain.agents.scripted_policy import ScriptedPolicy
from quintain.envs import Message, ToolCall

THINKING = [f"<think>first</think>\n{call_text()}", f"<think>then</think>\n{call_text()}", "<think>so</think>done"]
"""A reply a turn; three turns, reasoning in each."""


def test_a_template_that_rewrites_history_is_refused_at_the_turn_where_it_does():
    """A03"""
    trajectory = roll(THINKING, template=DROPS_REASONING, history="refuse")
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.INFRASTRUCTURE, StopReason.PREFIX_BROKEN)
    assert "rollout.history" in str(trajectory.error) and "<think>" in str(trajectory.error)
    assert len(trajectory.turns) == 1


def test_a_template_that_rewrites_history_is_an_error_before_the_first_rollout():
    """A03"""
    chat = renderer(DROPS_REASONING)
    policy = ScriptedPolicy(["done"], renderer=chat)
    with pytest.raises(TemplateError, match="append"):
        RolloutRunner(policy=policy, renderer=chat, make_env=Parrot, config=RolloutConfig(), seed=0)


def test_without_reasoning_the_same_template_rewrites_nothing():
    """A03"""
    trajectory = roll([call_text(), call_text(), "done"], template=DROPS_REASONING, history="refuse")
    assert trajectory.outcome is Outcome.COMPLETED and len(trajectory.turns) == 3


def test_append_keeps_every_sampled_token_whatever_the_template_would_drop():
    """A03"""
    chat = renderer(DROPS_REASONING)
    policy = ScriptedPolicy(THINKING, renderer=chat)
    trajectory = roll((), policy=policy, template=DROPS_REASONING, history="append")
    (row,) = trajectory.rows
    assert chat.decode(row.token_ids).count("<think>") == 3
    for request, turn in zip(policy.requests, trajectory.turns, strict=True):
        sent = len(request.prompt_ids)
        assert row.token_ids[:sent] == request.prompt_ids
        assert row.token_ids[sent : sent + len(turn.completion.token_ids)] == turn.completion.token_ids


def test_fork_makes_one_row_a_turn_and_each_begins_with_what_the_engine_was_sent():
    """A03"""
    chat = renderer(DROPS_REASONING)
    policy = ScriptedPolicy(THINKING, renderer=chat)
    trajectory = roll((), policy=policy, template=DROPS_REASONING, history="fork")
    assert trajectory.outcome is Outcome.COMPLETED and trajectory.events["row_forked"] == 2
    for request, turn, row in zip(policy.requests, trajectory.turns, trajectory.rows, strict=True):
        assert row.token_ids == request.prompt_ids + turn.completion.token_ids
        assert row.num_sampled_tokens == len(turn.completion.token_ids)
        assert chat.decode(request.prompt_ids).count("<think>") == 0


def test_append_only_templates_are_not_told_apart_by_spaces():
    """A03: a template that trims what it quotes has not dropped anything."""
    trims = CHATML.replace("m.content }}", "m.content | trim }}")
    assert trims != CHATML
    trajectory = roll([f"\n {call_text()}\n", "  done"], template=trims, history="refuse")
    assert trajectory.stop_reason is StopReason.TERMINATED


ITEMS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PRINTS = ITEMS.replace(
    "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}", "{{ c.function.arguments }}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, '<tool_call>\n{"name": "go", "arguments": {"city": "Paris"}}\n</tool_call>'),
        (ITEMS, "city=Paris;"),
        (PRINTS, '{"city": "Paris"}'),
    ],
    ids=["tojson", "items", "prints"],
)
def test_arguments_are_given_to_a_template_in_the_form_it_takes(template: str, expected: str):
    """A15"""
    call = ToolCall(id="call_0_0", name="go", arguments='{"city": "Paris"}')
    chat = renderer(template)
    assert chat.assistant_text(assistant("", call)) == expected
    history = [Message(role="user", content="x"), assistant("", call), Message(role="user", content="y")]
    text = chat.decode(chat.prompt_ids(history, ()))
    assert expected in text and '\\"' not in text


def demonstration() -> list[Message]:
    call = ToolCall(id="call_0_0", name="say", arguments='{"text": "é"}')
    return [
        Message(role="system", content="be brief"),
        Message(role="user", content="say it"),
        assistant("sure", call),
        Message(role="tool", content="é", tool_call_id="call_0_0", name="say"),
        assistant("done"),
    ]


def test_a_demonstration_is_laid_out_as_the_rollout_of_the_same_replies():
    """A02, A06"""
    chat, messages, tools = renderer(), demonstration(), Parrot().tool_specs
    ids, trained = chat.demonstration_row(messages, tools)

    class Brief(Parrot):
        system_prompt = "be brief"

    (row,) = roll([chat.assistant_text(m) for m in messages if m.role == "assistant"], env=Brief).rows
    assert (ids, trained) == (row.token_ids, row.sampled)
    whole = tokenizer().apply_chat_template(as_dicts(messages), tools=[s.to_openai() for s in tools], tokenize=False)
    assert chat.decode(ids) + "\n" == whole


def test_a_demonstration_without_reasoning_is_refused_where_the_prompt_opens_reasoning():
    with pytest.raises(TemplateError, match="reasoning"):
        renderer(OPENS_REASONING).demonstration_row(demonstration(), ())


def test_a_tokenizer_without_a_template_is_refused():
    """A04"""
    fast = tokenizer("{{ 'x' }}")
    with pytest.raises(TemplateError, match="leaves out"):
        ChatRenderer(fast)
    fast.chat_template = None
    with pytest.raises(TemplateError, match="chat_template"):
        ChatRenderer(fast)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_tokenizer_that_puts_a_space_before_every_piece_is_refused(scheme: Any):
    """A06: the tokens of a prompt must say what the template writes, to the space."""
    vocab = [("<unk>", 0.0), *((char, -3.0) for char in sorted({*map(chr, range(32, 127)), "\n", "▁", "é", "😀"}))]
    words = Tokenizer(models.Unigram(vocab, unk_id=0))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[assignment]
    words.decoder = decoders.Metaspace(prepend_scheme=scheme)  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHATML, eos_token="<|im_end|>")
    fast.add_tokens(["<|im_start|>"])
    if scheme == "never":
        chat = ChatRenderer(fast)
        assert chat.decode(chat.prompt_ids([Message(role="user", content="x")], ())).startswith("<|im_start|>user\nx<")
    else:
        with pytest.raises(TemplateError, match="prefix space"):
            ChatRenderer(fast)
