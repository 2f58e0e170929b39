"""Families that write each argument between tags of its own, as raw text.

    qwen3_coder  <tool_call><function=n><parameter=k>\\nv\\n</parameter></function></tool_call>
    glm          <tool_call>n<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>           GLM 4.5 to 4.7
    deepseek_v32 <｜DSML｜invoke name="n">, then <｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>,
                 then </｜DSML｜invoke>

A value ends at the closing tag that another argument, or the end of the call, follows: the tag alone may stand in it.
A key that is given twice makes the call malformed: neither value is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quintain.agents.tool_calls.json_text import as_string, object_of, object_text, properties_of, typed_value
from quintain.agents.tool_calls.reply import Call
from quintain.envs.message import ToolSpec


class Tagged:
    """A head with the name, arguments between tags, a tail."""

    json_strings = False

    def __init__(
        self,
        family: str,
        *,
        opens: str,
        wraps: str = "",
        close: str,
        head: str,
        key: str,
        value_close: str,
        tail: str,
        trims_newlines: bool = False,
    ) -> None:
        """`head`: its group is the name. `key`: its groups are the key and, where the format has it, `string`."""
        self.family, self.opens, self.wraps, self.close = family, opens, wraps, close
        self._head, self._key, self._tail = re.compile(head), re.compile(rf"\s*{key}"), re.compile(rf"\s*{tail}")
        self._value_close = value_close
        self._trims_newlines = trims_newlines

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSpec]) -> tuple[tuple[Call, ...], int] | None:
        """See `Grammar.read`."""
        head = self._head.match(text, mark.end())
        if head is None:
            return None
        properties = properties_of(head[1], tools)
        fields: dict[str, str] = {}
        position = head.end()
        while key := self._key.match(text, position):
            end = self._value_end(text, key.end())
            if end < 0 or key[1] in fields:
                return None
            raw = text[key.end() : end]
            if self._trims_newlines:
                raw = raw.removeprefix("\n").removesuffix("\n")
            told = key.groupdict().get("string")
            fields[key[1]] = (
                as_string(raw) if told == "true" else typed_value(raw, None if told else properties.get(key[1]))
            )
            position = end + len(self._value_close)
        arguments = object_of(fields)
        if not fields and (whole := object_text(text, position)):  # some write the whole object instead
            arguments, position = whole
        tail = self._tail.match(text, position)
        return ((Call(name=head[1], arguments=arguments),), tail.end()) if tail else None

    def name_in(self, raw: str) -> str:
        """See `Grammar.name_in`."""
        mark = re.match(self.opens, raw)
        head = self._head.match(raw, mark.end() if mark else 0)
        return head[1] if head else ""

    def _value_end(self, text: str, start: int) -> int:
        end = text.find(self._value_close, start)
        while end >= 0:
            after = end + len(self._value_close)
            if self._key.match(text, after) or self._tail.match(text, after):
                return end
            end = text.find(self._value_close, after)
        return -1


QWEN3_CODER = Tagged(
    "qwen3_coder",
    opens="<tool_call>",
    close="</tool_call>",
    head=r"\s*<function=([^>\n]*)>",
    key=r"<parameter=([^>\n]*)>",
    value_close="</parameter>",
    tail="</function>\\s*</tool_call>",
    trims_newlines=True,
)
GLM = Tagged(
    "glm",
    opens="<tool_call>",
    close="</tool_call>",
    head=r"\s*([^\s<{]+)",
    key=r"<arg_key>([^<]*)</arg_key>(?:\s|\\n)*<arg_value>",
    value_close="</arg_value>",
    tail="</tool_call>",
)
DEEPSEEK_V32 = Tagged(
    "deepseek_v32",
    opens="<｜DSML｜invoke",
    wraps="</?｜DSML｜function_calls>",
    close="</｜DSML｜invoke>",
    head=r'\s+name="([^"]*)"\s*>',
    key=r'<｜DSML｜parameter\s+name="([^"]*)"\s+string="(?P<string>true|false)"\s*>',
    value_close="</｜DSML｜parameter>",
    tail="</｜DSML｜invoke>",
)
