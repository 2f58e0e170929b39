"""An event loop whose clock jumps: where nothing is ready, the time of the next timer has come.

`run_in_simulated_time(main())` gives what `asyncio.run` would, hours of `asyncio.sleep` in milliseconds, and the same
order of events each time. For simulations of engines and schedules (`SimulatedPolicy`); not for code that waits for
threads, processes or the network, since their time does not jump.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: it adds what it was to wait to `now_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits for something that is not a timer; in simulated time it never comes")
        if not ready and timeout is not None:
            self.now_s += max(timeout, 0.0)
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _JumpingSelector) -> None:
        super().__init__(selector)
        self._jumping = selector

    def time(self) -> float:
        return self._jumping.now_s


def run_in_simulated_time(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The coroutine's result and the simulated seconds that it took. Raises what it raises, and RuntimeError where
    nothing but a thread or the network could wake it."""
    with asyncio.Runner(loop_factory=lambda: _JumpingLoop(_JumpingSelector())) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()
