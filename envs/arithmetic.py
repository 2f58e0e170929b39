"""Number and word problems: templates, their expressions, and the check of an expression's form.

Which split a problem belongs to is decided by a hash of its expression, so that no sum a model is evaluated on was ever
trained on, in whatever wording.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

MAX_EXPRESSION = 64  # characters
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|[-+*/()]", re.ASCII)
_EVAL_IN = 8  # one expression in this many is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A wording with `{a}`, `{b}` and perhaps `{c}`, and the operators between them."""

    text: str
    operators: str
    """One or two of `+-*`."""
    descending: bool = False
    """a > b: the wording takes something away from a heap of things."""

    def expression(self, numbers: tuple[int, ...]) -> str:
        return f"{numbers[0]}" + "".join(f"{op}{n}" for op, n in zip(self.operators, numbers[1:], strict=False))


TEMPLATES = (
    Template(text="What is {a} plus {b}?", operators="+"),
    Template(text="What is {a} minus {b}?", operators="-"),
    Template(text="What is {a} times {b}?", operators="*"),
    Template(text="What is {a} plus {b} minus {c}?", operators="+-"),
    Template(text="What is {a} times {b} plus {c}?", operators="*+"),
    Template(text="Tom has {a} apples and buys {b} more. How many apples?", operators="+"),
    Template(text="Mia had {a} coins and lost {b}. How many are left?", operators="-", descending=True),
    Template(text="There are {a} boxes of {b} pens. How many pens?", operators="*"),
    Template(text="Ann sold {a} cakes, then {b} boxes of {c}. How many cakes?", operators="+*"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem. Example: ``Problem(prompt="What is 37 plus 48?", expression="37+48", answer=85)``"""

    prompt: str
    expression: str
    answer: int


def generate_problems(split: Literal["train", "eval"], count: int, seed: int) -> list[Problem]:
    """`count` different problems of one split; equal arguments give equal problems."""
    found: dict[str, Problem] = {}
    for problem in _stream(seed):
        held_out = zlib.crc32(problem.expression.encode()) % _EVAL_IN == 0
        if held_out == (split == "eval"):
            found.setdefault(problem.prompt, problem)
        if len(found) == count:
            break
    return list(found.values())


def _stream(seed: int, chunk: int = 4096) -> Iterator[Problem]:
    rng = np.random.default_rng(seed)
    while True:
        picks = rng.integers(len(TEMPLATES), size=chunk).tolist()
        triples = rng.integers(2, 100, size=(chunk, 3)).tolist()
        for pick, (a, b, c) in zip(picks, triples, strict=True):
            template = TEMPLATES[pick]
            if template.descending:
                a, b = max(a, b), min(a, b)
            numbers = (a, b, c)[: len(template.operators) + 1]
            yield Problem(
                prompt=template.text.format(a=a, b=b, c=c),
                expression=template.expression(numbers),
                answer=value_of(numbers, template.operators),
            )


def value_of(numbers: tuple[int, ...], operators: str) -> int:
    """Of one or two of `+-*` between numbers, `*` first. Example: ``value_of((2, 3, 4), "+*") == 14``"""
    terms, sign = [numbers[0]], 1
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= number
        else:
            sign = 1 if operator == "+" else -1
            terms.append(sign * number)
    return sum(terms)


def expression_tokens(text: str) -> list[str]:
    """The numbers, operators and brackets of a well-formed expression; nothing is computed.

    Raises ValueError, worded for the model, unless it is numbers joined by `+ - * /`, signs and matched brackets.
    """
    if len(text) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(text)} characters; at most {MAX_EXPRESSION} are allowed")
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        raise ValueError("only digits and + - * / ( ) . are allowed")
    depth, want_number = 0, True
    for token in tokens:
        if token == "(":
            fits, depth = want_number, depth + 1
        elif token == ")":
            fits, depth = not want_number and depth > 0, depth - 1
        elif token in ("*", "/"):
            fits, want_number = not want_number, True
        elif token in ("+", "-"):
            fits, want_number = True, True
        else:
            fits, want_number = want_number, False
        if not fits:
            raise ValueError(f'"{token}" does not fit where it stands')
    if depth or want_number:
        raise ValueError("the expression is not finished")
    return tokens
