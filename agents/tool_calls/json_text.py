"""JSON in sampled text: where an object ends, the raw text of its values, and raw values as JSON text.

Values are handed on as written (numbers keep their digits), but for raw control characters inside of strings: models
write newlines and tabs there, which is readable, so it is no error; they are escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quintain.envs.message import ToolSpec

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder(strict=False)


def skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def object_items(text: str, start: int) -> tuple[dict[str, str], int] | None:
    """The raw JSON text of each value of the object at `start`, and the object's end; None where it is no object."""
    position = skip_space(text, start)
    if not text.startswith("{", position):
        return None
    fields: dict[str, str] = {}
    position = skip_space(text, position + 1)
    if text.startswith("}", position):
        return fields, position + 1
    try:
        while True:
            key, position = _JSON.raw_decode(text, position)
            position = skip_space(text, position)
            if not isinstance(key, str) or not text.startswith(":", position):
                return None
            value_start = skip_space(text, position + 1)
            _, position = _JSON.raw_decode(text, value_start)
            fields[key] = text[value_start:position]
            position = skip_space(text, position)
            if text.startswith("}", position):
                return fields, position + 1
            if not text.startswith(",", position):
                return None
            position = skip_space(text, position + 1)
    except (ValueError, RecursionError):  # ValueError: also a number of more digits than Python reads
        return None


def object_text(text: str, start: int) -> tuple[str, int] | None:
    """The object at `start` as JSON text, and its end; None where there is none."""
    start = skip_space(text, start)
    items = object_items(text, start)
    return None if items is None else (with_escapes(text[start : items[1]]), items[1])


def name_and_arguments(fields: Mapping[str, str], arguments_key: str = "arguments") -> tuple[str, str]:
    """Name and arguments of a call that is written as one object."""
    name = _JSON.decode(fields["name"]) if "name" in fields else ""
    arguments = fields.get(arguments_key, "{}")
    if arguments.startswith('"'):  # OpenAI's form: the object as a JSON string
        arguments = _JSON.decode(arguments)
    return name if isinstance(name, str) else "", with_escapes(arguments)


def name_in(raw: str) -> str:
    """The name in the text of a broken call; empty where none can be read."""
    name = _NAME.search(raw)
    if not name:
        return ""
    try:
        return _JSON.decode(f'"{name[1]}"')
    except json.JSONDecodeError:
        return name[1]


def with_escapes(arguments: str) -> str:
    if not _CONTROL.search(arguments):
        return arguments
    return _STRING.sub(lambda string: _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], string[0]), arguments)


def is_json(raw: str) -> bool:
    try:
        json.loads(raw, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def typed_value(raw: str, schema: Any) -> str:
    """A raw value as JSON text: as it stands where `schema` lets it be a string, else as JSON if it is some.

    What is neither stays a string, so that the environment's schema check refuses it and names the field.
    """
    types = _types_of(schema)
    bare = raw.strip()
    if "string" in types:
        return "null" if bare == "null" and "null" in types else as_string(raw)
    return with_escapes(bare) if is_json(bare) else as_string(raw)


def as_string(raw: str) -> str:
    return json.dumps(raw, ensure_ascii=False)


def object_of(fields: Mapping[str, str]) -> str:
    """Keys and the JSON text of their values as one object."""
    return "{" + ", ".join(f"{as_string(key)}: {value}" for key, value in fields.items()) + "}"


def properties_of(name: str, tools: Sequence[ToolSpec]) -> Mapping[str, Any]:
    """The schema of each parameter of the tool; empty for a tool that is not there."""
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _types_of(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, Sequence):
        return frozenset(kind)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return frozenset({"string"}) if all(isinstance(choice, str) for choice in choices) else frozenset()
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return frozenset().union(*map(_types_of, branches))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
