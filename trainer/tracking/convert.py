"""One converter from any Python value to clean, strict JSON: what parameters go through before any tracker sees them.

Aim raises on numpy scalars and sets, and its page answers 500 where a parameter is NaN; strict JSON has no NaN
either. So: numbers become Python numbers, non-finite ones the strings "nan", "inf", "-inf"; containers are converted
inside; whatever is left becomes its `str`. Nothing raises, nothing is dropped. Deliberately knows types by their
shape (`.item()`, `.dtype`) instead of importing torch or numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from os import PathLike, fspath
from typing import Any

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

_LARGEST_INT = 2**63 - 1
_MOST_DEPTH = 20
_MOST_TENSOR_VALUES = 16


def to_json(value: object, *, _depth: int = 0) -> JsonValue:
    """`value` as strict JSON data. Integers beyond 64 bits become strings (Aim stores 64)."""
    plain, simple = _simple(value)
    if plain:
        return simple
    if _depth >= _MOST_DEPTH:
        return _text(value)
    container, converted = _container(value, _depth + 1)
    return converted if container else _text(value)


def _simple(value: object) -> tuple[bool, JsonValue]:
    """(whether `value` is a scalar that we know, its JSON form)."""
    if isinstance(value, Enum):
        return _simple(value.value) if isinstance(value.value, str | int | float) else (True, value.name)
    if value is None or isinstance(value, bool):
        return True, value
    if isinstance(value, str):
        return True, str.encode(value, "utf-8", "replace").decode("utf-8")
    if isinstance(value, int):
        return True, int(value) if abs(value) <= _LARGEST_INT else _text(value)
    if isinstance(value, float):
        return True, _finite(float(value))
    if isinstance(value, PathLike):
        path = fspath(value)
        return True, path if isinstance(path, str) else path.decode("utf-8", "replace")
    if isinstance(value, bytes):
        return True, value.decode("utf-8", "replace")
    return False, None


def _container(value: Any, depth: int) -> tuple[bool, JsonValue]:
    if isinstance(value, type):
        return True, _text(value)
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return True, to_json(fields, _depth=depth)
    if isinstance(value, Mapping):
        return True, {_key(k): to_json(v, _depth=depth) for k, v in value.items()}
    if isinstance(value, AbstractSet):
        return True, sorted((to_json(v, _depth=depth) for v in value), key=repr)
    if isinstance(value, Sequence):
        return True, [to_json(v, _depth=depth) for v in value]
    if hasattr(value, "model_dump"):
        return True, to_json(value.model_dump(), _depth=depth)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return True, _array(value, depth)
    return False, None


def _array(value: Any, depth: int) -> JsonValue:
    """A numpy scalar or array, or a tensor: its values where they are few, else a description."""
    shape = tuple(value.shape)
    if math.prod(shape) > _MOST_TENSOR_VALUES:
        return f"{type(value).__name__}(shape={shape}, dtype={value.dtype})"
    values = value.tolist()
    return _text(values) if isinstance(values, complex) else to_json(values, _depth=depth)


def _key(key: object) -> str:
    plain, simple = _simple(key)
    return str(simple) if plain else _text(key)


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _text(value: object) -> str:
    """A stable text: addresses in the default `repr` would make equal runs differ."""
    if isinstance(value, int):
        return hex(value) if value.bit_length() > 4096 else str(value)
    if isinstance(value, type) or callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}".lstrip(".")
    if type(value).__repr__ is object.__repr__:
        return f"<{type(value).__module__}.{type(value).__qualname__}>"
    return str(value)


def split_nonfinite(metrics: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """The metrics as floats, and how many of them are NaN or infinite."""
    values = {name: float(value) for name, value in metrics.items()}
    return values, sum(not math.isfinite(value) for value in values.values())
