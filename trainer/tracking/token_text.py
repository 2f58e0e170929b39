"""Token ids to pieces of text that can be shown one by one.

Decoding ids singly turns a character that spans several tokens into replacement characters, and lets SentencePiece
drop spaces. So each piece is what the text *grows by* when its tokens are appended, and tokens are joined until that
growth is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, control tokens kept: `lambda ids: tokenizer.decode(ids, skip_special_tokens=False)`."""

_MOST_JOINED = 4  # a UTF-8 character has at most four bytes, so at most four tokens
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens `[start, end)` of a row and the text that they make; mostly one token."""

    start: int
    end: int
    text: str


def pieces_of(token_ids: Sequence[int], decode: Decode, *, edges: Set[int] = frozenset()) -> list[Piece]:
    """The row as pieces whose texts, joined, are the row's text. No piece crosses an index in `edges`."""
    pieces: list[Piece] = []
    before, start = 0, 0
    for end in range(1, len(token_ids) + 1):
        text = _growth(token_ids, before, start, end, decode)
        must_end = end == len(token_ids) or end in edges or end - start >= _MOST_JOINED
        if text.endswith(_REPLACEMENT) and not must_end:
            continue
        pieces.append(Piece(start=start, end=end, text=text))
        before, start = start, end
    return pieces


def _growth(token_ids: Sequence[int], before: int, start: int, end: int, decode: Decode) -> str:
    """What tokens `[start, end)` add to the text of `[before, start)`."""
    prefix = decode(token_ids[before:start]) if start > before else ""
    whole = decode(token_ids[before:end])
    if prefix.endswith(_REPLACEMENT) or not whole.startswith(prefix):  # half a character is no context
        return decode(token_ids[start:end])
    return whole[len(prefix) :]


class CachedDecode:
    """A `Decode` that remembers short inputs: rows repeat the same few pairs of tokens."""

    _MOST_ENTRIES = 50_000

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[tuple[int, ...], str] = {}

    def __call__(self, token_ids: Sequence[int]) -> str:
        key = tuple(token_ids)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= self._MOST_ENTRIES:
                self._texts.clear()
            text = self._texts[key] = self._decode(list(key))
        return text
