"""A bounded pool of boxes, handed out clean.

    acquire -> in use -> release -> reset and proof (background loop) -> free
                              \\-> dead, not proved clean, or not to be reused -> removed, another one is started

Thread-safe: the bookkeeping is under one condition, all I/O runs on the background loop. Creating and removing a box is
retried with back-off, since an engine fails now and then; running a command never is, since it may have had effects.
Starts pass a `StartGate` (rate, breaker). While the pool is open it renews the leases of all its boxes.
Deadlines: `acquire` waits `acquire_timeout_s` (owner: the trajectory; remedy: more boxes), a start `TRIES` tries.
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
from typing import Any, Literal

from quintain.sandbox.agent_sandbox import AgentSandbox
from quintain.sandbox.background import background_loop
from quintain.sandbox.base import SandboxError, SandboxTimeout, SandboxUnavailable
from quintain.sandbox.blocking import BlockingSandbox
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.network_log import NetworkLog
from quintain.sandbox.start_gate import BreakerOpen, StartGate, back_off_s

TRIES = 4
CLOSE_TIMEOUT_S = 60.0
RENEWALS_A_LEASE = 4
log = logging.getLogger("quintain.sandbox")


class SandboxPool:
    """At most `size` boxes alive at once. Made by `open_pool`, ended by `close` (or at interpreter exit)."""

    def __init__(
        self,
        make_box: Callable[[], AgentSandbox],
        config: SandboxConfig,
        *,
        kind: str,
        notice: str | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.kind = kind
        self.size = config.pool_size
        self.reuse: Literal["never", "group", "reset"] = "never" if config.profile == "relaxed" else config.reuse
        """Who may get a used box; a relaxed one is never used again, since its root can't be proved clean."""
        self.notice = notice
        """What the user must be told about this pool; None where nothing is special."""
        self.num_retries = 0
        """How often creating or removing a box had to be tried again."""
        self.num_replaced = 0
        """How many boxes were dead or could not be cleaned when they came back."""
        self.audit: list[dict[str, Any]] = []
        """What the audit of the first box found: a row a check; empty for boxes that isolate nothing."""
        self.network_log = NetworkLog()
        """What the boxes reached, or were refused, with `network=proxy`."""
        self._make_box = make_box
        self._acquire_timeout_s = config.acquire_timeout_s
        self._on_close = on_close
        self._changed = threading.Condition()
        self._boxes: set[AgentSandbox] = set()
        self._free: list[AgentSandbox] = []
        self._leased: dict[BlockingSandbox, AgentSandbox] = {}
        self._groups: dict[AgentSandbox, str] = {}
        self._num_starting = self._num_resetting = self._num_waiting = 0
        self._num_failed_starts = self._num_warm = 0
        self._last_start_error: SandboxError | None = None
        self._tasks: set[concurrent.futures.Future] = set()
        self._closed = False
        self.gate = StartGate(
            per_s=config.starts_per_s, failures=config.breaker_failures, pause_s=config.breaker_pause_s
        )
        self._renewals = background_loop().submit(self._renew_for_ever(config.lease_s / RENEWALS_A_LEASE))
        atexit.register(self.close)

    def acquire(self, *, group: str | None = None) -> BlockingSandbox:
        """A clean box that answers. `group`: with `reuse="group"`, only boxes that nobody or this group had before.

        Raises SandboxTimeout (none free in time), SandboxUnavailable or SandboxError (none starts).
        """
        background_loop().check_not_inside()
        deadline = time.monotonic() + self._acquire_timeout_s
        while True:
            handle, box = self._take(group, deadline)
            try:
                background_loop().run(box.renew())
                return handle
            except SandboxError as error:
                log.info("box %s is replaced: %s", box.id, error)
                self.num_replaced += 1
                self._drop(handle)
            except BaseException:
                self._drop(handle)
                raise

    def _take(self, group: str | None, deadline: float) -> tuple[BlockingSandbox, AgentSandbox]:
        """Wait for a free box and mark it as leased."""
        with self._changed:
            failed_before = self._num_failed_starts
            self._num_waiting += 1
            try:
                while (box := self._pick(group)) is None:
                    self._check_open()
                    pause_s = self.gate.retry_in_s()
                    if not self._num_alive():
                        if pause_s:
                            raise self.gate.refusal()
                        if self._num_failed_starts > failed_before and self._last_start_error:
                            raise self._last_start_error
                    self._make_room()
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise SandboxTimeout(
                            f"no free box in {self._acquire_timeout_s:g} s: {len(self._leased)} of {self.size} are in "
                            "use (raise sandbox.pool_size, or give boxes back sooner)"
                        )
                    self._changed.wait(min(left_s, pause_s) if pause_s else left_s)
                self._check_open()
                self._free.remove(box)
            finally:
                self._num_waiting -= 1
            if group is not None:
                self._groups[box] = group
            handle = BlockingSandbox(box)
            self._leased[handle] = box
            return handle, box

    def _pick(self, group: str | None) -> AgentSandbox | None:
        """A free box that this group may have: one it had before, else one that is new."""
        if self.reuse != "group":
            return self._free[-1] if self._free else None
        mine = [box for box in self._free if self._groups.get(box) == group]
        new = [box for box in self._free if box not in self._groups]
        return (mine + new)[0] if mine or new else None

    def _make_room(self) -> None:
        """Start a box where those that are on their way are too few for those who wait."""
        if self.gate.retry_in_s():
            return
        coming = self._num_starting + (self._num_resetting if self.reuse == "reset" else 0)
        if coming < self._num_waiting:
            if self._num_alive() < self.size:
                self._begin_start()
            elif self._free:  # free, but of other groups
                self._submit(self._remove(self._free.pop(0)))

    def _drop(self, handle: BlockingSandbox) -> None:
        """Remove a leased box that is of no use."""
        handle.detach()
        with self._changed:
            box = self._leased.pop(handle, None)
            if box is not None and not self._closed:
                self._submit(self._remove(box))

    def release(self, handle: BlockingSandbox) -> None:
        """Give a box back; it is reset behind the caller's back. Idempotent."""
        handle.detach()
        with self._changed:
            box = self._leased.pop(handle, None)
            if box is None or self._closed:
                return
            if self.reuse == "never" or (self.reuse == "group" and box not in self._groups):
                self._submit(self._remove(box))
                return
            self._num_resetting += 1
            self._submit(self._clean(box))

    @contextlib.contextmanager
    def lease(self, *, group: str | None = None) -> Iterator[BlockingSandbox]:
        """`acquire` and `release` around a block."""
        handle = self.acquire(group=group)
        try:
            yield handle
        finally:
            self.release(handle)

    def warm(self, num_boxes: int, on_started: Callable[[], object] | None = None) -> None:
        """Start boxes until `num_boxes` (at most `size`) are there; `on_started()` after each, in this thread.

        From then on a box that is removed is replaced ahead of need, up to that number.
        Raises what starting raises, after every start has ended.
        """
        background_loop().check_not_inside()
        with self._changed:
            self._check_open()
            self._num_warm = max(self._num_warm, min(num_boxes, self.size))
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
        self._renewals.cancel()
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
            async with self.gate.slot():
                box = await self._start_with_retries()
            self.gate.started()
        except SandboxError as caught:
            error = caught
            if not self._closed and not isinstance(caught, BreakerOpen):
                self.gate.failed(caught)
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
                await asyncio.shield(asyncio.ensure_future(self._stop_with_retries(box)))
                raise
            await asyncio.sleep(back_off_s(attempt))
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
        with self._changed:
            if box in self._free:
                self._free.remove(box)
        await self._stop_with_retries(box)
        with self._changed:
            self._boxes.discard(box)
            self._groups.pop(box, None)
            if not self._closed and self._num_alive() < self._num_warm and not self.gate.retry_in_s():
                self._begin_start()
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
                await asyncio.sleep(back_off_s(attempt))

    async def _renew_for_ever(self, interval_s: float) -> None:
        """Renew every lease; a free box that does not answer is removed, one in use is its user's to notice."""

        async def renew(box: AgentSandbox) -> None:
            try:
                await box.renew()
            except SandboxError as error:
                with self._changed:
                    if box not in self._free:
                        return
                    self._free.remove(box)
                    self.num_replaced += 1
                log.info("box %s is replaced: %s", box.id, error)
                await self._remove(box)

        while True:
            await asyncio.sleep(interval_s)
            with self._changed:
                boxes = list(self._boxes)
            await asyncio.gather(*(renew(box) for box in boxes), return_exceptions=True)
