"""Calls as the models of each family write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


def write(family: str, calls: Calls, *, later: bool = False) -> str:
    """`later`: other text stands before the calls, so a family that may leave out its mark must write it."""
    return ("<|python_tag|>" if later and family == "llama3" else "") + WRITERS[family](calls)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _dump(value)


def _each(form: Callable[[str, dict[str, Any], int], str], *, before: str = "", between: str = "\n", after: str = ""):
    return lambda calls: before + between.join(form(n, a, i) for i, (n, a) in enumerate(calls)) + after


def _qwen3_coder(name: str, arguments: dict[str, Any], index: int) -> str:
    values = "".join(f"<parameter={k}>\n{_raw(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any], index: int) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_raw(v)}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _dsml(name: str, arguments: dict[str, Any], index: int) -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{_raw(v)}</｜DSML｜parameter>\n'
        for k, v in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>'


_DEEPSEEK = {"before": "<｜tool▁calls▁begin｜>", "after": "<｜tool▁calls▁end｜>"}

WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _each(lambda n, a, i: f'<tool_call>\n{{"name": {_dump(n)}, "arguments": {_dump(a)}}}\n</tool_call>'),
    "qwen3_coder": _each(_qwen3_coder),
    "llama3": _each(lambda n, a, i: f'{{"name": {_dump(n)}, "parameters": {_dump(a)}}}', between="; "),
    "mistral": _each(
        lambda n, a, i: f'{{"name": {_dump(n)}, "arguments": {_dump(a)}}}',
        before="[TOOL_CALLS] [",
        between=", ",
        after="]",
    ),
    "glm": _each(_glm),
    "deepseek_v3": _each(
        lambda n, a, i: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_dump(a)}\n```<｜tool▁call▁end｜>",
        **_DEEPSEEK,
    ),
    "deepseek_v31": _each(
        lambda n, a, i: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_dump(a)}<｜tool▁call▁end｜>", between="", **_DEEPSEEK
    ),
    "deepseek_v32": _each(_dsml, before="<｜DSML｜function_calls>\n", after="\n</｜DSML｜function_calls>"),
    "kimi_k2": _each(
        lambda n, a, i: f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{_dump(a)}<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        between="",
        after="<|tool_calls_section_end|>",
    ),
    "harmony": _each(
        lambda n, a, i: f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_dump(a)}",
        between="<|call|><|start|>assistant",
    ),
}
