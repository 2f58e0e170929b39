"""Harmony (gpt-oss): a reply is a list of messages, each with a channel; a call is one to `functions.NAME`.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.n <|constrain|>json
    <|message|>{…}<|call|>

`<|call|>` closes the call and ends the turn, so it is mostly the stop token (`end_token`), not in the text. A call that
ends otherwise is malformed; one that a limit cut is none. Analysis is reasoning, and calls there are only counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quintain.agents.tool_calls.json_text import object_text, skip_space
from quintain.agents.tool_calls.reply import Call, ParsedReply, reply_of
from quintain.envs.message import ToolSpec

_CALL = "<|call|>"
_HEADER = re.compile(r"(?:<\|start\|>(?P<role>[^<]*))?<\|channel\|>(?P<channel>(?:[^<]|<\|constrain\|>)*)<\|message\|>")
_END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|(?=<\|channel\|>)|\Z")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyParser:
    """The `ToolCallParser` of gpt-oss."""

    family = "harmony"

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
        del tools
        whole = text + _CALL if end_token == _CALL else text
        pieces: dict[bool, list[str]] = {False: [], True: []}  # by whether it is reasoning
        calls: list[Call] = []
        num_reasoned = num_unterminated = position = 0
        while position < len(whole):
            header = _HEADER.search(whole, position)
            pieces[reasoning_open].append(_END.sub("", whole[position : header.start() if header else len(whole)]))
            if header is None:
                break
            thinking = header["channel"].strip().startswith("analysis")
            recipient = _RECIPIENT.search(f"{header['role'] or ''} {header['channel']}")
            reasoning_open = False
            if recipient is None:
                end = _END.search(whole, header.end())
                stop, position = (end.start(), end.end()) if end else (len(whole), len(whole))
                pieces[thinking].append(whole[header.end() : stop])
                continue
            call, position = _read(whole, header, recipient[1])
            closed = whole.startswith(_CALL, position - len(_CALL))
            num_unterminated += not closed and not thinking
            if thinking:
                num_reasoned += 1
                pieces[True].append(whole[header.start() : position])
            elif not closed and cut and position == len(whole):
                pieces[False].append(whole[header.start() : position])
            else:
                calls.append(call)
        unterminated = bool(num_unterminated) and cut and not whole.endswith(_CALL)
        return reply_of(
            text,
            content="".join(pieces[False]),
            reasoning="".join(pieces[True]),
            calls=calls,
            call_id_prefix=call_id_prefix,
            unterminated=unterminated,
            events={"call_in_reasoning": num_reasoned, "unterminated_call": num_unterminated},
        )


def _read(text: str, header: re.Match[str], name: str) -> tuple[Call, int]:
    """The call that `header` begins, and its end."""
    found = object_text(text, header.end())
    if found is not None:
        end = skip_space(text, found[1])
        if text.startswith(_CALL, end):
            return Call(name=name, arguments=found[0]), end + len(_CALL)
    stop = _END.search(text, header.end())
    end = stop.end() if stop else len(text)
    return Call(name=name, arguments=text[header.start() : end].strip(), well_formed=False), end
