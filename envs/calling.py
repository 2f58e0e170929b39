"""Calling a user's function, plain or `async`, with a deadline.

    async def                  on the background loop; past its deadline it is cancelled
    def                        right here; with a deadline in a thread of its own, which nobody can stop

What can't be stopped may still change things: its caller must not go on with the environment it belongs to.
A coroutine shares its loop with all boxes, so it must never block; one that does runs into the deadline all the same.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from quintain.sandbox.background import background_loop

GRACE_S = 2.0
"""How long a cancelled coroutine may take to end."""


class DeadlinePassed(Exception):
    """A call took too long."""

    def __init__(self, deadline_s: float, *, stopped: bool) -> None:
        super().__init__(f"took longer than its deadline of {deadline_s:g} s")
        self.stopped = stopped
        """False where it still runs."""


def call_with_deadline(function: Callable[[], Any], *, is_async: bool, deadline_s: float | None) -> Any:
    """What `function()` gives or raises; a coroutine function's coroutine is run. Raises DeadlinePassed."""
    if is_async:
        return _run_coroutine(function, deadline_s)
    if deadline_s is None:
        return function()
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on it can't be cancelled, so that a late answer finds it open

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - worker boundary: the waiter gets it
            future.set_exception(error)

    threading.Thread(target=work, name="quintain-deadline", daemon=True).start()
    return _result(future, deadline_s, deadline_s)


def _run_coroutine(function: Callable[[], Coroutine[Any, Any, Any]], deadline_s: float | None) -> Any:
    background_loop().check_not_inside()
    if deadline_s is None:
        return background_loop().run(function())

    async def bounded() -> Any:
        timeout = asyncio.timeout(deadline_s)
        try:
            async with timeout:
                return await function()
        except TimeoutError:
            if timeout.expired():
                raise DeadlinePassed(deadline_s, stopped=True) from None
            raise

    return _result(background_loop().submit(bounded()), deadline_s, deadline_s + GRACE_S)


def _result(future: concurrent.futures.Future[Any], deadline_s: float, wait_s: float) -> Any:
    try:
        done, _ = concurrent.futures.wait([future], timeout=wait_s)
        if not done:
            raise DeadlinePassed(deadline_s, stopped=False)
    except BaseException:
        future.cancel()  # Ctrl-C while waiting: a coroutine must not go on behind the caller's back
        raise
    return future.result()
