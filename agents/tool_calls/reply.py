"""What every tool-call parser gives: calls, and the reply that they are part of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quintain.envs.message import Message, ToolCall, ToolSpec

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """One sampled reply, taken apart.

    Example: ``ParsedReply(message=Message(role="assistant", content="85"), text="85", num_malformed=0,
    unterminated=False, events={})``
    """

    message: Message
    """What the environment gets as its action."""
    text: str
    """The sampled text as decoded, reasoning and calls included, without the token that ended the turn."""
    num_malformed: int
    """Calls outside of reasoning that could not be read; they are in `message.tool_calls` all the same."""
    unterminated: bool
    """The text was cut inside of a call, which is therefore not in `message.tool_calls`."""
    events: dict[str, int]
    """`call_in_reasoning`, `unterminated_call`; only those that happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as read: `arguments` is a JSON object where it is well-formed, else the raw text."""

    name: str
    arguments: str
    well_formed: bool = True


class ToolCallParser(Protocol):
    """Reads the replies of one family of models. Never raises, whatever the text."""

    family: str

    def parse(
        self,
        text: str,
        *,
        tools: Sequence[ToolSpec] = (),
        call_id_prefix: str,
        reasoning_open: bool = False,
        cut: bool = False,
        end_token: str | None = None,
    ) -> ParsedReply:
        """Split a reply into content, reasoning and calls, in the order in which they were written.

        `tools`: their schemas tell text from JSON in formats that carry raw values.
        `reasoning_open`: the prompt already opened the reasoning, so the text starts inside of it.
        `cut`: a limit ended the text, not the model. `end_token`: the stop token that the model sampled and that
        `text` no longer has; in some formats it also closes a call.
        """
        ...


def reply_of(
    text: str,
    *,
    content: str,
    reasoning: str,
    calls: Iterable[Call],
    call_id_prefix: str,
    unterminated: bool,
    events: Mapping[str, int],
) -> ParsedReply:
    """The reply, with an id for each call: the prefix and its place in the reply."""
    calls = tuple(calls)
    message = Message(
        role="assistant",
        content=content.strip(),
        tool_calls=tuple(
            ToolCall(id=f"{call_id_prefix}{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(calls)
        ),
        reasoning=reasoning.strip() or None,
    )
    return ParsedReply(
        message=message,
        text=text,
        num_malformed=sum(not call.well_formed for call in calls),
        unterminated=unterminated,
        events={name: count for name, count in events.items() if count},
    )
