"""A bounded pool of boxes, handed out clean.

    acquire -> in use -> release -> reset (background loop) -> free
                              \\-> can't be cleaned, or dead -> removed; the next acquire starts another one

Thread-safe: the bookkeeping is under one condition, all I/O runs on the background loop. Creating and removing a box is
retried with back-off, since an engine fails now and then; running a command never is, since it may have had effects.
Deadlines: `acquire` waits `acquire_timeout_s` (owner: the trajectory; remedy: more boxes), a start `START_TRIES` tries.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from quintain.sandbox.agent_sandbox import AgentSandbox
from quintain.sandbox.background import background_loop
from quintain.sandbox.base import SandboxError, SandboxTimeout, SandboxUnavailable
from quintain.sandbox.blocking import BlockingSandbox

PARALLEL_STARTS = 4
TRIES = 4
BACK_OFF_S = 0.2
CLOSE_TIMEOUT_S = 60.0
log = logging.getLogger("quintain.sandbox")


class SandboxPool:
    """At most `size` boxes alive at once. Made by `open_pool`, ended by `close` (or at interpreter exit)."""

    def __init__(
        self,
        make_box: Callable[[], AgentSandbox],
        *,
        kind: str,
        size: int,
        acquire_timeout_s: float,
        notice: str | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.kind = kind
        self.size = size
        self.notice = notice
        """What the user must be told about this pool; None where nothing is special."""
        self.num_retries = 0
        """How often creating or removing a box had to be tried again."""
        self.num_replaced = 0
        """How many boxes were dead or could not be cleaned when they came back."""
        self._make_box = make_box
        self._acquire_timeout_s = acquire_timeout_s
        self._on_close = on_close
        self._changed = threading.Condition()
        self._boxes: set[AgentSandbox] = set()
        self._free: list[AgentSandbox] = []
        self._leased: dict[BlockingSandbox, AgentSandbox] = {}
        self._num_starting = self._num_resetting = self._num_waiting = 0
        self._num_failed_starts = 0
        self._last_start_error: SandboxError | None = None
        self._tasks: set[concurrent.futures.Future] = set()
        self._closed = False
        self._starts = asyncio.Semaphore(PARALLEL_STARTS)
        atexit.register(self.close)

    def acquire(self) -> BlockingSandbox:
        """A clean box. Raises SandboxTimeout (none free in time), SandboxUnavailable or SandboxError (none starts)."""
        background_loop().check_not_inside()
        deadline = time.monotonic() + self._acquire_timeout_s
        with self._changed:
            failed_before = self._num_failed_starts
            self._num_waiting += 1
            try:
                while not self._free:
                    self._check_open()
                    if self._num_failed_starts > failed_before and not self._num_alive() and self._last_start_error:
                        raise self._last_start_error
                    if self._num_starting + self._num_resetting < self._num_waiting and self._num_alive() < self.size:
                        self._begin_start()
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise SandboxTimeout(
                            f"no free box in {self._acquire_timeout_s:g} s: {len(self._leased)} of {self.size} are in "
                            "use (raise sandbox.pool_size, or give boxes back sooner)"
                        )
                    self._changed.wait(left_s)
                self._check_open()
                box = self._free.pop()
            finally:
                self._num_waiting -= 1
            handle = BlockingSandbox(box)
            self._leased[handle] = box
            return handle

    def release(self, handle: BlockingSandbox) -> None:
        """Give a box back; it is reset behind the caller's back. Idempotent."""
        handle.detach()
        with self._changed:
            box = self._leased.pop(handle, None)
            if box is None or self._closed:
                return
            self._num_resetting += 1
            self._submit(self._clean(box))

    @contextlib.contextmanager
    def lease(self) -> Iterator[BlockingSandbox]:
        """`acquire` and `release` around a block."""
        handle = self.acquire()
        try:
            yield handle
        finally:
            self.release(handle)

    def warm(self, num_boxes: int, on_started: Callable[[], object] | None = None) -> None:
        """Start boxes until `num_boxes` (at most `size`) are there; `on_started()` after each, in this thread.

        Raises what starting raises, after every start has ended.
        """
        background_loop().check_not_inside()
        with self._changed:
            self._check_open()
            missing = min(num_boxes, self.size) - self._num_alive()
            starts = [self._begin_start() for _ in range(missing)]
        failure: SandboxError | None = None
        for start in concurrent.futures.as_completed(starts):
            error = start.exception()
            if isinstance(error, SandboxError):
                failure = error
            elif error is not None:
                raise error
            elif on_started is not None:
                on_started()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Remove every box, in use or not. Idempotent; boxes that can't be removed are logged, not raised.

        Raises BackgroundLoopError.
        """
        background_loop().check_not_inside()
        with self._changed:
            first, self._closed = not self._closed, True
            tasks, boxes = list(self._tasks), list(self._boxes)
            self._free.clear()
            for handle in self._leased:
                handle.detach()
            self._leased.clear()
            self._changed.notify_all()
        if not first:
            return
        atexit.unregister(self.close)
        removals = [background_loop().submit(self._remove(box)) for box in boxes]
        concurrent.futures.wait([*tasks, *removals], timeout=CLOSE_TIMEOUT_S)
        self._on_close()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox pool is closed")

    def _num_alive(self) -> int:
        return len(self._boxes) + self._num_starting

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        future = background_loop().submit(coroutine)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
        return future

    def _begin_start(self) -> concurrent.futures.Future[None]:
        self._num_starting += 1
        return self._submit(self._start())

    async def _start(self) -> None:
        box: AgentSandbox | None = None
        error: SandboxError | None = None
        try:
            async with self._starts:
                box = await self._start_with_retries()
        except SandboxError as caught:
            error = caught
            raise
        finally:
            with self._changed:
                self._num_starting -= 1
                if box is not None:
                    self._boxes.add(box)
                    self._free.append(box)
                else:
                    self._num_failed_starts += 1
                    self._last_start_error = error
                self._changed.notify_all()
        if self._closed and box is not None:
            await self._remove(box)

    async def _start_with_retries(self) -> AgentSandbox:
        for attempt in range(1, TRIES + 1):
            box = self._make_box()
            try:
                if self._closed:
                    raise SandboxUnavailable("this sandbox pool is closed")
                await box.start()
                return box
            except SandboxUnavailable:
                await self._stop_with_retries(box)
                raise
            except SandboxError as error:
                await self._stop_with_retries(box)
                if attempt == TRIES:
                    raise
                self.num_retries += 1
                log.info("box %s did not start (%s), try %d of %d", box.id, error, attempt, TRIES)
            except BaseException:
                await self._stop_with_retries(box)
                raise
            await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def _clean(self, box: AgentSandbox) -> None:
        clean = False
        try:
            await box.reset()
            clean = True
        except SandboxError as error:
            log.info("box %s is replaced: %s", box.id, error)
        finally:
            with self._changed:
                self._num_resetting -= 1
                if clean and not self._closed:
                    self._free.append(box)
                    self._changed.notify()
        if not clean:
            self.num_replaced += 1
            await self._remove(box)

    async def _remove(self, box: AgentSandbox) -> None:
        """Stop a box; only then is its place free, so that there never are more than `size`."""
        await self._stop_with_retries(box)
        with self._changed:
            self._boxes.discard(box)
            if box in self._free:
                self._free.remove(box)
            self._changed.notify_all()

    async def _stop_with_retries(self, box: AgentSandbox) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                await box.stop()
                return
            except SandboxError as error:
                if attempt == TRIES:
                    log.warning("box %s could not be removed: %s", box.id, error)
                    return
                self.num_retries += 1
                await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
