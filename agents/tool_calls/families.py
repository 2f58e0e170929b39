"""Which parser reads which family of models, and which family a tokenizer belongs to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from quintain.agents.tool_calls.harmony import HarmonyParser
from quintain.agents.tool_calls.json_grammars import DEEPSEEK_V3, DEEPSEEK_V31, HERMES, KIMI_K2, LLAMA3, MISTRAL
from quintain.agents.tool_calls.reply import ToolCallParser
from quintain.agents.tool_calls.scan import MarkedParser
from quintain.agents.tool_calls.xml_grammars import DEEPSEEK_V32, GLM, QWEN3_CODER

_GRAMMARS = (
    HERMES,
    QWEN3_CODER,
    LLAMA3,
    MISTRAL,
    GLM,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    KIMI_K2,
)
_PARSERS: Final[dict[str, ToolCallParser]] = {
    **{grammar.family: MarkedParser(grammar) for grammar in _GRAMMARS},
    "harmony": HarmonyParser(),
}
FAMILIES = tuple(_PARSERS)

# The first mark that a template (or, failing that, the vocabulary) has decides. Templates come first, for many are
# written for another family's vocabulary.
_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("｜DSML｜", "deepseek_v32"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|channel|>", "harmony"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
)


def parser_for(family: str) -> ToolCallParser:
    """The parser of a family. Raises ValueError, with the names there are, for any other."""
    parser = _PARSERS.get(family)
    if parser is None:
        raise ValueError(f'there is no tool-call family "{family}"; choose one of: {", ".join(FAMILIES)}')
    return parser


def detect_family(chat_template: str, added_tokens: Collection[str]) -> str:
    """The family whose calls the template writes, or for which the vocabulary has marks; `hermes` if there are none."""
    for text in (chat_template, "\n".join(added_tokens)):
        for mark, family in _MARKS:
            if mark in text:
                return "deepseek_v3" if family == "deepseek_v31" and "```json" in chat_template else family
    return "hermes"
