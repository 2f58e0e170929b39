"""Text to token ids and back through a fast tokenizer: template text with control tokens on, other people's text off.

Nothing is added that the text does not hold: no BOS, no prefix space. It knows no messages: `renderer.py` does.
"""

from __future__ import annotations

import json

from tokenizers import Encoding, Tokenizer

from quintain.agents.tool_output import cut_to_tokens

_MAX_CACHED = 65536


class TokenText:
    """One tokenizer's two ways to encode. Cheap to call, used by one thread at a time."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._plain = _without_added_tokens(backend)
        self.control_ids = frozenset(backend.get_added_tokens_decoder())
        """Ids that plain text never becomes."""
        self._piece_ids: dict[str, tuple[int, ...]] = {}

    def decode(self, token_ids: list[int]) -> str:
        """The text of a span, control tokens written out."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def control_id(self, token: str) -> int | None:
        """The id of a control token; None where the vocabulary has no such token."""
        found = self._backend.token_to_id(token)
        return found if found in self.control_ids else None

    def text_of(self, token_id: int) -> str:
        """A token's own text."""
        return self._backend.id_to_token(token_id) or ""

    def piece(self, text: str) -> tuple[int, ...]:
        """Ids of text that may hold control tokens; cached."""
        ids = self._piece_ids.get(text)
        if ids is None:
            if len(self._piece_ids) >= _MAX_CACHED:
                self._piece_ids.clear()
            encoding = self._backend.encode(_encodable(text), add_special_tokens=False)
            ids = self._piece_ids[text] = tuple(encoding.ids)
        return ids

    def plain(self, text: str) -> tuple[int, ...]:
        """Text of others: control tokens in it are spelled out letter by letter, never control ids."""
        ids = tuple(self._plain_encoding(text).ids)
        if self.control_ids.isdisjoint(ids):
            return ids
        # Some vocabularies hold their control tokens as ordinary words too; single characters never match those.
        return tuple(i for char in text for i in self._plain_encoding(char).ids if i not in self.control_ids)

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        """`text` within `max_tokens`, and the number of tokens left out (see `cut_to_tokens`)."""
        if len(text.encode(errors="replace")) <= max_tokens:  # a token is at least one byte
            return text, 0
        return cut_to_tokens(_encodable(text), max_tokens, lambda part: self._plain_encoding(part).offsets)

    def _plain_encoding(self, text: str) -> Encoding:
        return self._plain.encode(_encodable(text), add_special_tokens=False)


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """The same vocabulary and merges, but control and other added tokens are ordinary text to it."""
    state = json.loads(backend.to_str())
    state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state))


def _encodable(text: str) -> str:
    """Lone surrogates (a model can write them as JSON escapes) have no UTF-8 form; they become `?`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
