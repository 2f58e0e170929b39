"""Our parsers against SGLang's own detectors, in SGLang's interpreter: same calls but for the differences listed."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from call_writers import write

from quintain.agents.tool_calls import FAMILIES, parser_for
from quintain.envs import ToolSpec

pytestmark = pytest.mark.sglang

DETECTORS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3",
    "mistral": "mistral",
    "glm": "glm45",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "kimi_k2": "kimi_k2",
    "harmony": "gpt-oss",
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "nested": {"type": "object"},
    },
}
NAMES = ("search", "write_file", "get-date")
NUM_CASES = 40
SCRIPT = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
asked = json.load(sys.stdin)
tools = [Tool(type="function", function=Function(name=n, parameters=asked["parameters"])) for n in asked["names"]]
found = []
def value(raw):
    try:
        return json.loads(raw)
    except ValueError:
        return raw
for detector, text in asked["texts"]:
    calls = FunctionCallParser.ToolCallParserEnum[detector]().detect_and_parse(text, tools).calls
    found.append([[call.name, value(call.parameters)] for call in calls])
print("FOUND" + json.dumps(found))
"""
TEXTS = (
    "plain",
    "Málaga 北京 😀",
    "two words",
    'a "quoted" word',
    "back\\slash",
    "C:\\new",
    "line\nbreak",
    "a, b: c",
    "[x]",
)

# family, text, our calls, SGLang's calls, why ours differ
DIFFERENCES: tuple[tuple[str, str, list[Any], list[Any], str], ...] = (
    (
        "hermes",
        write("hermes", [("search", {"text": "a </tool_call> b"})]),
        [["search", {"text": "a </tool_call> b"}]],
        [],
        "a closing mark inside of a string is text",
    ),
    (
        "hermes",
        write("hermes", [("serch", {"text": "x"})]),
        [["serch", {"text": "x"}]],
        [],
        "an unknown name is handed on, so that the environment can name the tools there are",
    ),
    (
        "hermes",
        f"<think>{write('hermes', [('search', {})])}</think>",
        [],
        [["search", {}]],
        "SGLang takes reasoning away before it looks for calls; here it is one step, and drafts are counted",
    ),
    (
        "qwen3_coder",
        write("qwen3_coder", [("search", {"text": "null"})]),
        [["search", {"text": "null"}]],
        [["search", {"text": None}]],
        "a string-typed parameter is text whatever it says",
    ),
    (
        "qwen3_coder",
        write("qwen3_coder", [("search", {"flag": "perhaps"})]),
        [["search", {"flag": "perhaps"}]],
        [["search", {"flag": False}]],
        "a word that is no boolean is refused by the environment, not read as false",
    ),
    (
        "deepseek_v32",
        write("deepseek_v32", [("search", {"text": " x "})]),
        [["search", {"text": " x "}]],
        [["search", {"text": "x"}]],
        "white space of a string is part of it",
    ),
    (
        "deepseek_v31",
        write("deepseek_v31", [("search", {"text": "<｜tool▁call▁end｜>"})]),
        [["search", {"text": "<｜tool▁call▁end｜>"}]],
        [],
        "a closing mark inside of a string is text",
    ),
    (
        "kimi_k2",
        write("kimi_k2", [("search", {"text": "a}<|tool_call_end|>"})]),
        [["search", {"text": "a}<|tool_call_end|>"}]],
        [["search", '{"text": "a}']],
        "a closing mark inside of a string is text",
    ),
)


def detect(python: Path, texts: list[tuple[str, str]]) -> list[list[Any]]:
    """SGLang's calls for each (family, text)."""
    asked = {
        "names": NAMES,
        "parameters": PARAMETERS,
        "texts": [(DETECTORS[family], _for_sglang(family, text)) for family, text in texts],
    }
    done = subprocess.run(
        [python, "-c", SCRIPT],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("FOUND")[2])


def _for_sglang(family: str, text: str) -> str:
    """SGLang gets gpt-oss's text with the start of the turn and with the stop token; ours gets neither."""
    return f"<|start|>assistant{text}<|call|>" if family == "harmony" else text


def ours(family: str, text: str) -> list[Any]:
    tools = [ToolSpec(name=name, description="A tool.", parameters=PARAMETERS) for name in NAMES]
    end_token = "<|call|>" if family == "harmony" else None
    reply = parser_for(family).parse(text, tools=tools, call_id_prefix="c", end_token=end_token)
    return [[call.name, json.loads(call.arguments)] for call in reply.message.tool_calls]


def generated() -> list[tuple[str, str]]:
    draw = random.Random(7)
    texts: list[tuple[str, str]] = []
    for _ in range(NUM_CASES):
        calls = []
        for _ in range(draw.randint(1, 3)):
            arguments = {
                "text": draw.choice(TEXTS),
                "count": draw.randint(-9, 9),
                "flag": draw.random() < 0.5,
                "nested": {"a": [1, {"b": draw.choice(TEXTS)}], "c": None},
            }
            keys = draw.sample(sorted(arguments), draw.randint(1, 4))
            calls.append((draw.choice(NAMES), {key: arguments[key] for key in keys}))
        texts += [(family, write(family, calls[:1] if family == "harmony" else calls)) for family in FAMILIES]
    return texts


def test_our_calls_are_sglangs_but_for_the_listed_differences(sglang_python: Path):
    same = generated()
    told = [(family, text) for family, text, *_ in DIFFERENCES]
    theirs = detect(sglang_python, same + told)
    differing = [
        (family, text, ours(family, text), found)
        for (family, text), found in zip(same, theirs, strict=False)
        if ours(family, text) != found
    ]
    assert differing == []
    assert len(same) == NUM_CASES * len(FAMILIES)
    for (family, text, mine, sglangs, why), found in zip(DIFFERENCES, theirs[len(same) :], strict=True):
        assert ours(family, text) == mine, why
        assert found == sglangs, (family, text, why)
