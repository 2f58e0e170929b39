"""Progress on a terminal: one bar a phase with counts, elapsed time and ETA. Without a terminal: plain lines.

A phase that ended keeps its bar until the next one starts, so that there are never more bars than nested phases; at
the end of the command the outermost phase's bar stays as a record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from quintain.trainer.progress import PhaseProgress, PlainProgress, Progress

if TYPE_CHECKING:
    from rich.progress import TaskID


class RichPhase:
    """One phase's bar; `advance` may be called from any thread, also by a straggler after the phase's end."""

    def __init__(self, progress: RichProgress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, n: int = 1) -> None:
        with suppress(KeyError):  # the bar of a phase that ended may be gone
            self._progress.bars.advance(self._task, n)

    def note(self, text: str) -> None:
        """A short text behind the bar (the latest loss, say)."""
        with suppress(KeyError):
            self._progress.bars.update(self._task, note=text)


class RichProgress:
    """Bars on stderr, so that stdout holds results only. Entered once, for the whole command."""

    def __init__(self) -> None:
        from rich.console import Console

        from quintain.recipes.bars import Bars

        self.bars = Bars(
            console=Console(stderr=True),
            refresh_per_second=4,
            speed_estimate_period=600.0,  # a step may take minutes; an ETA needs two of them
        )
        self._depth = 0
        self._ended: list[tuple[int, TaskID]] = []
        """Depth and bar of the phases that ended and are still shown."""

    def __enter__(self) -> RichProgress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_ended(min_depth=1)
        self.bars.stop()

    @contextmanager
    def phase(self, name: str, total: int | None = None, *, at_most: bool = False) -> Iterator[PhaseProgress]:
        """A bar that runs while the block does; without `total` it only shows that something goes on."""
        self._drop_ended()
        task = self.bars.add_task(name, total=total, note="", counted=total is not None, at_most=at_most)
        depth = self._depth
        self._depth += 1
        try:
            yield RichPhase(self, task)
            self._fill(task)
        finally:
            self._depth = depth
            self.bars.stop_task(task)
            self._ended.append((depth, task))

    def message(self, text: str) -> None:
        """A line above the bars."""
        self.bars.console.print(text, markup=False, highlight=False)

    def _fill(self, task: TaskID) -> None:
        done = next(shown.completed for shown in self.bars.tasks if shown.id == task)
        self.bars.update(task, total=done or 1, completed=done or 1)

    def _drop_ended(self, *, min_depth: int = 0) -> None:
        for ended in [ended for ended in self._ended if ended[0] >= min_depth]:
            self._ended.remove(ended)
            self.bars.remove_task(ended[1])


def make_progress() -> AbstractContextManager[Progress]:
    """Bars where stderr is a terminal, else plain lines."""
    return RichProgress() if sys.stderr.isatty() else nullcontext(PlainProgress())
