"""Showing how far a run is: the `Progress` protocol and its plain form, lines of text with an ETA.

Invariants: `advance` may be called from any thread; showing progress never raises out of a phase and never decides
anything. The form with bars is in `recipes/progress.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO


class PhaseProgress(Protocol):
    """One phase that runs."""

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""
        ...

    def note(self, text: str) -> None:
        """A short text shown behind the count from now on."""
        ...


class Progress(Protocol):
    """Shows phases, which may be nested, and messages."""

    def phase(
        self, name: str, total: int | None = None, *, at_most: bool = False
    ) -> AbstractContextManager[PhaseProgress]:
        """A phase of `total` units (None: unknown; `at_most`: it may end sooner) that lasts as long as the block."""
        ...

    def message(self, text: str) -> None:
        """One line for the user."""
        ...


class PlainProgress:
    """Lines on a stream, for logs and pipes: at most one every `every_s` seconds, and the end of each outermost phase.

    A line is about the outermost phase that has a total, with the phase that runs inside it behind:
    ``steps 12/30 (40 %), 9.1 s, about 13.7 s left, reward 0.71; rollouts 64/128``
    """

    def __init__(self, stream: TextIO | None = None, *, every_s: float = 5.0) -> None:
        self._stream = stream
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last_line = time.monotonic()
        self._running: list[_PlainPhase] = []

    @contextmanager
    def phase(self, name: str, total: int | None = None, *, at_most: bool = False) -> Iterator[PhaseProgress]:
        phase = _PlainPhase(self, name, total, at_most=at_most)
        with self._lock:
            self._running.append(phase)
        try:
            yield phase
        finally:
            with self._lock:
                self._running.remove(phase)
                if not self._running:
                    self._write(f"{phase.counted()} in {phase.elapsed_s():.1f} s{phase.noted()}")

    def message(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def offer(self) -> None:
        """Print where things stand, unless something was printed just now."""
        with self._lock:
            if self._running and time.monotonic() - self._last_line >= self._every_s:
                inner = self._running[-1]
                outer = next((phase for phase in self._running if phase.total is not None), inner)
                self._write(outer.line() + (f"; {inner.counted()}" if inner is not outer else ""))

    def _write(self, text: str) -> None:
        print(text, file=self._stream or sys.stderr, flush=True)
        self._last_line = time.monotonic()


class _PlainPhase:
    def __init__(self, progress: PlainProgress, name: str, total: int | None, *, at_most: bool) -> None:
        self.total = total
        self._progress, self._name, self._at_most = progress, name, at_most
        self._started = time.monotonic()
        self._done = 0
        self._first: tuple[float, int] | None = None
        self._note = ""
        self._lock = threading.Lock()

    def advance(self, n: int = 1) -> None:
        with self._lock:
            self._done += n
            if self._first is None:
                # The pace is taken from here: a resumed phase starts with many units that cost this run no time.
                self._first = (time.monotonic(), self._done)
        self._progress.offer()

    def note(self, text: str) -> None:
        self._note = text
        self._progress.offer()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def counted(self) -> str:
        if self.total is None:
            return f"{self._name} {self._done}" if self._done else self._name
        return f"{self._name} {self._done}{' of at most ' if self._at_most else '/'}{self.total}"

    def noted(self) -> str:
        return f", {self._note}" if self._note else ""

    def line(self) -> str:
        share = f" ({100 * self._done // self.total} %)" if self.total and not self._at_most else ""
        left_s = self._left_s()
        left = f", {'at most' if self._at_most else 'about'} {left_s:.1f} s left" if left_s is not None else ""
        return f"{self.counted()}{share}, {self.elapsed_s():.1f} s{left}{self.noted()}"

    def _left_s(self) -> float | None:
        if self._first is None or self.total is None:
            return None
        first_at, first_done = self._first
        num_timed = self._done - first_done
        if num_timed <= 0:
            return None
        return (time.monotonic() - first_at) / num_timed * max(0, self.total - self._done)
