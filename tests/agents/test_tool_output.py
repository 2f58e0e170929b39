"""Cutting tool results to tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_chat import CHATML, renderer, tokenizer

from quintain.agents.renderer import ChatRenderer


@pytest.mark.parametrize("limit", [16, 64, 256])
@pytest.mark.parametrize("text", ["北京" * 1000, "😀" * 500, "having a quick brown fox\n" * 200, "e\u0301" * 900])
def test_a_long_result_is_cut_in_tokens_around_a_marker_and_no_character_is_halved(text: str, limit: int):
    """A16"""
    chat = renderer()
    cut, num_cut = chat.cut_tokens(text, limit)
    assert num_cut > 0 and len(chat.encode_plain(cut)) <= limit
    assert "\ufffd" not in cut and "..." in cut
    head, tail = cut[: cut.index("\n")], cut[cut.rindex("\n") + 1 :]
    assert text.startswith(head) and text.endswith(tail)


def test_the_marker_says_how_much_is_missing():
    """A16"""
    chat = ChatRenderer(tokenizer(CHATML, byte_only=True))
    cut, num_cut = chat.cut_tokens("x" * 1000, 100)
    assert f"[... {1000 - 100} tokens cut ...]" in cut
    assert num_cut == 1000 - cut.count("x")


def test_a_result_within_the_limit_is_left_alone():
    """A16"""
    assert renderer().cut_tokens("having", 8) == ("having", 0)


@given(st.text(max_size=300), st.integers(8, 40))
@settings(max_examples=150, deadline=None)
def test_every_cut_text_fits_and_is_made_of_the_texts_own_ends(text: str, limit: int):
    """A16"""
    chat = renderer()
    cut, num_cut = chat.cut_tokens(text, limit)
    assert len(chat.encode_plain(cut)) <= limit or not num_cut
    assert num_cut or cut == text


def test_lone_surrogates_in_a_result_do_not_raise():
    chat = renderer()
    assert chat.decode(chat.encode_plain("a\ud800b")) == "a?b"
    assert chat.cut_tokens("\ud800" * 100, 8)[1] > 0
