"""Ctrl-C and SIGTERM wait until an update of the weights is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A first Ctrl-C or SIGTERM inside the block takes effect at its end, a second one at once.

    Signals reach the main thread only, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def hold(number: int, frame: FrameType | None) -> None:
        handler = before[signal.Signals(number)]
        if held and callable(handler):
            handler(number, frame)
        held.append(number)

    for number, handler in before.items():
        if callable(handler):  # an ignored signal stays ignored
            signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])
