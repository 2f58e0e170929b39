"""Small environments that the tests use, and makers of messages."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from quintain.envs import Message, ToolCall, ToolEnv, ToolError, reward, tool
from quintain.sandbox import BlockingSandbox


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Desk(ToolEnv):
    """Tools of every kind; what was really executed is in `state.executed`."""

    max_calls_per_turn = 3

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": f"{split} question {n}", "answer": str(n)} for n in range(20)]

    def prepare(self) -> None:
        self.state.executed = []

    def _ran(self, **arguments: Any) -> None:
        self.state.executed.append(arguments)

    @tool
    def search(self, query: str, limit: int = 5) -> list[str]:
        """Search the documents.

        Args:
            query: What to look for,
                in a few words.
            limit (int): Most results.

        Returns:
            Titles.
        """
        self._ran(query=query, limit=limit)
        return [f"{query} {i}" for i in range(min(limit, 2))]

    @tool
    def replace(self, text: str, replace_all: bool = False) -> str:
        """Replace text."""
        self._ran(text=text, replace_all=replace_all)
        return f"replaced {'all' if replace_all else 'one'}"

    @tool
    def measure(
        self,
        length: float,
        unit: Unit = Unit.METRE,
        mode: Literal["fast", "exact"] = "fast",
        tags: list[str] | None = None,
        extra: dict[str, int] | None = None,
    ) -> dict[str, Any]:
        """Measure something."""
        self._ran(length=length, unit=unit, mode=mode, tags=tags, extra=extra)
        return {"length": length, "unit": unit.value, "ort": "北京"}

    @tool
    def today(self) -> str:
        """Give the date."""
        self._ran()
        return "2025-06-15"

    @tool
    def fail(self, kind: Literal["tool", "bug"]) -> str:
        """Fail."""
        if kind == "tool":
            raise ToolError("the drawer is locked")
        raise RuntimeError("a bug in the environment")

    @reward
    def right(self) -> float:
        return float(self.answer == self.task.data["answer"])

    @reward(weight=0.0)
    def num_messages(self) -> int:
        return len(self.messages)


class Notebook(ToolEnv):
    """Keeps state in every place it should not: attribute, class attribute, `state`, file."""

    sandbox_scope = "trajectory"
    pages: list[str] = []  # noqa: RUF012 - the mistake under test

    def __init__(self, *, fail_in_prepare: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = 0
        self.names = {"first": "ann"}
        self._failures = iter(range(fail_in_prepare))

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": "write"}]

    def prepare(self) -> None:
        if next(self._failures, None) is not None:
            raise RuntimeError("prepare failed")

    @tool
    def write(self, text: str, sandbox: BlockingSandbox) -> str:
        """Write a page, and say what was there before."""
        before = sandbox.exec("cat page.txt 2>/dev/null; ls /tmp/ 2>/dev/null | grep quintain_page").stdout
        sandbox.write_file("page.txt", text.encode())
        seen = [before, self.count, list(self.pages), sorted(self.names), sorted(vars(self)), sorted(vars(self.state))]
        self.count += 1
        self.pages.append(text)
        self.names[text] = text
        self.added = text
        self.state.text = text
        return repr(seen)

    @reward
    def anything(self) -> float:
        return 1.0


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def call(*calls: tuple[str, str]) -> Message:
    """An assistant message with calls given as (name, raw arguments)."""
    made = tuple(ToolCall(id=f"c{i}", name=name, arguments=text) for i, (name, text) in enumerate(calls))
    return Message(role="assistant", content="", tool_calls=made)
