"""What a chat template does not say of its model family: which tokens end a reply, and the form of call ids.

Everything else is read off the template by rendering it (`template.py`, `renderer.py`), so that an unknown template
needs no entry: its end of turn is what it writes after an assistant message, and call ids are handed on as they are.

Which family a tokenizer belongs to is said by `tool_calls.detect_family`, which also gives the parser of its calls.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Literal

from quintain.envs.message import Message, ToolCall

_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]+")
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_FUNCTION_ID = re.compile(r"functions\.[A-Za-z0-9_.\-]+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFacts:
    """What is known of one model family.

    Example: ``ChatFacts(end_of_answer="<|eot_id|>", other_ends=("<|eom_id|>",))``
    """

    end_of_answer: str | None = None
    """The token that the model samples after an answer; None = what the template writes after an assistant message."""
    end_of_call: str | None = None
    """The token that the model samples after tool calls; None = `end_of_answer`."""
    other_ends: tuple[str, ...] = ()
    """More tokens at which generation must stop."""
    ends_are_roles: bool = False
    """No token of its own ends a turn: the model ends by naming who speaks next."""
    call_marks: tuple[str, ...] = ()
    """A reply with one of these in it holds a call; only where calls have an end of their own."""
    call_ids: Literal["any", "nine", "functions"] = "any"
    """`nine`: nine letters or digits; `functions`: ``functions.<name>:<index>``."""


_NOTHING = ChatFacts()
_FACTS = {
    "harmony": ChatFacts(end_of_answer="<|return|>", end_of_call="<|call|>", call_marks=(" to=functions.",)),
    "llama3": ChatFacts(end_of_answer="<|eot_id|>", other_ends=("<|eom_id|>",)),
    "glm": ChatFacts(
        end_of_answer="<|user|>", end_of_call="<|observation|>", ends_are_roles=True, call_marks=("<tool_call>",)
    ),
    "mistral": ChatFacts(call_ids="nine"),
    "kimi_k2": ChatFacts(call_ids="functions"),
}


def facts_of(family: str, template: str) -> ChatFacts:
    """What is known of a family; nothing where the template (another family's, say) never writes its end of turn."""
    facts = _FACTS.get(family, _NOTHING)
    return _NOTHING if facts.end_of_answer and facts.end_of_answer not in template else facts


def with_family_ids(facts: ChatFacts, message: Message) -> Message:
    """A message whose call ids have the family's form. Ids that have it already (the model wrote them) stay.

    Names go into ids of the form `functions`; whatever could be a control mark in them is replaced.
    """
    if facts.call_ids == "any":
        return message
    calls = tuple(replace(call, id=_family_id(facts, call.id, call.name)) for call in message.tool_calls)
    answers = message.tool_call_id
    if answers is not None:
        answers = _family_id(facts, answers, message.name or "")
    return replace(message, tool_calls=calls, tool_call_id=answers)


def safe_name(name: str) -> str:
    """A tool's name that cannot hold a control mark, whatever the model wrote."""
    return _UNSAFE.sub("_", name) or "_"


def placeholder_calls(calls: tuple[ToolCall, ...], arguments: str) -> tuple[ToolCall, ...]:
    """The calls with the same arguments each: what follows a reply does not depend on them."""
    return tuple(ToolCall(id=call.id, name=safe_name(call.name), arguments=arguments) for call in calls)


def _family_id(facts: ChatFacts, call_id: str, name: str) -> str:
    if facts.call_ids == "nine":
        return call_id if _NINE.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
    if _FUNCTION_ID.fullmatch(call_id):
        return call_id
    index = re.search(r"(\d+)\Z", call_id)
    return f"functions.{safe_name(name)}:{index[1] if index else 0}"
