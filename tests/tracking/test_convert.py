"""Parameters of any type become clean, strict JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from quintain.trainer.config import TrackingConfig
from quintain.trainer.tracking.convert import to_json


class Colour(enum.Enum):
    RED = "red"
    MIXED = (1, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    path: Path
    rate: float


@dataclasses.dataclass
class Outer:
    inner: Inner
    names: set[str]


CASES = [
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (-math.inf, "-inf"),
    (np.float32(0.5), 0.5),
    (np.int64(7), 7),
    (np.bool_(True), True),
    (np.float64("nan"), "nan"),
    (np.arange(3), [0, 1, 2]),
    (np.array(["a"]), ["a"]),
    (np.dtype("float32"), "float32"),
    (torch.tensor(2.5), 2.5),
    (torch.tensor([1, 2]), [1, 2]),
    (torch.zeros(100, 3), "Tensor(shape=(100, 3), dtype=torch.float32)"),
    (torch.bfloat16, "torch.bfloat16"),
    (torch.device("cpu"), "cpu"),
    (Path("/tmp/x"), "/tmp/x"),
    (Colour.RED, "red"),
    (Colour.MIXED, "MIXED"),
    ({"b", "a"}, ["a", "b"]),
    (frozenset({1}), [1]),
    ((1, (2, None)), [1, [2, None]]),
    (MappingProxyType({1: True}), {"1": True}),
    (2**70, str(2**70)),
    (-(2**70), str(-(2**70))),
    (10**100_000, hex(10**100_000)),
    (b"caf\xc3\xa9 \xff", "café �"),
    ("\ud800 half a pair", "? half a pair"),
    (1 + 2j, "(1+2j)"),
    (len, "builtins.len"),
    (Inner, f"{__name__}.Inner"),
    (Outer(Inner(Path("a"), math.nan), {"z"}), {"inner": {"path": "a", "rate": "nan"}, "names": ["z"]}),
    (range(3), [0, 1, 2]),
    (TrackingConfig(aim=False), TrackingConfig(aim=False).model_dump()),
]


@pytest.mark.parametrize(("value", "expected"), CASES, ids=[type(value).__name__ for value, _ in CASES])
def test_a_parameter_of_any_type_becomes_plain_json(value: object, expected: object) -> None:
    """G02"""
    converted = to_json({"outer": [value]})

    assert converted == {"outer": [expected]}
    json.dumps(converted, allow_nan=False)


def test_nan_inside_nested_parameters_survives_strict_json() -> None:
    """G01"""
    text = json.dumps(to_json({"a": {"b": float("nan")}, "c": [1.0, -math.inf]}), allow_nan=False)

    assert json.loads(text) == {"a": {"b": "nan"}, "c": [1.0, "-inf"]}


def test_an_object_without_a_repr_has_the_same_text_in_every_run() -> None:
    """G02: an address in the text would make equal runs differ."""
    assert to_json(object()) == "<builtins.object>"
    assert "0x" not in str(to_json(lambda: None))


def test_a_structure_that_contains_itself_ends() -> None:
    """G02"""
    loop: list[object] = []
    loop.append(loop)

    json.dumps(to_json(loop), allow_nan=False)
