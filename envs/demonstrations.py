"""Building demonstrations: a conversation as a model would hold it, from a few parts.

A text is an assistant message. `(tool, arguments)` is an assistant message with that call, followed by the tool
message; the result is what the tool really gives, or the third member where running it needs a box.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quintain.envs.message import Message, ToolCall
from quintain.envs.tools import Tool, run_call

Part = str | tuple[str, Mapping[str, Any]] | tuple[str, Mapping[str, Any], str]


def build_dialogue(parts: Sequence[Part], tools: Mapping[str, Tool], *, owner: object) -> tuple[Message, ...]:
    """The messages. Raises ValueError where a call is refused, or would need a box and has no result given."""
    messages: list[Message] = []
    num_calls = 0
    for part in parts:
        if isinstance(part, str):
            messages.append(Message(role="assistant", content=part))
            continue
        arguments = json.dumps(part[1], ensure_ascii=False)
        call = ToolCall(id=f"call_{num_calls}", name=part[0], arguments=arguments)
        num_calls += 1
        content = part[2] if len(part) == 3 else _result(call, tools, owner)
        messages.append(Message(role="assistant", content="", tool_calls=(call,)))
        messages.append(Message(role="tool", content=content, tool_call_id=call.id, name=call.name))
    return tuple(messages)


def _result(call: ToolCall, tools: Mapping[str, Tool], owner: object) -> str:
    def no_box(_: object) -> NoReturn:
        raise ValueError(
            f"a demonstration calls `{call.name}`, which needs a box; give the result it would answer as third member"
        )

    result = run_call(tools, call, owner=owner, lend=no_box)
    if result.event:
        raise ValueError(f"a demonstration's call {call.name}({call.arguments}) was refused: {result.content}")
    return result.content
