"""Where an environment's box comes from and goes back to: one rule for each `sandbox_scope`.

    none        no box, no pool
    call        lend() takes a box of the pool for one call and gives it back
    trajectory  take() at reset, lend() uses that one, give_back() at the next reset or at close

The pool is the run's; without one, an own pool is opened when the first box is needed and closed by `close`.
`interrupt` may be called from any thread; all else is for one thread at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

from quintain.sandbox import BlockingSandbox, SandboxError, SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

SandboxScope = Literal["none", "call", "trajectory"]
_SCOPES = ("none", "call", "trajectory")


class BoxSource:
    """The box (or none) of one environment instance."""

    def __init__(
        self, *, pool: SandboxPool | None, config: SandboxConfig, scope: str, needs_isolation: bool, owner: str
    ) -> None:
        if scope not in _SCOPES:
            raise ValueError(f"{owner}.sandbox_scope = {scope!r}: choose from {', '.join(_SCOPES)}")
        self._pool, self._config, self._scope = pool, config, scope
        self._needs_isolation, self._owner = needs_isolation, owner
        self._own_pool: SandboxPool | None = None
        self._box: BlockingSandbox | None = None
        self._lent: BlockingSandbox | None = None  # for one call
        self._interrupted = False
        self._task_id: str | None = None

    @property
    def current(self) -> BlockingSandbox:
        """The trajectory's box. Raises RuntimeError where there is none."""
        if self._box is None:
            remedy = "call reset() first" if self._scope == "trajectory" else 'set sandbox_scope = "trajectory"'
            raise RuntimeError(f"{self._owner} holds no box (sandbox_scope is {self._scope!r}); {remedy}")
        return self._box

    def take(self, task_id: str) -> None:
        """Begin a trajectory of a task: take its box, where the scope has one. Raises SandboxError."""
        self._task_id = task_id
        if self._scope == "trajectory":
            self._box = self._source().acquire(group=task_id)
            try:
                self._check_wanted()
            except SandboxError:
                self.give_back()
                raise

    def lend(self, use: Callable[[BlockingSandbox], Any]) -> Any:
        """Call `use` with a box. Raises SandboxError, and what `use` raises."""
        if self._scope == "call":
            with self._source().lease(group=self._task_id) as self._lent:
                self._check_wanted()
                return use(self._lent)
        return use(self.current)

    def give_back(self) -> None:
        """Idempotent."""
        box, self._box = self._box, None
        if box is not None:
            self._source().release(box)

    def interrupt(self) -> None:
        """Kill what the box in use runs, or the next one would; `take` and `lend` raise SandboxError until `close`."""
        self._interrupted = True
        for box in (self._box, self._lent):
            if box is not None:
                box.interrupt()

    def _check_wanted(self) -> None:
        if self._interrupted:  # while a box was waited for
            raise SandboxError(f"{self._owner} was interrupted")

    def close(self) -> None:
        """Idempotent; `take` and `lend` work again afterwards."""
        self.give_back()
        self._interrupted = False
        pool, self._own_pool = self._own_pool, None
        if pool is not None:
            pool.close()

    def _source(self) -> SandboxPool:
        if self._pool is not None:
            return self._pool
        if self._own_pool is None:
            config = self._config.model_copy(update={"pool_size": 1})
            owner = f"environment {self._owner}"
            pool = self._own_pool = open_pool(config, needs_isolation=self._needs_isolation, owner=owner)
            if pool.notice:
                warnings.warn(pool.notice, stacklevel=2)
        return self._own_pool
