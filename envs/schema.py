"""From a typed Python function to a JSON schema, and from raw JSON text to checked keyword arguments.

    def add(a: int, b: int = 0) -> int: "Add."   ->   Arguments(add).schema   ->   {"type": "object", "properties": …}
    '{"a": 1}'                                   ->   Arguments(add).read(…)  ->   {"a": 1}   or an ArgumentsError

Checking is strict: an integer is a JSON integer, never the text "5"; text is taken as it stands. The one leniency is
for booleans, which some chat templates can only write as words: "true"/"True" and "false"/"False" are read, nothing
else.
Nothing here runs a tool.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from types import GenericAlias, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json

from quintain.envs.errors import EnvironmentDefinitionError

MAX_SHOWN = 80  # characters of a model-written name that an error repeats
_SECTIONS = re.compile(r"^\s*(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note|Notes)\s*:\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_BOOLEAN_WORDS = {"true": True, "True": True, "false": False, "False": False}


class ArgumentsError(Exception):
    """The model's arguments cannot be used; `event` is the counter it belongs to."""

    def __init__(self, text: str, *, event: str) -> None:
        super().__init__(text)
        self.event = event


class Arguments:
    """The arguments of one function: schema for the model, reader for what the model wrote."""

    schema: dict[str, Any]
    """JSON Schema of the arguments object."""

    def __init__(self, function: Callable[..., Any], *, hidden: frozenset[str] = frozenset()) -> None:
        described = describe_arguments(inspect.getdoc(function) or "")
        fields: dict[str, Any] = {}
        self._names: list[str] = []
        for name, parameter, annotation in typed_parameters(function):
            if name in hidden:
                continue
            required = parameter.default is inspect.Parameter.empty
            fields[f"argument_{len(fields)}"] = (
                _with_boolean_words(annotation),
                Field(... if required else parameter.default, alias=name, description=described.get(name)),
            )
            self._names.append(name)
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=False)
        self._model: type[BaseModel] = create_model("Arguments", __config__=config, **fields)
        self.schema = _plain_schema(self._model)

    def read(self, tool_name: str, text: str) -> dict[str, Any]:
        """Keyword arguments from raw JSON text. Raises ArgumentsError, whose text is written for the model."""
        try:
            value = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            reason = str(error) or "unreadable"
            raise ArgumentsError(
                f'the arguments of "{tool_name}" are not valid JSON: {reason}. Nothing was run.', event="invalid_json"
            ) from error
        if not isinstance(value, dict):
            raise ArgumentsError(
                f'"{tool_name}" was not run: its arguments must be a JSON object. {self._expected()}',
                event="invalid_arguments",
            )
        endless = [name[:MAX_SHOWN] for name, part in value.items() if not _is_finite(part)]
        if endless:  # 1e999 is JSON, but the number that Python reads is infinite
            raise ArgumentsError(
                f'"{tool_name}" was not run: argument "{endless[0]}": a number in it is too large. {self._expected()}',
                event="invalid_arguments",
            )
        try:
            model = self._model.model_validate_json(text)
        except ValidationError as error:
            problems = "; ".join(self._problems(error))
            raise ArgumentsError(
                f'"{tool_name}" was not run: {problems}. {self._expected()}', event="invalid_arguments"
            ) from error
        given = model.model_fields_set
        return {name: getattr(model, f"argument_{i}") for i, name in enumerate(self._names) if f"argument_{i}" in given}

    def _problems(self, error: ValidationError) -> list[str]:
        """One phrase for each field at fault, most five."""
        phrases: dict[str, list[str]] = {}
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            name = str(item["loc"][0])[:MAX_SHOWN] if item["loc"] else ""
            if item["type"] == "extra_forbidden":
                phrase = f'unknown argument "{name}"'
            elif item["type"] == "missing" and len(item["loc"]) == 1:
                phrase = f'missing argument "{name}"'
            else:
                place = "".join(f"[{part}]" for part in item["loc"][1:] if isinstance(part, int))
                phrase = f'argument "{name}"{place}: {item["msg"][:200]}'
            phrases.setdefault(name, [])
            if phrase not in phrases[name]:
                phrases[name].append(phrase)
        flat = [" or ".join(several) for several in phrases.values()]
        return flat[:5] + ([f"and {len(flat) - 5} more"] if len(flat) > 5 else [])

    def _expected(self) -> str:
        """The valid names and types, in a sentence."""
        if not self._names:
            return "It takes no arguments: {}."
        required = self.schema.get("required", ())
        parts = [
            f"{name} ({_type_words(spec)}{'' if name in required else ', optional'})"
            for name, spec in self.schema["properties"].items()
        ]
        return f"Arguments: {', '.join(parts)}."


