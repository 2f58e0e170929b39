"""How the bars look: one line a phase, readable on 80 columns.

    steps            12/40 3:05 ETA 7:11 ━━━━━━━╺━━━━━━━ reward 0.713 success 0.75

Numbers are never cut. Where the terminal is narrow the bar shrinks, then goes; then the note is cut, with an ellipsis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import Progress, Task
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

BAR_WIDTHS = (8, 24)
"""The narrowest and the widest bar, in columns; with less room than the narrowest there is none."""

LEAST_WIDTHS = (14, 7, 4, 8)
"""Of name, count, elapsed and left: with these, bars seldom jump sideways when another phase starts."""


class Bars(Progress):
    """Tasks need the fields `note` (str), `counted` (False: no count to show) and `at_most` (the total is a cap)."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Rows(self.tasks)


class _Rows:
    """The tasks as a table, laid out for the width that there is when it is drawn."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tasks = self._tasks
        rows = [(task.description, _count(task), _duration(task.elapsed), _left(task)) for task in tasks]
        notes = [str(task.fields["note"]) for task in tasks]
        widths = [max([least, *(len(row[place]) for row in rows)]) for place, least in enumerate(LEAST_WIDTHS)]
        room = options.max_width - sum(width + 1 for width in widths)
        note_width = max((len(note) for note in notes), default=0)
        bar_width = min(room - note_width - 1, BAR_WIDTHS[1])
        with_bar = bar_width >= BAR_WIDTHS[0]
        note_width = max(1, min(note_width, room))

        columns = [Column(no_wrap=True, width=width) for width in widths]
        columns[1].justify = columns[2].justify = "right"
        columns += [Column(width=bar_width)] if with_bar else []
        table = Table.grid(*columns, Column(no_wrap=True, width=note_width), padding=(0, 1, 0, 0), pad_edge=False)
        for task, row, note in zip(tasks, rows, notes, strict=True):
            styles = ("", "progress.download", "progress.elapsed", "progress.remaining")
            cells = [Text(text, style=style) for text, style in zip(row, styles, strict=True)]
            bar = [_bar(task, bar_width)] if with_bar else []
            table.add_row(*cells, *bar, Text(note, overflow="ellipsis"))
        yield table


def _bar(task: Task, width: int) -> ProgressBar:
    return ProgressBar(total=task.total, completed=task.completed, width=width, animation_time=task.get_time())


def _count(task: Task) -> str:
    if task.total is None or not task.fields["counted"]:
        return ""
    total = f"{task.total:.0f}"
    return f"{task.completed:>{len(total)}.0f}/{total}"


def _left(task: Task) -> str:
    if task.total is None or task.stop_time is not None:
        return ""
    text = "-:--" if task.time_remaining is None else _duration(task.time_remaining)
    return f"{'at most' if task.fields['at_most'] else 'ETA'} {text}"


def _duration(seconds: float | None) -> str:
    minutes, left = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
