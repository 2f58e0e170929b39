"""Gymnasium spaces of the conversation: one assistant message (action), several other messages (observation).

They contain every message that can really occur, whatever its text (empty, huge, emoji, control characters);
`gymnasium.spaces.Text` would hold ASCII letters and digits only. Samples are for checks of the interface, not for
learning: random short texts, and calls whose arguments no tool accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np

from quintain.envs.message import Message, Role, ToolCall

_ALPHABET = [*"abc XYZ 0123456789 .,;\n\t\"'{}<>\\", "é", "北", "🎯", "\u0007"]
_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


class MessageSpace(gymnasium.Space[Message]):
    """All messages of the given roles."""

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        tool_names: Sequence[str] = (),
        seed: int | np.random.Generator | None = None,
    ) -> None:
        unknown = set(roles) - set(_ROLES)
        if unknown or not roles:
            raise ValueError(f"roles {tuple(roles)}: choose from {_ROLES}")
        self.roles = tuple(roles)
        self.tool_names = tuple(tool_names)
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return (
            isinstance(x, Message)
            and x.role in self.roles
            and isinstance(x.content, str)
            and isinstance(x.tool_calls, tuple)
            and all(
                isinstance(call, ToolCall) and _is_text(call.id, call.name, call.arguments) for call in x.tool_calls
            )
            and (x.role == "assistant" or not x.tool_calls)
            and all(part is None or isinstance(part, str) for part in (x.reasoning, x.tool_call_id, x.name))
        )

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        role = self.roles[int(self.np_random.integers(len(self.roles)))]
        calls: tuple[ToolCall, ...] = ()
        if role == "assistant" and self.np_random.random() < 0.5:
            names = (*self.tool_names, self._text(8))
            calls = tuple(
                ToolCall(id=f"call_{i}", name=names[int(self.np_random.integers(len(names)))], arguments=self._text(12))
                for i in range(int(self.np_random.integers(1, 3)))
            )
        return Message(
            role=role,
            content=self._text(24),
            tool_calls=calls,
            tool_call_id="call_0" if role == "tool" else None,
        )

    def to_jsonable(self, sample_n: Iterable[Message]) -> list[Any]:
        return [asdict(message) for message in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Message]:
        return [
            Message(**{**row, "tool_calls": tuple(ToolCall(**call) for call in row["tool_calls"])}) for row in sample_n
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageSpace) and (self.roles, self.tool_names) == (other.roles, other.tool_names)

    def __repr__(self) -> str:
        return f"MessageSpace(roles={self.roles})"

    def _text(self, limit: int) -> str:
        picks = self.np_random.integers(len(_ALPHABET), size=int(self.np_random.integers(limit + 1)))
        return "".join(_ALPHABET[int(pick)] for pick in picks)


class MessagesSpace(gymnasium.Space[tuple[Message, ...]]):
    """All tuples, the empty one too, of messages that are not the assistant's."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        self.message = MessageSpace(("system", "user", "tool"))
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and all(self.message.contains(message) for message in x)

    def seed(self, seed: int | None = None) -> int | list[int] | dict[str, int]:
        self.message.seed(seed)
        return super().seed(seed)

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[Message, ...]:
        return tuple(self.message.sample() for _ in range(int(self.np_random.integers(4))))

    def to_jsonable(self, sample_n: Iterable[tuple[Message, ...]]) -> list[Any]:
        return [self.message.to_jsonable(sample) for sample in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[tuple[Message, ...]]:
        return [tuple(self.message.from_jsonable(sample)) for sample in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace)

    def __repr__(self) -> str:
        return "MessagesSpace()"


def _is_text(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)
