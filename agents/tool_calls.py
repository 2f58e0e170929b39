"""Tool calls in sampled text (Hermes/ChatML form): ``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``.

Rules:
- A call ends at the first closing mark *outside* of its JSON strings; braces and marks inside of strings are text.
- A call that stands in reasoning is never returned; it is counted (`call_in_reasoning`). Reasoning is a `<think>`
  block, or everything before a lone `</think>` (the prompt may have opened the block).
- A call whose JSON does not parse is returned with its raw text as `arguments` and the name that could be read, so that
  the environment answers with an error the model can learn from.
- A call without a closing mark (`unterminated_call`) is malformed too where the model ended its turn: its raw text
  begins with the opening mark, so it is never valid JSON and never run. Where a limit cut the text, it is no call at
  all; its text stays in the content.
- Arguments are handed on as written, but for raw control characters inside of their strings: those are escaped, so that
  what was readable here is valid JSON to everybody.
- Everything outside of calls and reasoning is content.

Nothing here checks names or schemas: that is the environment's work.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from quintain.envs.message import Message, ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_MARK = re.compile("|".join(map(re.escape, (CALL_OPEN, THINK_OPEN, THINK_CLOSE))))
_STRING_OR_CLOSE = re.compile(r'"(?:[^"\\]|\\.)*"|' + re.escape(CALL_CLOSE), re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_SPACE = re.compile(r"\s*")
_MAX_LOST_SEARCHES = 32  # string-aware searches of one reply that may find nothing: bounds the time
# Models write raw newlines and tabs inside of strings; that is readable, so it is not an error.
_JSON = json.JSONDecoder(strict=False)


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
    """Calls outside of reasoning whose JSON could not be read; they are in `message.tool_calls` all the same."""
    unterminated: bool
    """The text was cut inside of a call, which is therefore not in `message.tool_calls`."""
    events: dict[str, int]
    """`call_in_reasoning`, `unterminated_call`; only those that happened."""


@dataclass(slots=True)
class _Scan:
    """What has been found so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, bool]] = field(default_factory=list)  # name, arguments, well-formed
    in_reasoning: int = 0
    unterminated: tuple[int, int] | None = None  # where the call starts in the text, and the number of content pieces
    num_lost: int = 0


def parse_reply(text: str, *, call_id_prefix: str, reasoning_open: bool = False, cut: bool = False) -> ParsedReply:
    """Split a reply into content, reasoning and calls. Never raises, whatever the text.

    `reasoning_open`: the prompt already wrote `<think>`, so the text starts inside of the block.
    `cut`: a limit ended the text, not the model.
    """
    scan = _Scan()
    position, thinking = 0, reasoning_open
    while True:
        mark = _MARK.search(text, position)
        (scan.reasoning if thinking else scan.content).append(text[position : mark.start() if mark else len(text)])
        if mark is None:
            break
        position = mark.end()
        if mark[0] == THINK_OPEN:
            thinking = True
        elif mark[0] == THINK_CLOSE:
            if not thinking:
                _all_so_far_was_reasoning(scan)
            thinking = False
        else:
            position = _take_call(text, mark, scan, thinking=thinking)
    events = {"call_in_reasoning": scan.in_reasoning, "unterminated_call": int(scan.unterminated is not None)}
    if scan.unterminated and not cut:
        start, num_pieces = scan.unterminated
        del scan.content[num_pieces:]
        scan.calls.append((_name_in(text[start:]), text[start:].strip(), False))
        scan.unterminated = None
    return _reply(text, scan, call_id_prefix, events)


def _all_so_far_was_reasoning(scan: _Scan) -> None:
    scan.reasoning.extend(scan.content)
    scan.content.clear()
    scan.in_reasoning += len(scan.calls) + (scan.unterminated is not None)
    scan.calls.clear()
    scan.unterminated = None