def typed_parameters(function: Callable[..., Any]) -> list[tuple[str, inspect.Parameter, Any]]:
    """(name, parameter, annotation) of each parameter but `self`.

    Raises EnvironmentDefinitionError where one cannot be described.
    """
    where = f"tool `{function.__qualname__}`"
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise EnvironmentDefinitionError(
            f"{where}: a type in its signature cannot be resolved ({error}); import it at the module's top"
        ) from error
    rows = []
    for index, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if index == 0 and name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvironmentDefinitionError(
                f"{where}: `{parameter}` cannot be described to a model; name each argument"
            )
        if name not in hints:
            raise EnvironmentDefinitionError(f"{where}: argument `{name}` has no type; write for example `{name}: str`")
        rows.append((name, parameter, hints[name]))
    return rows


def describe_arguments(docstring: str) -> dict[str, str]:
    """The texts of a Google-style `Args:` section, by argument."""
    described: dict[str, str] = {}
    current, base, inside = "", None, False
    for line in docstring.splitlines():
        if section := _SECTIONS.match(line):
            inside, base = section[1] in ("Args", "Arguments"), None
            continue
        if not inside or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        base = indent if base is None else base
        match = _ARGUMENT.match(line.strip()) if indent <= base else None
        if match:
            current, described[match[1]] = match[1], match[2].strip()
        elif current:
            described[current] = f"{described[current]} {line.strip()}".strip()
    return described


def summary_of(docstring: str) -> str:
    """What stands before the first section of a docstring, on one line."""
    lines = []
    for line in docstring.splitlines():
        if _SECTIONS.match(line):
            break
        lines.append(line.strip())
    return " ".join(part for part in lines if part)


def _is_finite(value: Any) -> bool:
    """No number in a JSON value is infinite; its depth is bounded by the JSON reader."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _boolean(value: Any) -> Any:
    return _BOOLEAN_WORDS.get(value, value) if isinstance(value, str) else value


def _with_boolean_words(annotation: Any) -> Any:
    """The annotation with every `bool` in it replaced by one that also reads the four words."""
    if annotation is bool:
        return Annotated[bool, BeforeValidator(_boolean)]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return Union[tuple(_with_boolean_words(part) for part in parts)]  # noqa: UP007 - built at run time
    if origin in (list, dict):
        return GenericAlias(origin, tuple(_with_boolean_words(part) for part in parts))
    return annotation


def _plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's schema without titles and references: shorter, and what chat templates expect."""
    raw = model.model_json_schema(by_alias=True)
    definitions = raw.pop("$defs", {})
    properties = {name: _plain(spec, definitions, 0) for name, spec in raw.get("properties", {}).items()}
    plain = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**plain, "required": raw["required"]} if "required" in raw else plain


def _plain(node: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    if depth > 20:
        raise EnvironmentDefinitionError(
            "a tool's argument type refers to itself, which a model cannot be told; use `dict` instead"
        )
    if isinstance(node, list):
        return [_plain(part, definitions, depth + 1) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    plain = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "properties":
            plain[key] = {name: _plain(spec, definitions, depth + 1) for name, spec in value.items()}
        else:
            plain[key] = value if key in ("default", "enum", "const") else _plain(value, definitions, depth + 1)
    return plain


def _type_words(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return "one of " + ", ".join(str(value) for value in spec["enum"])
    if "const" in spec:
        return f"only {spec['const']}"
    if "anyOf" in spec:
        return " or ".join(_type_words(part) for part in spec["anyOf"])
    kind = str(spec.get("type", "any"))
    return f"array of {_type_words(spec['items'])}" if kind == "array" and spec.get("items") else kind
