"""Progress on a terminal: one bar a phase with counts, elapsed time and ETA. Without a terminal: plain lines.

A phase that ends keeps its bar on the screen as a record; phases of one name (each step's rollouts, say) share a bar.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from quintain.trainer.progress import PhaseProgress, PlainProgress, Progress

if TYPE_CHECKING:
    from rich.progress import TaskID


class RichPhase:
    """One phase's bar; `advance` may be called from any thread."""

    def __init__(self, progress: RichProgress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, n: int = 1) -> None:
        self._progress.bars.advance(self._task, n)

    def note(self, text: str) -> None:
        """A short text behind the bar (the latest loss, say)."""
        self._progress.bars.update(self._task, note=text)


class RichProgress:
    """Bars on stderr, so that stdout holds results only. Entered once, for the whole command."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True),
            refresh_per_second=4,
            speed_estimate_period=600.0,  # a step may take minutes; an ETA needs two of them
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> RichProgress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[PhaseProgress]:
        """A bar that runs while the block does; without `total` it only shows that something goes on."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = self.bars.add_task(name, total=total, note="")
        else:
            self.bars.reset(task, total=total, note="")
        try:
            yield RichPhase(self, task)
        finally:
            if total is None:  # a finished phase of unknown length stops pulsing
                self.bars.update(task, total=1, completed=1)
            self.bars.stop_task(task)

    def message(self, text: str) -> None:
        """A line above the bars."""
        self.bars.console.print(text, markup=False, highlight=False)


def make_progress() -> AbstractContextManager[Progress]:
    """Bars where stderr is a terminal, else plain lines."""
    return RichProgress() if sys.stderr.isatty() else nullcontext(PlainProgress())
