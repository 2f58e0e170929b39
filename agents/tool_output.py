"""Cutting text to a number of *tokens*: head and tail stay around a marker, and no character is ever halved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARKERS = ("\n[... {} tokens cut ...]\n", "\n...\n")
"""The first one that takes at most half of the limit is used; else none."""

Spans = Sequence[tuple[int, int]]


def cut_to_tokens(text: str, max_tokens: int, token_spans: Callable[[str], Spans]) -> tuple[str, int]:
    """`text` in at most `max_tokens` tokens, and how many tokens were left out (0: unchanged).

    `token_spans` gives the character range of each token of a text; tokens that share a character have equal ranges.
    """
    spans = token_spans(text)
    excess = len(spans) - max_tokens
    if excess <= 0:
        return text, 0
    marker, marker_tokens = _marker(excess, max_tokens, token_spans)
    keep = max_tokens - marker_tokens
    while True:
        head, tail = keep - keep // 2, keep // 2
        start = _char_border(spans, head, up=False)
        end = _char_border(spans, len(spans) - tail, up=True) if tail else len(text)
        cut = text[:start] + marker + text[end:]
        over = len(token_spans(cut)) - max_tokens
        if over <= 0 or keep == 0:
            return cut, len(spans) - head - tail
        # Tokens may join differently across the borders, so the sum of the parts is only an estimate.
        keep = max(0, keep - over)


def _marker(num_cut: int, max_tokens: int, token_spans: Callable[[str], Spans]) -> tuple[str, int]:
    for template in MARKERS:
        marker = template.format(num_cut)
        num_tokens = len(token_spans(marker))
        if num_tokens <= max_tokens // 2:
            return marker, num_tokens
    return "", 0


def _char_border(spans: Spans, token: int, *, up: bool) -> int:
    """The character where `token` starts; inside of a character: its start, or with `up` its end."""
    if token >= len(spans):
        return spans[-1][1]
    start = spans[token][0]
    inside = token > 0 and spans[token - 1][1] > start
    return spans[token][1] if up and inside else start
