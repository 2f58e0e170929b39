"""The one background thread that owns all asynchronous input and output of boxes.

Gymnasium is synchronous, boxes are not: synchronous code submits a coroutine here and blocks. Blocking calls of an
engine's SDK run in a few daemon threads (`BlockingCalls`), not in `concurrent.futures`: that refuses work once the
interpreter has begun to exit, which is when the last boxes are removed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quintain.sandbox.base import BackgroundLoopError

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a daemon thread; lives as long as the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quintain-background", daemon=True)
        self._thread.start()

    def check_not_inside(self) -> None:
        """Raises BackgroundLoopError where the caller runs on the loop, which would wait for itself for ever."""
        if threading.get_ident() == self._thread.ident:
            raise BackgroundLoopError(
                "a blocking sandbox call was made on quintain's background loop; "
                "use the async Sandbox methods there, or make the call from another thread"
            )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        on_start: Callable[[concurrent.futures.Future[T]], object] = lambda _: None,
    ) -> T:
        """Run a coroutine on the loop and wait for its result. `on_start` gets what it can be cancelled with.

        Raises BackgroundLoopError, and what the coroutine raises.
        """
        try:
            self.check_not_inside()
        except BackgroundLoopError:
            coroutine.close()
            raise
        future = self.submit(coroutine)
        try:
            on_start(future)
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the work must not go on behind the caller's back
            raise


class BlockingCalls:
    """At most `num_threads` blocking functions at a time, awaited from the loop."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        for number in range(num_threads):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in one of the threads; a cancelled wait lets it finish unseen."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def job() -> None:
            try:
                result, error = function(), None
            except BaseException as caught:  # noqa: BLE001 worker boundary: handed to whoever awaits
                result, error = None, caught
            loop.call_soon_threadsafe(settle, result, error)

        self._queue.put(job)
        return await future

    def close(self) -> None:
        """Let the threads end once the queue is empty."""
        for _ in range(self._num_threads):
            self._queue.put(None)


_lock = threading.Lock()
_background: BackgroundLoop | None = None


def background_loop() -> BackgroundLoop:
    """The process's background loop, started at first use."""
    global _background
    with _lock:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def _forget_after_fork() -> None:
    """Threads do not survive a fork: the child starts its own loop when it needs one."""
    global _background, _lock
    _background, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
