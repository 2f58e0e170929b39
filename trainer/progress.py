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

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[PhaseProgress]:
        """A phase of `total` units (None: unknown) that lasts as long as the block."""
        ...

    def message(self, text: str) -> None:
        """One line for the user."""
        ...


class PlainProgress:
    """Lines on a stream, for logs and pipes: at most one every `every_s` seconds, and the end of each outermost phase.

    Example line: ``steps 12/30 (40 %), 9.1 s, about 13.7 s left, reward 0.71``
    """

    def __init__(self, stream: TextIO | None = None, *, every_s: float = 5.0) -> None:
        self._stream = stream
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last_line = time.monotonic()
        self._depth = 0

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[PhaseProgress]:
        phase = _PlainPhase(self, name, total)
        self._depth += 1
        try:
            yield phase
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.message(f"{phase.counted()} in {phase.elapsed_s():.1f} s{phase.noted()}")

    def message(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def offer(self, phase: _PlainPhase) -> None:
        """Print where `phase` stands, unless something was printed just now."""
        with self._lock:
            if time.monotonic() - self._last_line >= self._every_s:
                self._write(phase.line())

    def _write(self, text: str) -> None:
        print(text, file=self._stream or sys.stderr, flush=True)
        self._last_line = time.monotonic()


class _PlainPhase:
    def __init__(self, progress: PlainProgress, name: str, total: int | None) -> None:
        self._progress, self._name, self._total = progress, name, total
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
        self._progress.offer(self)

    def note(self, text: str) -> None:
        self._note = text
        self._progress.offer(self)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def counted(self) -> str:
        return f"{self._name} {self._done}" + (f"/{self._total}" if self._total is not None else "")

    def noted(self) -> str:
        return f", {self._note}" if self._note else ""

    def line(self) -> str:
        share = f" ({100 * self._done // self._total} %)" if self._total else ""
        left_s = self._left_s()
        left = f", about {left_s:.1f} s left" if left_s is not None else ""
        return f"{self.counted()}{share}, {self.elapsed_s():.1f} s{left}{self.noted()}"

    def _left_s(self) -> float | None:
        if self._first is None or self._total is None:
            return None
        first_at, first_done = self._first
        num_timed = self._done - first_done
        if num_timed <= 0:
            return None
        return (time.monotonic() - first_at) / num_timed * max(0, self._total - self._done)
