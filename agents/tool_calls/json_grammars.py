"""Families that write arguments as JSON.

hermes       <tool_call>{"name": n, "arguments": {…}}</tool_call>                       Qwen2.5, Qwen3
llama3       <|python_tag|>{"name": n, "parameters": {…}}; {…}   or the bare object as the whole reply
mistral      [TOOL_CALLS] [{"name": n, "arguments": {…}}, …]   or   [TOOL_CALLS]n[ARGS]{…}
deepseek_v3  <｜tool▁call▁begin｜>function<｜tool▁sep｜>n, a fenced block of JSON, <｜tool▁call▁end｜>
deepseek_v31 <｜tool▁call▁begin｜>n<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
kimi_k2      <|tool_call_begin|>functions.n:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quintain.agents.tool_calls.json_text import name_and_arguments, name_in, object_items, object_text, skip_space
from quintain.agents.tool_calls.reply import Call
from quintain.envs.message import ToolSpec

Found = tuple[tuple[Call, ...], int]


class Hermes:
    """One object between two marks."""

    family = "hermes"
    opens = "<tool_call>"
    wraps = ""
    close = "</tool_call>"
    json_strings = True

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSpec]) -> Found | None:
        """See `Grammar.read`."""
        del tools
        items = object_items(text, mark.end())
        if items is None:
            return None
        close = skip_space(text, items[1])
        if not text.startswith(self.close, close):
            return None
        name, arguments = name_and_arguments(items[0])
        return (Call(name=name, arguments=arguments),), close + len(self.close)

    def name_in(self, raw: str) -> str:
        """See `Grammar.name_in`."""
        return name_in(raw)


class Headed:
    """A header with the name, the object of arguments, a tail."""

    json_strings = True

    def __init__(self, family: str, *, opens: str, wraps: str, close: str, header: str, tail: str = "") -> None:
        """`header`: its only group is the name. `tail`: what stands between the object and the closing mark."""
        self.family, self.opens, self.wraps, self.close = family, opens, wraps, close
        self._header = re.compile(header)
        self._tail = re.compile(rf"\s*{tail}\s*{re.escape(close)}")

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSpec]) -> Found | None:
        """See `Grammar.read`."""
        del tools
        header = self._header.match(text, mark.end())
        found = object_text(text, header.end()) if header else None
        if header is None or found is None:
            return None
        tail = self._tail.match(text, found[1])
        return ((Call(name=header[1], arguments=found[0]),), tail.end()) if tail else None

    def name_in(self, raw: str) -> str:
        """See `Grammar.name_in`."""
        mark = re.match(self.opens, raw)
        header = self._header.match(raw, mark.end() if mark else 0)
        return header[1] if header else ""


class Llama3:
    """Objects with `parameters`, after a mark or as the whole reply; nothing closes them."""

    family = "llama3"
    opens = (
        r"<\|python_tag\|>"
        r'|(?:\A|(?<=</think>))\s*\{(?=\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)'
    )
    wraps = ""
    close = ""
    json_strings = True

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSpec]) -> Found | None:
        """See `Grammar.read`. A bare object without arguments is an answer that happens to be JSON."""
        del tools
        bare = mark[0].endswith("{")
        position = mark.end() - bare
        calls: list[Call] = []
        while True:
            items = object_items(text, position)
            if items is None:
                return None
            fields, end = items
            key = "parameters" if "parameters" in fields else "arguments"
            if bare and not calls and key not in fields:
                return (), end
            name, arguments = name_and_arguments(fields, key)
            calls.append(Call(name=name, arguments=arguments))
            position = skip_space(text, end)
            if not text.startswith(";", position):
                return tuple(calls), end
            position += 1
            if skip_space(text, position) == len(text):
                return tuple(calls), len(text)

    def name_in(self, raw: str) -> str:
        """See `Grammar.name_in`."""
        return name_in(raw)


class Mistral:
    """A list of objects after the mark, or a name and its arguments; nothing closes them."""

    family = "mistral"
    opens = r"\[TOOL_CALLS\]"
    wraps = ""
    close = ""
    json_strings = True
    _header = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?")

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSpec]) -> Found | None:
        """See `Grammar.read`."""
        del tools
        position = skip_space(text, mark.end())
        if text.startswith("[", position):
            return self._read_list(text, position + 1)
        header = self._header.match(text, position)
        found = object_text(text, header.end()) if header else None
        return ((Call(name=header[1], arguments=found[0]),), found[1]) if header and found else None

    def _read_list(self, text: str, position: int) -> Found | None:
        calls: list[Call] = []
        while True:
            items = object_items(text, position)
            if items is None:
                return None
            name, arguments = name_and_arguments(items[0])
            calls.append(Call(name=name, arguments=arguments))
            position = skip_space(text, items[1])
            if text.startswith("]", position):
                return tuple(calls), position + 1
            if not text.startswith(",", position):
                return None
            position += 1

    def name_in(self, raw: str) -> str:
        """See `Grammar.name_in`."""
        body = raw.removeprefix("[TOOL_CALLS]").lstrip()
        header = None if body.startswith("[") else self._header.match(body)
        return header[1] if header else name_in(raw)


_DEEPSEEK_WRAPS = "<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>"
_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

HERMES, LLAMA3, MISTRAL = Hermes(), Llama3(), Mistral()
DEEPSEEK_V3 = Headed(
    "deepseek_v3",
    opens=_DEEPSEEK_OPEN,
    wraps=_DEEPSEEK_WRAPS,
    close=_DEEPSEEK_CLOSE,
    header=r"\s*function<｜tool▁sep｜>[ \t]*([^\s<]+)\s*```json\s*",
    tail="```",
)
DEEPSEEK_V31 = Headed(
    "deepseek_v31",
    opens=_DEEPSEEK_OPEN,
    wraps=_DEEPSEEK_WRAPS,
    close=_DEEPSEEK_CLOSE,
    header=r"\s*([^\s<]+)\s*<｜tool▁sep｜>",
)
KIMI_K2 = Headed(
    "kimi_k2",
    opens=r"<\|tool_call_begin\|>",
    wraps=r"<\|tool_calls_section_begin\|>|<\|tool_calls_section_end\|>",
    close="<|tool_call_end|>",
    header=r"\s*(?:functions\.)?([^\s<:]+):\d+\s*<\|tool_call_argument_begin\|>",
)
