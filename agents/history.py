"""Whether a template leaves earlier turns as they were when new messages come: the prefix rule, on frames.

Works on shapes, so that one answer holds for every conversation of the same form; answers are cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintain.agents.template import ChatTemplate, Frame, Hole, Shape, TemplateError, skeleton
from quintain.envs.message import Message, ToolSpec

_MAX_CACHED = 65536


class HistoryCheck:
    """Finds what a template rewrites. Used by one thread at a time."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[Shape, str | None] = {}

    def find_break(
        self,
        history: Sequence[Message],
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        as_sampled: bool,
    ) -> str | None:
        """What is rewritten, with the remedy; None where nothing is.

        `history` ends with the last reply as the template knows it; `reply` is that reply as it was sampled.
        `as_sampled`: replies stand in the history as sampled text, not taken apart.
        """
        shapes = [self._template.plan(message)[0] for message in (*history, *new)]
        key = (self._template.tools_key(tools), len(history), as_sampled, *shapes)
        if key not in self._known:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            if as_sampled:
                shape = self._template.plan(reply)[0]
                self._known[key] = self._break_of_text(shapes, len(history), shape, tools)
            else:
                self._known[key] = self._break_of_parts(shapes, len(history), tools)
        return self._known[key]

    def _break_of_text(
        self, shapes: Sequence[Shape], num_history: int, reply: Shape, tools: Sequence[ToolSpec]
    ) -> str | None:
        before = self._template.frame_of(shapes[: num_history - 1], tools, generation=True)
        first = sum(_num_holes(shape) for shape in shapes[: num_history - 1])
        holes = iter(range(first, first + _num_holes(reply)))
        sampled = [segment if segment is not None else Hole(next(holes)) for segment in reply[1]]
        rendered = skeleton(self._template.frame_of(shapes, tools, generation=True))
        return _difference(skeleton([*before, *sampled]), rendered)

    def _break_of_parts(self, shapes: Sequence[Shape], num_history: int, tools: Sequence[ToolSpec]) -> str | None:
        """The prompt must stay, the reply as the template writes it at the end, and all of the reply's text."""
        before = skeleton(self._template.frame_of(shapes[: num_history - 1], tools, generation=True))
        alone = skeleton(self._template.frame_of(shapes[:num_history], tools, generation=False))
        rendered = skeleton(self._template.frame_of(shapes, tools, generation=True))
        first = sum(_num_holes(shape) for shape in shapes[: num_history - 1])
        texts = [skeleton([Hole(first + index)]) for index in range(_num_holes(shapes[num_history - 1]))]
        left_out = next((text for text in texts if text not in rendered), None)
        dropped = None if left_out is None else _difference(f"{before}{left_out}", rendered)
        return _difference(before, rendered) or _difference(alone, rendered) or dropped


def last_hole(frame: Sequence[str | Hole], index: int) -> int:
    """Where the hole number `index` stands for the last time. Raises TemplateError where it is missing."""
    for position in range(len(frame) - 1, -1, -1):
        part = frame[position]
        if isinstance(part, Hole) and part.index == index:
            return position
    raise TemplateError("the chat template leaves out the text of an assistant message")


def sampled_after(frame: Frame, mark: str, ends: Sequence[str]) -> Frame:
    """The frame from the first end of turn behind the last `mark` on."""
    for position in range(len(frame) - 1, -1, -1):
        part = frame[position]
        if isinstance(part, str) and mark in part:
            start = part.rindex(mark)
            found = [at for end in ends if end and (at := part.find(end, start)) >= 0]
            return (part[min(found) :] if found else part[start + len(mark) :], *frame[position + 1 :])
    raise TemplateError("the chat template leaves out the arguments of a tool call")


def _difference(expected: str, rendered: str) -> str | None:
    if rendered.startswith(expected):
        return None
    at = next((i for i, (a, b) in enumerate(zip(expected, rendered, strict=False)) if a != b), len(rendered))
    return (
        f"the chat template rewrites earlier turns: the row has {expected[max(0, at - 20) : at + 20]!r} where the "
        f"template now writes {rendered[max(0, at - 20) : at + 20]!r}; set rollout.history to `append` (keep the "
        "sampled tokens) or `fork` (one row a turn)"
    )


def _num_holes(shape: Shape) -> int:
    return sum(segment is None for segment in (*shape[1], *(shape[5] or ()))) + bool(shape[2])
