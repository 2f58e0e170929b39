"""The scan that all families with an opening mark share; a `Grammar` tells how one call is written.

Rules:
- A call ends where its grammar says, *outside* of its JSON strings; braces and marks inside of strings are text.
- A call that stands in reasoning is never returned; it is counted (`call_in_reasoning`). Reasoning is a `<think>`
  block, or everything before a lone `</think>` (the prompt may have opened the block).
- A call that cannot be read is returned with its raw text as `arguments` and the name that could be read, so that
  the environment answers with an error the model can learn from. That raw text is never a JSON object.
- A call without an end (`unterminated_call`) is malformed too where the model ended its turn: its raw text begins with
  the opening mark. Where a limit cut the text, it is no call at all; its text stays in the content.
- Everything outside of calls and reasoning is content, but for the marks that only wrap a list of calls.

Nothing here checks names or schemas: that is the environment's work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quintain.agents.tool_calls.json_text import object_items
from quintain.agents.tool_calls.reply import THINK_CLOSE, THINK_OPEN, Call, ParsedReply, reply_of
from quintain.envs.message import ToolSpec

_MAX_LOST_SEARCHES = 32  # string-aware searches of one reply that may find nothing: bounds the time


class Grammar(Protocol):
    """How one family writes a call."""

    family: str
    opens: str
    """Regular expression, without groups, of the mark that begins a call."""
    wraps: str
    """Regular expression of marks around lists of calls; empty if there are none."""
    close: str
    """The mark that ends a call; empty where a call ends with its JSON."""
    json_strings: bool
    """Whether a broken call may hold its closing mark inside of a JSON string."""

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSpec]) -> tuple[tuple[Call, ...], int] | None:
        """The calls that `mark` begins and where they end; None where they are not well-formed.

        No calls and an end: what looked like a call is text.
        """
        ...

    def name_in(self, raw: str) -> str:
        """The name in the text of a broken call; empty where none can be read."""
        ...


@dataclass(slots=True)
class _Scan:
    """What has been found so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    in_reasoning: int = 0
    unterminated: tuple[int, int] | None = None  # where the call starts in the text, and the number of content pieces
    num_lost: int = 0


class MarkedParser:
    """The `ToolCallParser` of a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self.family = grammar.family
        self._grammar = grammar
        wraps = f"|(?P<wrap>{grammar.wraps})" if grammar.wraps else ""
        self._mark = re.compile(f"(?P<open>{grammar.opens}){wraps}|{THINK_OPEN}|{THINK_CLOSE}")
        self._string_or_close = re.compile(r'"(?:[^"\\]|\\.)*"|' + re.escape(grammar.close), re.DOTALL)

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
        """See `ToolCallParser.parse`."""
        del end_token  # none of these formats closes a call with it
        scan = _Scan()
        position, thinking = 0, reasoning_open
        while True:
            mark = self._mark.search(text, position)
            (scan.reasoning if thinking else scan.content).append(text[position : mark.start() if mark else len(text)])
            if mark is None:
                break
            position = mark.end()
            if mark.lastgroup == "open":
                position = self._take_call(text, mark, scan, tools, thinking=thinking)
            elif mark[0] == THINK_OPEN:
                thinking = True
            elif mark[0] == THINK_CLOSE:
                if not thinking:
                    _all_so_far_was_reasoning(scan)
                thinking = False
        events = {"call_in_reasoning": scan.in_reasoning, "unterminated_call": int(scan.unterminated is not None)}
        if scan.unterminated and not cut:
            start, num_pieces = scan.unterminated
            del scan.content[num_pieces:]
            scan.calls.append(self._broken(text[start:], text[start:]))
            scan.unterminated = None
        return reply_of(
            text,
            content="".join(scan.content),
            reasoning="".join(scan.reasoning),
            calls=scan.calls,
            call_id_prefix=call_id_prefix,
            unterminated=scan.unterminated is not None,
            events=events,
        )

    def _take_call(
        self, text: str, mark: re.Match[str], scan: _Scan, tools: Sequence[ToolSpec], *, thinking: bool
    ) -> int:
        """Record the calls that start at `mark`; returns where scanning goes on."""
        found = self._grammar.read(text, mark, tools)
        if found is not None and not found[0]:
            (scan.reasoning if thinking else scan.content).append(text[mark.start() : found[1]])
            return found[1]
        if thinking:
            scan.in_reasoning += len(found[0]) if found else 1
            # A broken draft must not swallow the mark that closes the reasoning.
            end = found[1] if found else mark.end()
            scan.reasoning.append(text[mark.start() : end])
            return end
        found = found or self._read_broken(text, mark, scan)
        if found is None:
            scan.unterminated = scan.unterminated or (mark.start(), len(scan.content))
            scan.content.append(mark[0])
            return mark.end()
        scan.calls += found[0]
        return found[1]

    def _read_broken(self, text: str, mark: re.Match[str], scan: _Scan) -> tuple[tuple[Call, ...], int] | None:
        """The raw text of the call that `mark` begins, and its end; None where it has no end."""
        close_mark, start = self._grammar.close, mark.end()
        if not close_mark:
            return None
        plain = text.find(close_mark, start)
        if plain < 0:
            return None
        close = -1
        if self._grammar.json_strings and scan.num_lost < _MAX_LOST_SEARCHES:
            close = next((m.start() for m in self._string_or_close.finditer(text, start) if m[0] == close_mark), -1)
            scan.num_lost += close < 0
        if close < 0:  # a string that never ends hides the mark; the plain mark is then the best guess
            close = plain
        return (self._broken(text[start:close], text[mark.start() : close]),), close + len(close_mark)

    def _broken(self, raw: str, with_mark: str) -> Call:
        items = object_items(raw, 0)
        whole = items is not None and not raw[items[1] :].strip()  # never hand on what could run
        return Call(name=self._grammar.name_in(raw), arguments=(with_mark if whole else raw).strip(), well_formed=False)


def _all_so_far_was_reasoning(scan: _Scan) -> None:
    scan.reasoning.extend(scan.content)
    scan.content.clear()
    scan.in_reasoning += len(scan.calls) + (scan.unterminated is not None)
    scan.calls.clear()
    scan.unterminated = None
