"""From a typed Python function to a JSON schema, and from raw JSON text to checked keyword arguments.

    def add(a: int, b: int = 0) -> int: "Add."   ->   Arguments(add).schema   ->   {"type": "object", "properties": …}
    '{"a": 1}'                                   ->   Arguments(add).read(…)  ->   {"a": 1}   or an ArgumentsError

pydantic makes the schema and does the checking, at every depth: what it can say in JSON Schema can be an argument.
Checking is strict: an integer is a JSON integer, never the text "5"; text is taken as it stands; a nested object has no
field its class does not name. The one leniency is for booleans, which some chat templates can only write as words:
where the schema says boolean and not text, "true"/"True" and "false"/"False" are read, nothing else.
Nothing here runs a tool.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import from_json, to_json

from quintain.envs.errors import EnvironmentDefinitionError

MAX_SHOWN = 80  # characters of a model-written name that an error repeats
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
        """`hidden`: parameters that the model is not told of.

        Raises EnvironmentDefinitionError for a type that JSON Schema has no words for.
        """
        described = described_parts(function)[1]
        fields: dict[str, Any] = {}
        self._names: list[str] = []
        for name, parameter, annotation in typed_parameters(function):
            if name in hidden:
                continue
            required = parameter.default is inspect.Parameter.empty
            fields[f"argument_{len(fields)}"] = (
                annotation,
                Field(... if required else parameter.default, alias=name, description=described.get(name)),
            )
            self._names.append(name)
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=False)
        try:
            self._model: type[BaseModel] = create_model("Arguments", __config__=config, **fields)
            self.schema = _plain_schema(self._model)
        except PydanticUserError as error:
            raise EnvironmentDefinitionError(
                f"tool `{function.__qualname__}`: an argument's type cannot be put into words for a model: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error

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
        if (reread := _with_booleans(value, self.schema)) != value:
            text = to_json(reread).decode()
        try:
            # Both settings hold at every depth, whatever a nested class says of itself.
            model = self._model.model_validate_json(text, strict=True, extra="forbid")
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


def typed_parameters(function: Callable[..., Any], *, what: str = "tool") -> list[tuple[str, inspect.Parameter, Any]]:
    """(name, parameter, annotation) of each parameter but `self`. `what` the function is, for errors.

    Raises EnvironmentDefinitionError where one cannot be described.
    """
    where = f"{what} `{function.__qualname__}`"
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


def described_parts(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a Google-style docstring says of the function, on one line, and of each argument.

    Raises EnvironmentDefinitionError for a docstring that cannot be read.
    """
    try:
        parsed = docstring_parser.parse(inspect.getdoc(function) or "", style=docstring_parser.DocstringStyle.GOOGLE)
    except docstring_parser.ParseError as error:
        raise EnvironmentDefinitionError(
            f"tool `{function.__qualname__}`: its docstring cannot be read ({error}); "
            "write `Args:` and below it `name: what it is`, indented"
        ) from error
    summary = " ".join(f"{parsed.short_description or ''} {parsed.long_description or ''}".split())
    return summary, {item.arg_name: " ".join(item.description.split()) for item in parsed.params if item.description}


def _is_finite(value: Any) -> bool:
    """No number in a JSON value is infinite; its depth is bounded by the JSON reader."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _with_booleans(value: Any, schema: Mapping[str, Any]) -> Any:
    """`value` with the four words read where `schema` says boolean and not text."""
    choices = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ())] or [schema]
    if isinstance(value, str):
        fits = [part for part in choices if part.get("type") == "string" or value in part.get("enum", ())]
        if value in _BOOLEAN_WORDS and not fits and any(part.get("type") == "boolean" for part in choices):
            return _BOOLEAN_WORDS[value]
    elif isinstance(value, list):
        for part in choices:
            if part.get("type") == "array":
                first = part.get("prefixItems", ())
                rest = part.get("items") or {}
                return [_with_booleans(v, first[i] if i < len(first) else rest) for i, v in enumerate(value)]
    elif isinstance(value, dict):
        objects = [part for part in choices if part.get("type") == "object"]
        for part in sorted(objects, key=lambda part: len(value.keys() - part.get("properties", {}).keys())):
            known, rest = part.get("properties", {}), part.get("additionalProperties")
            rest = rest if isinstance(rest, dict) else {}
            return {key: _with_booleans(v, known.get(key, rest)) for key, v in value.items()}
    return value


def _plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's schema without titles and references: shorter, and what chat templates expect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a default that JSON cannot hold is left out, which is right
        raw = model.model_json_schema(by_alias=True)
    definitions = raw.pop("$defs", {})
    properties = {name: _plain(spec, definitions) for name, spec in raw.get("properties", {}).items()}
    plain = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**plain, "required": raw["required"]} if "required" in raw else plain


def _plain(node: Any, definitions: Mapping[str, Any], within: frozenset[str] = frozenset()) -> Any:
    """`within`: the definitions that are being written out."""
    if isinstance(node, list):
        return [_plain(part, definitions, within) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[-1]
        if name in within:
            raise EnvironmentDefinitionError(
                f"a tool's argument type, {name}, refers to itself, which a model cannot be told; use `dict` instead"
            )
        node = {**definitions[name], **{key: value for key, value in node.items() if key != "$ref"}}
        within |= {name}
    plain = {}
    for key, value in node.items():
        if key == "properties":
            plain[key] = {name: _plain(spec, definitions, within) for name, spec in value.items()}
        elif not (key == "title" and isinstance(value, str)) and key != "discriminator":  # it points into definitions
            plain[key] = value if key in ("default", "enum", "const") else _plain(value, definitions, within)
    if "properties" in plain:
        plain["additionalProperties"] = False  # nested classes are as strict as the arguments themselves
    return plain


def _type_words(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return "one of " + ", ".join(str(value) for value in spec["enum"])
    if "const" in spec:
        return f"only {spec['const']}"
    for several in ("anyOf", "oneOf"):
        if several in spec:
            return " or ".join(_type_words(part) for part in spec[several])
    if spec.get("properties"):
        return f"object of {', '.join(spec['properties'])}"
    kind = str(spec.get("type", "any"))
    return f"array of {_type_words(spec['items'])}" if kind == "array" and spec.get("items") else kind
