"""Tools: typed functions or methods, plain or `async`, that the model may call.

A call runs in three steps, each of which can end it with a text for the model and nothing executed: find the name, read
the JSON, check it against the schema. Only then is the function called, with a deadline where it has one. What the
function returns is the observation (text as it is, anything else as JSON, non-ASCII unescaped).

Does not decide how many calls of a turn are run, nor where a box comes from: `ToolEnv` does. Cutting the result to its
limit of tokens needs a tokenizer: `agents` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from pydantic_core import to_json

from quintain.envs.calling import DeadlinePassed, call_with_deadline
from quintain.envs.child_process import ChildDeadline, run_in_child
from quintain.envs.errors import EnvironmentDefinitionError, ToolDeadlineError, ToolError
from quintain.envs.injected import Source, injected_parameters, injected_values
from quintain.envs.message import ToolCall, ToolSpec
from quintain.envs.schema import MAX_SHOWN, Arguments, ArgumentsError, described_parts

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__quintain_tool__"
PROCESS_DEADLINE_S = 30.0
"""Of a tool that runs in a process and names no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """What `@tool(...)` was given."""

    deadline_s: float | None = None
    max_output_tokens: int | None = None
    expected: tuple[type[Exception], ...] = ()
    isolate: Literal["none", "process"] = "none"


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    deadline_s: float | None = None,
    max_output_tokens: int | None = None,
    expected: tuple[type[Exception], ...] = (),
    isolate: Literal["none", "process"] = "none",
) -> Callable[[F], F]: ...
def tool(
    function: Any = None,
    /,
    *,
    deadline_s: float | None = None,
    max_output_tokens: int | None = None,
    expected: tuple[type[Exception], ...] = (),
    isolate: Literal["none", "process"] = "none",
) -> Any:
    """Mark a function or method as a tool. Its name, types and docstring become what the model is told.

    `deadline_s`: an `async` or isolated tool is stopped then, and the model reads so; another can't be stopped, and the
    trajectory ends as the environment's failure. `max_output_tokens`: the middle of a longer result is cut out.
    `expected`: errors that are for the model, as `ToolError` always is. `isolate="process"`: run it where it can be
    killed (a function at a module's top, without `self`). Parameters annotated `BlockingSandbox` (in `async` ones
    `Sandbox`), `TrajectoryState` or `Task` are filled in and not shown to the model.

    Raises ValueError for limits that are not positive and for an `isolate` that there is not.
    """
    for name, value, least in (("deadline_s", deadline_s, 0), ("max_output_tokens", max_output_tokens, 7)):
        if value is not None and not value > least:
            raise ValueError(f"@tool({name}={value!r}): give a number above {least}")
    if isolate not in ("none", "process"):
        raise ValueError(f"@tool(isolate={isolate!r}): choose from none, process")
    settings = ToolSettings(
        deadline_s=deadline_s, max_output_tokens=max_output_tokens, expected=tuple(expected), isolate=isolate
    )

    def mark(marked: F) -> F:
        setattr(marked, _MARK, settings)
        return marked

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What one call gave.

    Example: ``ToolResult(content="85", event=None)``
    """

    content: str
    """The observation's text."""
    event: str | None = None
    """`unknown_tool`, `invalid_json`, `invalid_arguments`, `tool_error`, `tool_timeout`, or None where the tool
    ran to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of an environment class, not yet bound to an instance."""

    spec: ToolSpec
    function: Callable[..., Any]
    arguments: Arguments
    injected: Mapping[str, Source]
    """Parameters that are filled in."""
    is_method: bool
    is_async: bool
    settings: ToolSettings

    @property
    def needs_box(self) -> bool:
        return "box" in self.injected.values()

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Raises EnvironmentDefinitionError, saying what to write, for a function that a model cannot be told of."""
        name = function.__name__
        summary, _ = described_parts(function)
        if not summary:
            raise EnvironmentDefinitionError(
                f"tool `{function.__qualname__}` has no docstring; say in a sentence what it does: the model reads it"
            )
        injected = injected_parameters(function, what="tool")
        arguments = Arguments(function, hidden=frozenset(injected))
        settings: ToolSettings = getattr(function, _MARK, ToolSettings())
        is_method = next(iter(inspect.signature(function).parameters), None) == "self"
        is_async = inspect.iscoroutinefunction(function)
        if settings.isolate == "process" and (is_method or is_async or injected):
            raise EnvironmentDefinitionError(
                f"tool `{function.__qualname__}` runs in a process of its own (isolate='process'), where there is no "
                "environment, state or box: write a plain function at the module's top and list it in `tools`"
            )
        return cls(
            spec=ToolSpec(
                name=name,
                description=summary,
                parameters=arguments.schema,
                max_output_tokens=settings.max_output_tokens,
            ),
            function=function,
            arguments=arguments,
            injected=injected,
            is_method=is_method,
            is_async=is_async,
            settings=settings,
        )


def tools_of(cls: type) -> dict[str, Tool]:
    """The tools of an environment class by name: marked methods in the order written, then the list `tools`.

    Raises EnvironmentDefinitionError for a tool that cannot be described and for two of one name.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            if getattr(value, _MARK, None):
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
    tools: Mapping[str, Tool], call: ToolCall, *, owner: Any, lend: Callable[[Callable[[Any], Any]], Any]
) -> ToolResult:
    """Check one call and run it. `lend(use)` must call `use(box)` and give its result; `owner` is the environment.

    Raises ToolDeadlineError, and whatever the tool raises besides what it expects.
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
    try:
        value = lend(lambda box: _run(chosen, owner, kwargs, box)) if chosen.needs_box else _run(chosen, owner, kwargs)
    except (ToolError, *chosen.settings.expected) as error:
        return ToolResult(content=f"Error: {error}", event="tool_error")
    except (DeadlinePassed, ChildDeadline) as error:
        limit = f"{chosen.settings.deadline_s or PROCESS_DEADLINE_S:g} s"
        if isinstance(error, DeadlinePassed) and not error.stopped:
            raise ToolDeadlineError(
                f"tool `{name}` took longer than its deadline of {limit} and can't be stopped: give what it waits for "
                "a limit of its own, write it `async def`, or isolate it with @tool(isolate='process')"
            ) from error
        text = f"Error: {name} took longer than {limit} and was stopped."
        return ToolResult(content=text, event="tool_timeout")
    return ToolResult(content=as_text(value))


def _run(chosen: Tool, owner: Any, kwargs: dict[str, Any], box: Any = None) -> Any:
    """Call the tool. Raises DeadlinePassed, ChildDeadline, and what it raises."""
    settings = chosen.settings
    if settings.isolate == "process":
        return run_in_child(chosen.function, deadline_s=settings.deadline_s or PROCESS_DEADLINE_S, **kwargs)
    kwargs = kwargs | injected_values(chosen.injected, owner, box, is_async=chosen.is_async)
    args = (owner,) if chosen.is_method else ()
    return call_with_deadline(
        lambda: chosen.function(*args, **kwargs), is_async=chosen.is_async, deadline_s=settings.deadline_s
    )


def as_text(value: Any) -> str:
    """A tool's return value as the model reads it."""
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value, inf_nan_mode="constants").decode()
