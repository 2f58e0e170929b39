"""The conversation: messages, tool calls, tool specs, and the task (one data row) that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it; nothing about it has been checked yet.

    Example: ``ToolCall(id="call_0", name="calculator", arguments='{"expression": "37+48"}')``
    """

    id: str
    """Unique within the trajectory."""
    name: str
    """As the model wrote it; empty where no name could be read."""
    arguments: str
    """The raw JSON text, possibly malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the conversation.

    Example: ``Message(role="user", content="What is 37 plus 48?")``
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Assistant only: the calls, in the order written."""
    reasoning: str | None = None
    """Assistant only: what stood between the thinking marks, without them."""
    tool_call_id: str | None = None
    """Tool only: the call that this answers."""
    name: str | None = None
    """Tool only: the tool's name as it was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What the model is told of a tool.

    Example: ``ToolSpec(name="add", description="Add two numbers.", parameters={"type": "object", "properties":
    {"a": {"type": "number"}}, "required": ["a"], "additionalProperties": False})``
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments, always an object schema."""
    max_output_tokens: int | None = None
    """Most tokens of its result that the model reads; the run's `rollout.max_tool_tokens` holds besides. Not told."""

    def to_openai(self) -> dict[str, Any]:
        """The `{"type": "function", "function": {...}}` form that chat templates take."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One data row.

    Example: ``Task(id="train-17", prompt="What is 37 plus 48?", data={"answer": "85"})``
    """

    id: str
    """Unique within its split."""
    prompt: str
    """The first user message."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns (the right answer, say): for tools and rewards, never shown to the model."""
