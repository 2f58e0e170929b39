"""When a box may be started: a few at once, so many a second, and none for a while after many failures in a row.

closed --(failures in a row)--> open --(pause)--> one trial --ok--> closed
                                  ^------------- failed --------/   (pause doubled)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

from quintain.sandbox.base import SandboxError

PARALLEL_STARTS = 4
BACK_OFF_S = 0.2
MAX_PAUSE_FACTOR = 8


class BreakerOpen(SandboxError):
    """Too many starts failed in a row, so none is tried at the moment."""


class StartGate:
    """One for each pool. Used on the background loop, except `retry_in_s`."""

    def __init__(self, *, per_s: float, failures: int, pause_s: float) -> None:
        self._parallel = asyncio.Semaphore(PARALLEL_STARTS)
        self._interval_s = 1 / per_s
        self._next_start = 0.0
        self._failures = failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._open_until = 0.0
        self._last_error: SandboxError | None = None
        self.num_opened = 0
        """How often the breaker has opened."""

    def retry_in_s(self) -> float:
        """How long nothing will be started; 0 where starting is fine. Any thread."""
        return max(0.0, self._open_until - time.monotonic())

    def refusal(self) -> BreakerOpen:
        """The error for whoever asks while the breaker is open."""
        return BreakerOpen(
            f"{self._num_failures} boxes in a row did not start, so none is tried for {self.retry_in_s():.1f} s; "
            f"the last one: {self._last_error}"
        )

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn to start one box. Raises BreakerOpen."""
        async with self._parallel:
            if self.retry_in_s():
                raise self.refusal()
            now = time.monotonic()
            self._next_start = max(self._next_start, now) + self._interval_s
            await asyncio.sleep(self._next_start - self._interval_s - now)
            yield

    def started(self) -> None:
        """A box started: all is well again."""
        self._num_failures = 0
        self._open_until = 0.0

    def failed(self, error: SandboxError) -> None:
        """A box did not start."""
        self._num_failures += 1
        self._last_error = error
        beyond = self._num_failures - self._failures
        if beyond >= 0 and not self.retry_in_s():
            self._open_until = time.monotonic() + self._pause_s * min(2**beyond, MAX_PAUSE_FACTOR)
            self.num_opened += 1


def back_off_s(attempt: int) -> float:
    """How long to wait after the n-th failed try (from 1); spread, so that many do not come back together."""
    return BACK_OFF_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
