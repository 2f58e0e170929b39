"""A token row as the sections that a reader expects: system, user, tool, assistant.

A row knows which tokens were sampled, but not where its messages begin; templates differ. Sampled runs are the turns.
In the runs between them each message's content is looked up in the decoded text, and the cut between two messages is
put before the line that opens the second one. Where a content can't be found (a template that rewrites it), the run
stays one section. Only for looking at: nothing here feeds training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quintain.agents.trajectory import TokenRow, Trajectory
from quintain.envs.message import Message
from quintain.trainer.tracking.token_text import Decode, Piece, pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Neighbouring pieces of one message."""

    role: str
    """`system`, `user`, `tool`, `assistant`, or `template` for what belongs to no message."""
    turn: int | None
    """The turn that sampled it; None where it was not sampled."""
    pieces: tuple[Piece, ...]
    is_content: tuple[bool, ...]  # one per piece: part of the message, not of the template around it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    role: str
    start: int
    end: int


def sections_of(trajectory: Trajectory, row_index: int, decode: Decode) -> list[Section]:
    """The sections of one row of a trajectory, in order; their pieces cover the row."""
    row = trajectory.rows[row_index]
    edges = _run_edges(row)
    pieces = pieces_of(row.token_ids, decode, edges=frozenset(edges))
    turns = [turn for turn in trajectory.turns if turn.completion.token_ids]
    turn = sum(_num_sampled_runs(earlier) for earlier in trajectory.rows[:row_index])
    sections: list[Section] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        run = [piece for piece in pieces if start <= piece.start < end]
        if row.sampled[start]:
            index = turns[turn].index if turn < len(turns) else turn
            sections.append(Section(role="assistant", turn=index, pieces=tuple(run), is_content=(True,) * len(run)))
            turn += 1
        elif number == 0:
            sections += _unsampled(run, _messages_before(trajectory, turn), is_prompt=True)
        else:
            observation = turns[turn - 1].observation if 0 < turn <= len(turns) else ()
            sections += _unsampled(run, observation, is_prompt=False)
    return sections


def unseen_messages(trajectory: Trajectory) -> tuple[Message, ...]:
    """What the environment answered after the last generation: it is in no row."""
    return trajectory.turns[-1].observation if trajectory.turns else ()


def _run_edges(row: TokenRow) -> list[int]:
    inner = [t for t in range(1, len(row.sampled)) if row.sampled[t] != row.sampled[t - 1]]
    return [0, *inner, len(row.sampled)] if row.sampled else []


def _num_sampled_runs(row: TokenRow) -> int:
    return sum(row.sampled[start] for start in _run_edges(row)[:-1])


def _messages_before(trajectory: Trajectory, turn: int) -> list[Message]:
    """The conversation up to the generation of `turn`."""
    before: list[Message] = []
    for message in trajectory.messages:
        if message.role == "assistant":
            if turn == 0:
                break
            turn -= 1
        before.append(message)
    return before


def _unsampled(run: list[Piece], messages: Sequence[Message], *, is_prompt: bool) -> list[Section]:
    text = "".join(piece.text for piece in run)
    found = _find(text, messages)
    if not found:
        roles = list(dict.fromkeys(message.role for message in messages))
        return [
            Section(role=" + ".join(roles) or "template", turn=None, pieces=tuple(run), is_content=(False,) * len(run))
        ]
    cuts = [0, *(_cut(text, a.end, b.start) for a, b in pairwise(found)), len(text)]
    sections: list[Section] = []
    opening = _cut(text, 0, found[0].start) if is_prompt else 0
    if opening:  # the template's own words before the first message, the tool list say
        sections.append(_section(run, 0, opening, None))
        cuts[0] = opening
    sections += [
        _section(run, start, end, message) for (start, end), message in zip(pairwise(cuts), found, strict=True)
    ]
    return [section for section in sections if section.pieces]


def _find(text: str, messages: Sequence[Message]) -> list[_Found]:
    found: list[_Found] = []
    position = 0
    for message in messages:
        content = message.content.strip()
        start = text.find(content, position) if content else -1
        if start >= 0:
            position = start + len(content)
            found.append(_Found(role=message.role, start=start, end=position))
    return found


def _cut(text: str, start: int, end: int) -> int:
    """Where, between two contents, the second message begins: before the line that the content follows."""
    last = text.rfind("\n", start, end)
    line = text.rfind("\n", start, last) if last >= 0 else -1
    return line + 1 if line >= 0 else start


def _section(run: list[Piece], start: int, end: int, message: _Found | None) -> Section:
    """The pieces that begin in characters `[start, end)` of the run."""
    chosen: list[Piece] = []
    is_content: list[bool] = []
    offset = 0
    for piece in run:
        if start <= offset < end:
            chosen.append(piece)
            after = offset + len(piece.text)
            is_content.append(message is not None and offset < message.end and after > message.start)
        offset += len(piece.text)
    role = "template" if message is None else message.role
    return Section(role=role, turn=None, pieces=tuple(chosen), is_content=tuple(is_content))
