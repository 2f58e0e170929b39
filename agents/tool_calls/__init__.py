"""Tool calls in sampled text: one parser a family of models, all with the same rules (see `scan`)."""

from quintain.agents.tool_calls.families import FAMILIES, detect_family, parser_for
from quintain.agents.tool_calls.reply import THINK_CLOSE, THINK_OPEN, ParsedReply, ToolCallParser

__all__ = [
    "FAMILIES",
    "THINK_CLOSE",
    "THINK_OPEN",
    "ParsedReply",
    "ToolCallParser",
    "detect_family",
    "parse_reply",
    "parser_for",
]

parse_reply = parser_for("hermes").parse
