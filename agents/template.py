"""A chat template as cached frames: what the template itself writes, with holes where the messages' own text goes.

    messages ──shape──> template dicts with marks in the holes ──jinja, once a shape──> Frame: text │ hole │ text │ …

Template text may hold control tokens; what stands in a hole is somebody else's text and is encoded apart. A shape holds
all that may change the template's own text: roles, which fields are there, thinking marks, tool calls. Conversations of
one environment have few shapes, so that jinja hardly ever runs.

It does not encode anything, and it does not decide which history is allowed: `renderer.py` does both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from quintain.agents.tool_calls import THINK_CLOSE, THINK_OPEN
from quintain.envs.message import Message, ToolCall, ToolSpec

_HOLE = 'Xq7hole{}"éq7X'
# The quote and the accent tell what a template did to the text: nothing, or wrote it as (ASCII) JSON.
_HOLES = re.compile(r'Xq7hole(\d+)(\\?"(?:é|\\u00e9))q7X')
_THINK = re.compile(f"({re.escape(THINK_OPEN)}|{re.escape(THINK_CLOSE)})")
_MAX_CACHED = 4096
_MAX_OUTER_SPACE = 64  # longer white space around a text is left to the text: shapes must stay few and small

Escape = Literal["none", "json", "ascii_json"]
Shape = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Hole:
    """Where text of a message goes."""

    index: int
    """Counted over the whole conversation, in the order of the messages."""
    escape: Escape = "none"
    """How the template writes what stands here: as it is, or as the inside of a JSON string."""

    def written(self, text: str) -> str:
        """`text` as the template writes it."""
        return text if self.escape == "none" else json.dumps(text, ensure_ascii=self.escape == "ascii_json")[1:-1]


@dataclass(frozen=True, slots=True)
class Value:
    """What goes into a hole."""

    text: str
    by_policy: bool
    """The policy's own words may hold control tokens; everybody else's are plain text."""


Frame = tuple[str | Hole, ...]


class TemplateError(ValueError):
    """The chat template cannot be used; the message says why."""


class ChatTemplate:
    """Renders conversations to frames through one tokenizer's chat template. Used by one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError("the tokenizer has no chat template: set `tokenizer.chat_template`")
        self._tokenizer = tokenizer
        self._frames: dict[Shape, Frame] = {}
        self._tool_dicts: dict[int, tuple[Sequence[ToolSpec], str, list[dict[str, Any]] | None]] = {}
        self.source = str(
            tokenizer.get_chat_template() if hasattr(tokenizer, "get_chat_template") else tokenizer.chat_template
        )
        """The template's own text."""
        self.reasoning_field = _reasoning_field(self.source)
        self.arguments_as_text = False
        self.arguments_as_text = self._wants_arguments_as_text()

    def frame(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool
    ) -> tuple[Frame, list[Value]]:
        """The conversation's frame and what goes into its holes; with `generation` it ends at the generation point."""
        plans = [self.plan(message) for message in messages]
        return self.frame_of(tuple(shape for shape, _ in plans), tools, generation=generation), [
            value for _, values in plans for value in values
        ]

    def plan(self, message: Message) -> tuple[Shape, list[Value]]:
        """A message's shape and the texts that go into its holes (see the function `plan`)."""
        return plan(message, reasoning_apart=self.reasoning_field is not None)

    def frame_of(self, shapes: Sequence[Shape], tools: Sequence[ToolSpec], *, generation: bool) -> Frame:
        """The frame for message shapes (see `plan`). Raises TemplateError where the template refuses them."""
        tools_key, tool_dicts = self._tools(tools)
        key = (tools_key, generation, *shapes)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _MAX_CACHED:
                self._frames.clear()
            frame = self._frames[key] = self._render(shapes, tool_dicts, generation)
        return frame

    def tools_key(self, tools: Sequence[ToolSpec]) -> str:
        """Equal for equal tools."""
        return self._tools(tools)[0]

    def _tools(self, tools: Sequence[ToolSpec]) -> tuple[str, list[dict[str, Any]] | None]:
        known = self._tool_dicts.get(id(tools))
        if known is None or known[0] is not tools:
            if len(self._tool_dicts) >= _MAX_CACHED:
                self._tool_dicts.clear()
            dicts = [spec.to_openai() for spec in tools] or None
            # The sequence itself is kept, so that its id is not given to another one.
            known = self._tool_dicts[id(tools)] = (tools, json.dumps(dicts), dicts)
        return known[1], known[2]

    def _render(self, shapes: Sequence[Shape], tools: list[dict[str, Any]] | None, generation: bool) -> Frame:
        holes = iter(range(1 << 30))
        conversation = [
            _template_dict(shape, holes, self.arguments_as_text, self.reasoning_field or "") for shape in shapes
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tools=tools, tokenize=False, add_generation_prompt=generation
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            roles = [shape[0] for shape in shapes]
            raise TemplateError(f"the chat template failed on a conversation of {roles}: {error}") from error
        return _frame_of_text(text)

    def _wants_arguments_as_text(self) -> bool:
        """Most templates take arguments as a mapping. One that just prints them would print Python's `repr`, and one
        that joins them to text fails on a mapping."""
        call = ToolCall(id="call_0", name="probe", arguments='{"probe_key": "probe_value"}')
        shapes = [plan(Message(role="user", content="x"))[0]]
        shapes.append(plan(Message(role="assistant", content="", tool_calls=(call,)))[0])
        try:
            frame = self._render(shapes, None, False)
        except TemplateError:
            return self._takes_text(shapes)
        return any("{'probe_key'" in part for part in frame if isinstance(part, str))

    def _takes_text(self, shapes: Sequence[Shape]) -> bool:
        self.arguments_as_text = True
        try:
            self._render(shapes, None, False)
        except TemplateError:
            return False
        finally:
            self.arguments_as_text = False
        return True


def plan(message: Message, *, reasoning_apart: bool = False) -> tuple[Shape, list[Value]]:
    """A message's shape (hashable; equal shapes render alike) and the texts that go into its holes.

    White space around a text belongs to the shape, since templates trim it.
    """
    by_policy = message.role == "assistant"
    reasoning, values = None, []
    text = assistant_source(message) if by_policy and not reasoning_apart else message.content
    if reasoning_apart and message.reasoning is not None:
        thoughts = message.reasoning
        if message.tool_calls and text:  # such templates refuse both beside calls, and write either as reasoning
            thoughts, text = f"{thoughts}\n{text}", ""
        reasoning, values = _segments(thoughts, by_policy=True)
    segments: list[str | None] = []
    for piece in _THINK.split(text) if by_policy else [text]:
        if by_policy and piece in (THINK_OPEN, THINK_CLOSE):
            segments.append(piece)
            continue
        found, their_values = _segments(piece, by_policy=by_policy)
        segments += found
        values += their_values
    if message.name:
        values.append(Value(message.name, by_policy))
    calls = tuple((call.id, call.name, call.arguments) for call in message.tool_calls)
    return (message.role, tuple(segments), bool(message.name), message.tool_call_id, calls, reasoning), values


def _segments(text: str, *, by_policy: bool) -> tuple[tuple[str | None, ...], list[Value]]:
    """White space, hole (None), white space; empty ones left out."""
    core = text.strip()
    start = text.find(core) if core else len(text)
    before, after = text[:start], text[start + len(core) :]
    if len(before) + len(after) > _MAX_OUTER_SPACE:
        return (None,), [Value(text, by_policy)]
    segments = (before, None, after) if core else (before,)
    return tuple(s for s in segments if s != ""), [Value(core, by_policy)] if core else []


def assistant_source(message: Message) -> str:
    """An assistant message's reasoning and content as one text, the form that every template takes."""
    if message.reasoning is None:
        return message.content
    return f"{THINK_OPEN}\n{message.reasoning}\n{THINK_CLOSE}\n\n{message.content}"


def fill(frame: Sequence[str | Hole], values: Sequence[Value]) -> str:
    """The rendered text."""
    return "".join(part if isinstance(part, str) else part.written(values[part.index].text) for part in frame)


def skeleton(frame: Sequence[str | Hole]) -> str:
    """The frame as text, holes as their numbers, without white space (templates trim and re-space what they quote)."""
    return "".join("".join(part.split()) if isinstance(part, str) else f"⟦{part.index}⟧" for part in frame)


def _reasoning_field(source: str) -> str | None:
    """The message field where a template wants reasoning; None where it finds it between marks in the content."""
    if "message.thinking" in source:
        return "thinking"
    return "reasoning_content" if "reasoning_content" in source and "split('</think>')" not in source else None


def _frame_of_text(text: str) -> Frame:
    pieces = _HOLES.split(text)  # text, index, escaped tail, text, ...
    parts: list[str | Hole] = [pieces[0]]
    for index, tail, following in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        escape: Escape = "none" if tail[0] != "\\" else "json" if tail[-1] == "é" else "ascii_json"
        parts += [Hole(int(index), escape), following]
    return tuple(part for part in parts if part != "")


def _template_dict(shape: Shape, holes: Iterator[int], arguments_as_text: bool, reasoning_field: str) -> dict[str, Any]:
    role, segments, named, tool_call_id, calls, reasoning = shape

    def filled(parts: Sequence[str | None]) -> str:
        return "".join(part if part is not None else _HOLE.format(next(holes)) for part in parts)

    message: dict[str, Any] = {"role": role}
    if reasoning is not None:
        message[reasoning_field] = filled(reasoning)
    message["content"] = filled(segments)
    if named:
        message["name"] = _HOLE.format(next(holes))
    if tool_call_id is not None:
        message["tool_call_id"] = tool_call_id
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": _arguments(arguments, as_text=arguments_as_text)},
            }
            for call_id, name, arguments in calls
        ]
    return message


def _arguments(arguments: str, *, as_text: bool) -> Mapping[str, Any] | str:
    """Arguments in the form that the template wants; text that is no JSON object stays text."""
    if as_text:
        return arguments
    try:
        parsed = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):  # ValueError: also a number of more digits than Python reads
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
