"""A bounded set of threads in which the blocking environments run.

    event loop ── call(step) ──> queue ──> N threads ── call_soon_threadsafe ──> event loop

A call whose waiter gives up (deadline, Ctrl-C) before a thread took it is dropped. One that already runs cannot be
killed: its thread is *abandoned*, counted, and replaced by a new one, so that N threads keep working. The environment
is interrupted, which kills what its box runs, and closed in its thread when the call returns at last. The threads are
daemons: a call that never returns does not keep Python alive.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Literal

from quintain.envs import Message, ToolEnv

_LOG = logging.getLogger(__name__)


class _Call:
    """One call on its way; `state` changes under the threads' lock."""

    __slots__ = ("function", "future", "loop", "owner", "state")

    def __init__(self, function: Callable[[], Any], owner: ThreadedEnv | None, loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.owner = owner
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.state: Literal["queued", "running", "finished", "dropped", "abandoned"] = "queued"


class EnvThreads:
    """`call` runs a function in one of `num_threads` threads. Threads start with the first call; `close` ends them."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._num_stuck = 0
        self.num_abandoned = 0
        """Calls given up while they ran, since the start."""

    @property
    def num_threads(self) -> int:
        return self._num_threads

    @property
    def num_stuck(self) -> int:
        """Abandoned calls that have not returned yet; each holds a thread."""
        return self._num_stuck

    async def call(self, function: Callable[[], Any], *, owner: ThreadedEnv | None = None) -> Any:
        """The function's result or exception. Given up while it runs, it marks its owner, and closes it in the end."""
        if not self._started:
            self._started = True
            for _ in range(self._num_threads):
                self._start_thread()
        call = _Call(function, owner, asyncio.get_running_loop())
        self._queue.put(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    def close(self) -> None:
        """Let idle threads end; stuck ones are left behind."""
        if self._started:
            self._started = False
            for _ in range(self._num_threads):
                self._queue.put(None)

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if call.state == "queued":
                call.state = "dropped"
            elif call.state == "running":
                call.state = "abandoned"
                if call.owner is not None:
                    call.owner.abandoned = True
                self._num_stuck += 1
                self.num_abandoned += 1
                self._start_thread()
        if call.state == "abandoned" and call.owner is not None:
            try:
                call.owner.env.interrupt()
            except Exception:  # noqa: BLE001 - teardown: an environment's own way to stop must not stop the others
                _LOG.warning("interrupting an environment failed", exc_info=True)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="quintain-env", daemon=True).start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            with self._lock:
                if call.state == "dropped":
                    continue
                call.state = "running"
            result, error = None, None
            try:
                result = call.function()
            except Exception as raised:  # noqa: BLE001 - worker boundary: the waiter gets it
                error = raised
            except BaseException as raised:  # noqa: BLE001 - worker boundary: an environment must not end the run
                error = RuntimeError(f"the environment raised {type(raised).__name__}")
            if isinstance(error, StopIteration):  # a future refuses it
                error = RuntimeError("the environment raised StopIteration")
            with self._lock:
                abandoned = call.state == "abandoned"
                if not abandoned:
                    call.state = "finished"
            if abandoned:
                self._clean_up(call)
                return  # a new thread has taken this one's place
            try:
                call.loop.call_soon_threadsafe(_deliver, call.future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                _LOG.debug("an environment call returned after the loop had closed")
            del call, result, error  # an idle thread must not keep an environment alive

    def _clean_up(self, call: _Call) -> None:
        try:
            if call.owner is not None:
                call.owner.env.close()
        except Exception:  # noqa: BLE001 - teardown of something that already went wrong
            _LOG.warning("closing an abandoned environment failed", exc_info=True)
        with self._lock:
            self._num_stuck -= 1


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


StepResult = tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]


class ThreadedEnv:
    """One environment, awaited from the event loop. At most one call at a time."""

    def __init__(self, env: ToolEnv, threads: EnvThreads) -> None:
        self.env = env
        self.threads = threads
        self.abandoned = False
        """A call was given up while it ran: the environment closes itself when that call returns, don't touch it."""

    async def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        return await self._call(lambda: self.env.reset(seed=seed, options=options))

    async def step(self, action: Message) -> StepResult:
        return await self._call(lambda: self.env.step(action))

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Close it unless it is abandoned; a close that takes longer is abandoned too. Errors are only logged."""
        if self.abandoned:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._call(self.env.close)
        except Exception:  # noqa: BLE001 - teardown
            _LOG.warning("closing an environment failed", exc_info=True)

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await self.threads.call(function, owner=self)