def _take_call(text: str, mark: re.Match[str], scan: _Scan, *, thinking: bool) -> int:
    """Record the call that starts at `mark`; returns where scanning goes on."""
    found = _read_whole_call(text, mark.end())
    if thinking:
        scan.in_reasoning += 1
        # A broken draft must not swallow the mark that closes the reasoning.
        end = found[3] if found else mark.end()
        scan.reasoning.append(text[mark.start() : end])
        return end
    found = found or _read_broken_call(text, mark.end(), scan)
    if found is None:
        scan.unterminated = scan.unterminated or (mark.start(), len(scan.content))
        scan.content.append(mark[0])
        return mark.end()
    name, arguments, well_formed, end = found
    scan.calls.append((name, arguments, well_formed))
    return end


def _read_whole_call(text: str, start: int) -> tuple[str, str, bool, int] | None:
    """`(name, arguments, True, end)` of the call whose body starts at `start`; None where it is not well-formed."""
    items = _object_items(text, start)
    if items is None:
        return None
    fields, end = items
    close = _skip_space(text, end)
    if not text.startswith(CALL_CLOSE, close):
        return None
    return (*_name_and_arguments(fields), True, close + len(CALL_CLOSE))


def _read_broken_call(text: str, start: int, scan: _Scan) -> tuple[str, str, bool, int] | None:
    """`(name, raw text, False, end)` of the call whose body starts at `start`; None where it has no end."""
    plain = text.find(CALL_CLOSE, start)
    if plain < 0:
        return None
    close = -1
    if scan.num_lost < _MAX_LOST_SEARCHES:
        close = next((m.start() for m in _STRING_OR_CLOSE.finditer(text, start) if m[0] == CALL_CLOSE), -1)
        scan.num_lost += close < 0
    if close < 0:  # a string that never ends hides the mark; the plain mark is then the best guess
        close = plain
    raw = text[start:close].strip()
    return _name_in(raw), raw, False, close + len(CALL_CLOSE)


def _name_in(raw: str) -> str:
    name = _NAME.search(raw)
    return _unquote(name[1]) if name else ""


def _object_items(text: str, start: int) -> tuple[dict[str, str], int] | None:
    """The raw JSON text of each value of the object at `start`, and the object's end; None where it is no object."""
    position = _skip_space(text, start)
    if not text.startswith("{", position):
        return None
    fields: dict[str, str] = {}
    position = _skip_space(text, position + 1)
    if text.startswith("}", position):
        return fields, position + 1
    try:
        while True:
            key, position = _JSON.raw_decode(text, position)
            position = _skip_space(text, position)
            if not isinstance(key, str) or not text.startswith(":", position):
                return None
            value_start = _skip_space(text, position + 1)
            _, position = _JSON.raw_decode(text, value_start)
            fields[key] = text[value_start:position]
            position = _skip_space(text, position)
            if text.startswith("}", position):
                return fields, position + 1
            if not text.startswith(",", position):
                return None
            position = _skip_space(text, position + 1)
    except (ValueError, RecursionError):  # ValueError: also a number of more digits than Python reads
        return None


def _name_and_arguments(fields: dict[str, str]) -> tuple[str, str]:
    name = _JSON.decode(fields["name"]) if "name" in fields else ""
    arguments = fields.get("arguments", "{}")
    if arguments.startswith('"'):  # OpenAI's form: the object as a JSON string
        arguments = _JSON.decode(arguments)
    return name if isinstance(name, str) else "", _with_escapes(arguments)


def _with_escapes(arguments: str) -> str:
    if not _CONTROL.search(arguments):
        return arguments
    return _STRING.sub(lambda string: _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], string[0]), arguments)


def _unquote(raw: str) -> str:
    try:
        return _JSON.decode(f'"{raw}"')
    except json.JSONDecodeError:
        return raw


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _reply(text: str, scan: _Scan, call_id_prefix: str, events: dict[str, int]) -> ParsedReply:
    calls = tuple(
        ToolCall(id=f"{call_id_prefix}{index}", name=name, arguments=arguments)
        for index, (name, arguments, _) in enumerate(scan.calls)
    )
    reasoning = "".join(scan.reasoning).strip()
    message = Message(
        role="assistant", content="".join(scan.content).strip(), tool_calls=calls, reasoning=reasoning or None
    )
    return ParsedReply(
        message=message,
        text=text,
        num_malformed=sum(not well_formed for _, _, well_formed in scan.calls),
        unterminated=scan.unterminated is not None,
        events={name: count for name, count in events.items() if count},
    )
