"""Arguments of every type a signature can say: what the model is told, what is accepted, and what arrives."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal, NotRequired

import jsonschema
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from quintain.envs.schema import Arguments, ArgumentsError


@dataclass
class Point:
    x: int
    seen: bool = False


class Filter(TypedDict):
    field: str
    below: NotRequired[float]


class Circle(BaseModel):
    """A round thing."""

    kind: Literal["circle"]
    centre: Point
    radius: float = Field(default=1.0, gt=0, description="In metres.")


class Line(BaseModel):
    kind: Literal["line"]
    ends: tuple[Point, Point]


@dataclass
class Options:
    colours: list[str] = field(default_factory=lambda: ["red"])


def draw(
    shape: Annotated[Circle | Line, Field(discriminator="kind")],
    where: list[Filter] | None = None,
    marks: dict[str, bool] | bool = False,
    on: date | None = None,
    size: Annotated[int, Field(ge=1, le=9)] = 3,
    pair: tuple[int, str] | None = None,
    options: Options = Options(),  # noqa: B008 - the default under test
    both: bool | str = "no",
    any_of: list[int | str] | None = None,
) -> str:
    """Draw a shape.

    Draws at once.

    Args:
        shape: What to draw,
            in one colour.
        where (list): Which layers.

    Returns:
        Nothing much.

    Raises:
        ValueError: Never.
    """
    return ""


ARGUMENTS = Arguments(draw)
CIRCLE = {"kind": "circle", "centre": {"x": 1}}


def read(**given: Any) -> dict[str, Any]:
    return ARGUMENTS.read("draw", json.dumps({"shape": CIRCLE, **given}))


def test_the_schema_is_whole_plain_and_valid() -> None:
    schema = ARGUMENTS.schema
    jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(schema)
    assert "$ref" not in text and "$defs" not in text and '"title"' not in text and "discriminator" not in text
    assert schema["required"] == ["shape"]
    told = schema["properties"]
    assert told["shape"]["description"] == "What to draw, in one colour." and len(told["shape"]["oneOf"]) == 2
    circle = told["shape"]["oneOf"][0]
    assert circle["description"] == "A round thing." and circle["additionalProperties"] is False
    assert circle["properties"]["radius"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 1.0,
        "description": "In metres.",
    }
    assert told["where"]["anyOf"][0]["items"]["required"] == ["field"] and told["where"]["anyOf"][1] == {"type": "null"}
    assert told["size"] == {"type": "integer", "minimum": 1, "maximum": 9, "default": 3}
    assert told["pair"]["anyOf"][0]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert told["options"]["default"] == {"colours": ["red"]}
    assert told["both"]["anyOf"] == [{"type": "boolean"}, {"type": "string"}]


def test_values_arrive_as_the_types_that_were_written() -> None:
    given = read(
        where=[{"field": "a", "below": 2}], marks={"a": True}, on="2025-06-15", pair=[1, "b"], options={"colours": []}
    )
    assert given["shape"] == Circle(kind="circle", centre=Point(1), radius=1.0)
    assert given["where"] == [{"field": "a", "below": 2.0}] and given["on"] == date(2025, 6, 15)
    assert given["pair"] == (1, "b") and given["options"] == Options(colours=[])
    line = read(shape={"kind": "line", "ends": [{"x": 1}, {"x": 2}]})["shape"]
    assert line.ends == (Point(1), Point(2))
    assert set(read()) == {"shape"}, "an argument that was not given is left to its default"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"marks": "true"}, True),
        ({"marks": {"a": "False"}}, {"a": False}),
        ({"shape": {"kind": "circle", "centre": {"x": 1, "seen": "true"}}}, Point(1, seen=True)),
        ({"both": "true"}, "true"),
    ],
)
def test_words_for_booleans_are_read_at_every_depth_but_never_where_text_is_due(given: Any, meant: Any) -> None:
    """B07"""
    values = read(**given)
    assert meant in (values.get("marks"), values["shape"].centre, values.get("both"))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"shape": {"kind": "circle", "centre": {"x": "1"}}}, "shape"),
        ({"shape": {"kind": "circle", "centre": {"x": 1, "y": 2}}}, "shape"),
        ({"shape": {"kind": "circle", "centre": {"x": 1}, "colour": "red"}}, "shape"),
        ({"shape": {"kind": "square"}}, "shape"),
        ({"shape": {"kind": "line", "ends": [{"x": 1}]}}, "shape"),
        ({"where": [{"field": "a", "above": 1}]}, "where"),
        ({"where": [{"below": 1}]}, "where"),
        ({"size": 0}, "size"),
        ({"size": 3.0}, "size"),
        ({"size": "3"}, "size"),
        ({"pair": [1, 2]}, "pair"),
        ({"pair": [1, "b", 3]}, "pair"),
        ({"on": 0}, "on"),
        ({"marks": "yes"}, "marks"),
        ({"marks": {"a": 1}}, "marks"),
        ({"options": {"colors": []}}, "options"),
        ({"any_of": [1.5]}, "any_of"),
        ({"any_of": [None]}, "any_of"),
    ],
)
def test_nested_values_are_checked_as_strictly_as_arguments(given: dict[str, Any], field: str) -> None:
    """B08, B11"""
    with pytest.raises(ArgumentsError, match=f'argument "{field}"') as caught:
        read(**given)
    assert caught.value.event == "invalid_arguments" and len(str(caught.value)) < 900
