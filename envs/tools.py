"""Tools: plain typed functions or methods that the model may call.

A call runs in three steps, each of which can end it with a text for the model and nothing executed: find the name, read
the JSON, check it against the schema. Only then is the function called. What the function returns is the observation
(text as it is, anything else as JSON, non-ASCII unescaped).

Does not decide how many calls of a turn are run, nor where a box comes from: `ToolEnv` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic_core import to_json

from quintain.envs.errors import EnvironmentDefinitionError, ToolError
from quintain.envs.message import ToolCall, ToolSpec
from quintain.envs.schema import MAX_SHOWN, Arguments, ArgumentsError, summary_of, typed_parameters
from quintain.sandbox import BlockingSandbox

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__quintain_tool__"


def tool(function: F) -> F:
    """Mark a method as a tool. Its name, types and docstring become what the model is told.

    A parameter annotated `BlockingSandbox` gets the box and is not shown to the model.
    """
    setattr(function, _MARK, True)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What one call gave.

    Example: ``ToolResult(content="85", event=None)``
    """

    content: str
    """The observation's text."""
    event: str | None = None
    """`unknown_tool`, `invalid_json`, `invalid_arguments`, `tool_error`, or None where the tool ran to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of an environment class, not yet bound to an instance."""

    spec: ToolSpec
    function: Callable[..., Any]
    arguments: Arguments
    sandbox_parameter: str | None
    """The parameter that gets the box; None where the tool takes none."""
    is_method: bool

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Raises EnvironmentDefinitionError, saying what to write, for a function that a model cannot be told of."""
        name = function.__name__
        docstring = inspect.getdoc(function) or ""
        if not summary_of(docstring):
            raise EnvironmentDefinitionError(
                f"tool `{function.__qualname__}` has no docstring; say in a sentence what it does: the model reads it"
            )
        if inspect.iscoroutinefunction(function):
            raise EnvironmentDefinitionError(
                f"tool `{function.__qualname__}` is `async def`; tools are plain functions, write `def`"
            )
        boxes = [name for name, _, annotation in typed_parameters(function) if annotation is BlockingSandbox]
        if len(boxes) > 1:
            raise EnvironmentDefinitionError(
                f"tool `{function.__qualname__}` takes {len(boxes)} boxes; there is only one"
            )
        arguments = Arguments(function, hidden=frozenset(boxes))
        return cls(
            spec=ToolSpec(name=name, description=summary_of(docstring), parameters=arguments.schema),
            function=function,
            arguments=arguments,
            sandbox_parameter=boxes[0] if boxes else None,
            is_method=next(iter(inspect.signature(function).parameters), None) == "self",
        )


def tools_of(cls: type) -> dict[str, Tool]:
    """The tools of an environment class by name: marked methods in the order written, then the list `tools`.

    Raises EnvironmentDefinitionError for a tool that cannot be described and for two of one name.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            if getattr(value, _MARK, False):
                methods[attribute] = value
            else:
                methods.pop(attribute, None)  # overridden by something that is no tool
    found: dict[str, Tool] = {}
    for function in [*methods.values(), *getattr(cls, "tools", ())]:
        made = Tool.from_function(function)
        if made.spec.name in found:
            raise EnvironmentDefinitionError(f"{cls.__name__} has two tools named `{made.spec.name}`; rename one")
        found[made.spec.name] = made
    return found


def run_call(
    tools: Mapping[str, Tool], call: ToolCall, *, owner: object, lend: Callable[[Callable[[Any], Any]], Any]
) -> ToolResult:
    """Check one call and run it. `lend(use)` must call `use(box)` and give its result.

    Raises whatever the tool raises, ToolError apart.
    """
    known = ", ".join(tools) or "none"
    name = call.name[:MAX_SHOWN]
    if not name:
        text = f"Error: the tool call could not be read: it needs a tool's name and its arguments. Tools: {known}."
        return ToolResult(content=text, event="invalid_json")
    chosen = tools.get(call.name)
    if chosen is None:
        return ToolResult(content=f'Error: there is no tool "{name}". Tools: {known}.', event="unknown_tool")
    try:
        kwargs = chosen.arguments.read(chosen.spec.name, call.arguments)
    except ArgumentsError as error:
        return ToolResult(content=f"Error: {error}", event=error.event)
    args = (owner,) if chosen.is_method else ()
    try:
        if chosen.sandbox_parameter is None:
            value = chosen.function(*args, **kwargs)
        else:
            parameter = chosen.sandbox_parameter
            value = lend(lambda box: chosen.function(*args, **kwargs, **{parameter: box}))
    except ToolError as error:
        return ToolResult(content=f"Error: {error}", event="tool_error")
    return ToolResult(content=as_text(value))


def as_text(value: Any) -> str:
    """A tool's return value as the model reads it."""
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value, inf_nan_mode="constants").decode()
