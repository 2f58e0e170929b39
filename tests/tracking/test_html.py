"""A trajectory as HTML and as text: right tokens, right marks, nothing executable."""

from __future__ import annotations

import html as html_module
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from constructed import TOKENS, row_of, trajectory

from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.trajectory import TokenRow, Trajectory
from quintain.envs.message import Message
from quintain.trainer.tracking.html import trajectory_html
from quintain.trainer.tracking.layout import sections_of
from quintain.trainer.tracking.text import trajectory_text
from quintain.trainer.tracking.token_text import CachedDecode, pieces_of


class _Elements(HTMLParser):
    """Every element with its attributes, and the visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(re.sub(r"<style>.*?</style>", "", page))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def tokens(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag and "title" in attributes]


def page_of(shown: Trajectory, **changes: Any) -> str:
    options = {"advantage": 0.5, "decode": TOKENS.decode, "policy_version": 4, "max_tokens": 2000} | changes
    return trajectory_html(shown, **options)


def test_every_token_is_shown_once_with_its_id_logprob_version_and_mask() -> None:
    shown = trajectory()
    row = shown.rows[0]
    page = _Elements(page_of(shown))
    sampled = page.tokens("s")
    others = page.tokens("b") + page.tokens("i")

    assert len(sampled) == sum(row.sampled)
    assert len(others) == len(row.token_ids) - sum(row.sampled)
    index = row.sampled.index(True)
    title = sampled[0]["title"] or ""
    assert f"id {row.token_ids[index]} " in title
    assert f"logprob {row.logprobs[index]:.3f}" in title
    assert "v3" in title and "mask 1" in title
    assert all("mask 0" in (token["title"] or "") for token in others)
    assert TOKENS.decode(row.token_ids) in page.text.replace("\n", "") or all(
        line in page.text for line in TOKENS.decode(row.token_ids).splitlines()
    )


def test_the_badges_say_reward_advantage_end_staleness_tokens_and_turns() -> None:
    text = _Elements(page_of(trajectory(), policy_version=5)).text

    for badge in ("reward 1.000", "advantage +0.500", "success", "completed", "staleness 2 · policy v3–v4", "2 turns"):
        assert badge in text
    assert "96 tokens" in text or "tokens, " in text
    limit = replace(trajectory(reward=0.0, outcome=Outcome.TRUNCATED), stop_reason=StopReason.MAX_TURNS)
    assert "truncated · max_turns" in _Elements(page_of(limit)).text


def test_a_failed_trajectory_shows_its_error_and_no_token_as_trained() -> None:
    broken = trajectory(reward=math.nan, outcome=Outcome.INFRASTRUCTURE, error="box <b>died</b>")
    page = page_of(broken, advantage=math.nan)
    parsed = _Elements(page)

    assert "box <b>died</b>" in parsed.text
    assert "reward none" in parsed.text and "infrastructure · sandbox_died" in parsed.text
    assert all("sampled, mask 0" in (token["title"] or "") for token in parsed.tokens("s"))


def test_a_trajectory_that_is_left_out_of_the_loss_is_marked() -> None:
    parsed = _Elements(page_of(trajectory(outcome=Outcome.TRUNCATED), trained=False))

    assert all("x" in (token["class"] or "").split() for token in parsed.tokens("s"))


@pytest.mark.parametrize("where", ["question", "expression", "tool_result", "answer", "error", "reward_term"])
def test_text_from_outside_stays_text(where: str) -> None:
    """Aim shows HTML unsanitised: markup from a task, a model, a tool or an error must not become an element."""
    hostile = '<img src=x onerror="alert(1)"></pre><script>alert(2)</script>\'"&lt;'
    if where == "error":
        shown = trajectory(outcome=Outcome.ENVIRONMENT, reward=math.nan, error=hostile)
    elif where == "reward_term":
        shown = replace(trajectory(), reward_terms={hostile: 1.0}, task_id=hostile, events={hostile: 1})
    else:
        changed: dict[str, Any] = {where: hostile}
        shown = trajectory(**changed)
    harmless = _Elements(page_of(trajectory()))
    for decode in (TOKENS.decode, None):
        parsed = _Elements(page_of(shown, decode=decode))
        assert {name for name, _ in parsed.elements} <= {name for name, _ in harmless.elements} | {"br"}
        assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    assert hostile in _Elements(page_of(shown)).text


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    """A12"""
    shown = trajectory(answer="😀 é 北京")
    row = shown.rows[0]
    parsed = _Elements(page_of(shown))

    assert "😀 é 北京" in parsed.text
    assert "\ufffd" not in parsed.text
    titles = [token["title"] or "" for token in parsed.tokens("s")]
    assert any(title.startswith("id 240 159 152 128 · logprob ") for title in titles)
    assert shown.rows[0].token_ids == row.token_ids


def test_pieces_joined_are_the_text_whatever_the_bytes() -> None:
    """A12"""
    text = "a😀b é\n北京 answer"
    ids = TOKENS.encode(text)

    assert "".join(piece.text for piece in pieces_of(ids, TOKENS.decode)) == text
    broken = [240, 159, 97, 255, 255, 255, 255, 255, 98, 240]
    pieces = pieces_of(broken, CachedDecode(TOKENS.decode))
    assert [(pieces[0].start, pieces[-1].end)] == [(0, len(broken))]
    assert all(a.end == b.start for a, b in pairwise(pieces))
    edge = pieces_of(TOKENS.encode("😀"), TOKENS.decode, edges=frozenset({2}))
    assert [(piece.start, piece.end) for piece in edge] == [(0, 2), (2, 4)]


def test_tokens_that_lose_their_space_alone_keep_it_in_context() -> None:
    """SentencePiece drops the space of the first token that it decodes."""
    words = ["▁The", "▁answer", "▁is"]

    def decode(ids: Any) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert [piece.text for piece in pieces_of([0, 1, 2], decode)] == ["The", " answer", " is"]


def test_messages_of_the_prompt_get_their_roles() -> None:
    shown = trajectory()
    sections = sections_of(shown, 0, TOKENS.decode)

    assert [(section.role, section.turn) for section in sections] == [
        ("system", None),
        ("user", None),
        ("assistant", 0),
        ("tool", None),
        ("assistant", 1),
    ]
    user = "".join(piece.text for piece in sections[1].pieces)
    assert user == "<|im_start|>user\nWhat is 37 plus 48?<|im_end|>\n<|im_start|>assistant\n"
    content = [p.text for p, is_content in zip(sections[1].pieces, sections[1].is_content, strict=True) if is_content]
    assert "".join(content) == "What is 37 plus 48?"
    covered = [t for section in sections for piece in section.pieces for t in range(piece.start, piece.end)]
    assert covered == list(range(len(shown.rows[0].token_ids)))


def test_rows_of_a_forked_trajectory_keep_their_turns() -> None:
    whole = trajectory()
    first = row_of(whole.turns[:1])
    second = whole.rows[0]
    num_before = len(second.token_ids) - len(whole.turns[1].completion.token_ids)
    second = TokenRow(
        token_ids=second.token_ids,
        sampled=(False,) * num_before + second.sampled[num_before:],
        logprobs=(math.nan,) * num_before + second.logprobs[num_before:],
        policy_versions=(-1,) * num_before + second.policy_versions[num_before:],
    )
    forked = replace(whole, rows=(first, second))

    assert [s.turn for s in sections_of(forked, 0, TOKENS.decode) if s.turn is not None] == [0]
    roles = [(s.role, s.turn) for s in sections_of(forked, 1, TOKENS.decode)]
    assert roles[-1] == ("assistant", 1)
    assert [role for role, _ in roles][:2] == ["system", "user"]
    assert "row 2 of 2" in _Elements(page_of(forked)).text


def test_the_last_observation_is_shown_though_no_token_of_it_was_seen() -> None:
    whole = trajectory()
    cut = replace(whole, turns=whole.turns[:1], rows=(row_of(whole.turns[:1]),), messages=whole.messages[:4])

    assert "not seen by the policy" in _Elements(page_of(cut)).text


def test_a_long_trajectory_keeps_head_and_tail_and_says_what_is_missing() -> None:
    long = trajectory(tool_result="0123456789" * 100)
    parsed = _Elements(page_of(long, max_tokens=100))
    num_tokens = len(long.rows[0].token_ids)
    shown = len(parsed.tokens("s")) + len(parsed.tokens("b")) + len(parsed.tokens("i"))

    assert shown == 100
    assert f"{num_tokens - 100} tokens left out here" in parsed.text
    assert "The answer is 85." in parsed.text


def test_a_page_takes_about_a_hundred_bytes_a_token() -> None:
    long = trajectory(tool_result="0123456789" * 20, answer="The answer is 85. " * 40)
    page = page_of(long)

    assert len(page.encode()) / len(long.rows[0].token_ids) < 110


def test_nothing_sampled_and_nothing_said_still_has_a_page() -> None:
    empty = replace(
        trajectory(outcome=Outcome.CANCELLED, reward=math.nan),
        turns=(),
        rows=(),
        messages=(),
        stop_reason=StopReason.CANCELLED,
    )

    assert "staleness none" in _Elements(page_of(empty, advantage=math.nan)).text


def test_the_transcript_is_plain_and_searchable() -> None:
    text = trajectory_text(trajectory(), advantage=-0.25, policy_version=5, max_tokens=2000)

    assert text.splitlines()[0] == (
        "task=train-17 draw=7 member=0 reward=1.000 advantage=-0.250 success=true outcome=completed stop=terminated "
        "staleness=2 sampled_tokens=46 turns=2"
    )
    assert '-> calculator({"expression": "37+48"})' in text
    assert "[tool calculator]\n85" in text
    assert html_module.escape(text) != text  # plain, not HTML
    cut = trajectory_text(trajectory(tool_result="x" * 10_000), advantage=0.0, policy_version=5, max_tokens=16)
    assert len(cut) < 200 and "characters more" in cut


def test_reasoning_is_part_of_the_transcript() -> None:
    shown = replace(trajectory(), messages=(Message(role="assistant", content="5", reasoning="2+3"),))

    assert "(reasoning) 2+3\n5" in trajectory_text(shown, advantage=0.0, policy_version=4, max_tokens=100)


def test_half_a_surrogate_pair_from_a_json_escape_does_not_stop_the_page() -> None:
    shown = replace(trajectory(), messages=(Message(role="assistant", content="a\ud800b"),), error="\ud800")

    assert "a?b" in page_of(shown, decode=None)
    page_of(shown).encode()
    assert "a?b" in trajectory_text(shown, advantage=0.0, policy_version=4, max_tokens=100)
