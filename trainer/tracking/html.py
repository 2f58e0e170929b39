"""A trajectory as an HTML fragment for Aim's Text explorer: badges, then the tokens as the policy saw and sampled them.

Aim shows HTML unsanitised, so *everything* that comes from a model, a tool or a task is escaped here. A sampled token
has a background by its probability, an underline by the policy version that sampled it, and a tooltip; a token that
was not sampled is grey where the template wrote it and dark where it is a message's content. About 100 bytes a token:
classes are short, and one `<style>` (scoped to `.qn`) comes with each fragment because Aim shows fragments one by
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from quintain.agents.outcome import StopReason
from quintain.agents.trajectory import TokenRow, Trajectory
from quintain.envs.message import Message
from quintain.trainer.tracking.html_style import NUM_VERSION_COLOURS, PROBABILITY_STEPS, STYLE
from quintain.trainer.tracking.layout import Section, sections_of, unseen_messages
from quintain.trainer.tracking.text import encodable, message_text, message_title, number, staleness
from quintain.trainer.tracking.token_text import Decode, Piece

_COLLAPSED = ("system", "template")  # the same in every trajectory of a run


def trajectory_html(
    trajectory: Trajectory,
    *,
    advantage: float,
    decode: Decode | None,
    policy_version: int,
    max_tokens: int,
    trained: bool = True,
) -> str:
    """The fragment: tokens by row, or plain messages where there is no row or no `decode`.

    `advantage` is NaN where the trajectory has none; `policy_version` is the learner's at the first optimizer step of
    the batch; of a row longer than `max_tokens` the middle is left out, with a note; `trained` False: left out of the
    loss.
    """
    trained = trained and trajectory.outcome.is_trainable and not math.isnan(advantage)
    parts = [STYLE, '<div class="qn">', _badges(trajectory, advantage, policy_version), _notes(trajectory)]
    if decode is None or not trajectory.rows:
        parts += [_message_html(message, "") for message in trajectory.messages]
    else:
        for index, row in enumerate(trajectory.rows):
            if len(trajectory.rows) > 1:
                parts.append(f"<h5>row {index + 1} of {len(trajectory.rows)}</h5>")
            left_out = _left_out(len(row.token_ids), max_tokens)
            for section in sections_of(trajectory, index, decode):
                parts.append(_section_html(section, row, left_out, trained=trained))
        note = "after the last turn, not seen by the policy"
        parts += [_message_html(message, note) for message in unseen_messages(trajectory)]
        parts.append(_legend(trajectory))
    return encodable("".join([*parts, "</div>"]))


def _badges(trajectory: Trajectory, advantage: float, policy_version: int) -> str:
    reward_kind = "bad" if math.isnan(trajectory.reward) else "good" if trajectory.success else "poor"
    end_kind = "bad" if trajectory.outcome.is_failure else ""
    advantage_kind = "" if math.isnan(advantage) or advantage == 0 else "good" if advantage > 0 else "poor"
    versions = sorted({v for row in trajectory.rows for v in row.policy_versions if v >= 0})
    span = "" if not versions else f" · policy v{versions[0]}" + (f"–v{versions[-1]}" if len(versions) > 1 else "")
    stale = staleness(trajectory, policy_version)
    num_tokens = sum(len(row.token_ids) for row in trajectory.rows)
    end = trajectory.outcome.value
    if trajectory.stop_reason is not StopReason.TERMINATED:
        end += f" · {trajectory.stop_reason.value}"
    badges = [
        (reward_kind, f"reward {number(trajectory.reward)}"),
        (advantage_kind, f"advantage {number(advantage, signed=True)}"),
        ("good" if trajectory.success else "poor", "success" if trajectory.success else "no success"),
        (end_kind, end),
        ("warn" if stale not in ("0", "none") else "", f"staleness {stale}{span}"),
        ("", f"{num_tokens} tokens, {trajectory.num_sampled_tokens} sampled"),
        ("", f"{len(trajectory.turns)} turn{'' if len(trajectory.turns) == 1 else 's'}"),
    ]
    spans = "".join(f'<span class="{kind}">{escape(text)}</span>' for kind, text in badges)
    return f'<div class="badges">{spans}</div>'


def _notes(trajectory: Trajectory) -> str:
    attempt = f" · attempt {trajectory.attempt + 1}" if trajectory.attempt else ""
    facts = f"task {trajectory.task_id} · draw {trajectory.draw} · member {trajectory.member}{attempt}"
    terms = "".join(f" · {name} {number(value)}" for name, value in trajectory.reward_terms.items())
    lines = [escape(facts + terms)]
    events = {name: count for name, count in trajectory.events.items() if count}
    if events:
        lines.append(escape(" · ".join(f"{name} ×{count}" for name, count in events.items())))
    html = f'<div class="facts">{"<br>".join(lines)}</div>'
    return html + (f'<div class="error">{escape(trajectory.error)}</div>' if trajectory.error else "")


def _left_out(num_tokens: int, max_tokens: int) -> range:
    """Tokens that are not shown: three quarters of the budget go to the head, a quarter to the tail."""
    if num_tokens <= max_tokens:
        return range(0)
    return range(max_tokens - max_tokens // 4, num_tokens - max_tokens // 4)


def _section_html(section: Section, row: TokenRow, left_out: range, *, trained: bool) -> str:
    shown = [pair for pair in zip(section.pieces, section.is_content, strict=True) if pair[0].start not in left_out]
    note = ""
    if left_out and any(piece.start == left_out.start or piece.end == left_out.start for piece in section.pieces):
        note = f"{len(left_out)} tokens left out here"
    if not shown and not note:
        return ""
    body = "".join(_piece_html(piece, is_content, row, trained=trained) for piece, is_content in shown)
    title = section.role if section.turn is None else f"{section.role} · turn {section.turn + 1}"
    return _box(section.role, title, note, body)


def _message_html(message: Message, note: str) -> str:
    return _box(message.role, message_title(message), note, f"<b>{escape(message_text(message))}</b>")


def _box(role: str, title: str, note: str, body: str) -> str:
    kind = role if role in ("system", "user", "assistant", "tool") else "template"
    open_mark = "" if role in _COLLAPSED and not note else " open"
    extra = f"<em>{escape(note)}</em>" if note else ""
    return f'<details class="{kind}"{open_mark}><summary>{escape(title)}{extra}</summary><pre>{body}</pre></details>'


def _piece_html(piece: Piece, is_content: bool, row: TokenRow, *, trained: bool) -> str:
    span = slice(piece.start, piece.end)
    ids = " ".join(map(str, row.token_ids[span]))
    text = escape(piece.text)
    if not row.sampled[piece.start]:
        tag = "b" if is_content else "i"
        line_break = ' class="n"' if piece.text.startswith("\n") else ""
        return f'<{tag}{line_break} title="id {ids} · mask 0">{text}</{tag}>'
    logprobs, versions = row.logprobs[span], row.policy_versions[span]
    version = versions[0]
    classes = f"p{_probability_class(logprobs)} v{version % NUM_VERSION_COLOURS}"
    classes += "" if trained else " x"
    classes += " n" if piece.text.startswith("\n") else ""
    shown = " ".join(f"{value:.3f}" for value in logprobs)
    mask = "mask 1" if trained else "sampled, mask 0"
    title = f"id {ids} · logprob {shown} · p {math.exp(sum(logprobs)):.2g} · v{version} · {mask}"
    return f'<s class="{classes}" title="{title}">{text}</s>'


def _probability_class(logprobs: Sequence[float]) -> int:
    """Index into PROBABILITY_STEPS by the least likely token of the piece; NaN counts as the least likely."""
    probability = min((0.0 if math.isnan(value) else math.exp(min(value, 0.0)) for value in logprobs), default=0.0)
    return next(index for index, (least, _, _) in enumerate(PROBABILITY_STEPS) if probability >= least)


def _legend(trajectory: Trajectory) -> str:
    versions = sorted({v for row in trajectory.rows for v in row.policy_versions if v >= 0})
    scale = "".join(f'<s class="p{index}">{name}</s>' for index, (_, _, name) in enumerate(PROBABILITY_STEPS))
    marks = "".join(f'<s class="v{version % NUM_VERSION_COLOURS}">v{version}</s>' for version in _few(versions))
    if not versions:
        return ""
    return (
        f'<div class="legend">probability {scale} sampled by {marks} <s class="x">not trained</s>'
        " <i>template</i> <b>not sampled</b></div>"
    )


def _few(versions: Sequence[int], most: int = 8) -> Iterable[int]:
    return versions if len(versions) <= most else [*versions[: most // 2], *versions[-most // 2 :]]
