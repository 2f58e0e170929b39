"""The `Tracker` protocol and `Trackers`, which hands everything to several of them.

    loop ──> Trackers ──> JsonlTracker   required: its failure (a full disk, say) stops the run
                     └──> AimTracker     a view: a failure is reported once and counted; a few in a row end it

Invariants: the source of truth is written before any view; a view never stops training; `close` closes every tracker,
also where one of them raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quintain.agents.trajectory import Group

logger = logging.getLogger(__name__)

_MOST_FAILURES_IN_A_ROW = 3


class TrackingError(Exception):
    """A tracker can't be opened or written."""


class Tracker(Protocol):
    """Takes what a run reports. `step` is always the trainer's step: the number of finished batches."""

    @property
    def required(self) -> bool:
        """True for the source of truth: its failure stops the run."""
        ...

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Settings and facts of the run, nested; values of any type."""
        ...

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Values of one step; several calls may share a step."""
        ...

    def log_groups(
        self, step: int, groups: Sequence[Group], advantages_P_G: Sequence[Sequence[float]], *, policy_version: int
    ) -> None:
        """The groups of one batch; `policy_version` is the learner's at the first optimizer step of that batch."""
        ...

    def close(self, status: str) -> None:
        """End of the run: `finished`, `interrupted` or `failed`. Idempotent."""
        ...


class Trackers:
    """Hands every call to each tracker, the required ones first. Is a `Tracker` itself."""

    required = True

    def __init__(self, trackers: Sequence[Tracker], *, report: Callable[[str], None] = logger.warning) -> None:
        self._active: list[Tracker] = sorted(trackers, key=lambda tracker: not tracker.required)
        self._report = report
        self._failures_in_a_row: dict[int, int] = {}
        self._reported: set[int] = set()
        self.num_failures = 0
        """Calls in which a view raised."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log_params(params))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log_metrics(step, metrics))

    def log_groups(
        self, step: int, groups: Sequence[Group], advantages_P_G: Sequence[Sequence[float]], *, policy_version: int
    ) -> None:
        self._each(lambda tracker: tracker.log_groups(step, groups, advantages_P_G, policy_version=policy_version))

    def close(self, status: str) -> None:
        """Close all of them; the first error of a required one is raised at the end."""
        active, self._active = self._active, []
        error: Exception | None = None
        for tracker in active:
            try:
                tracker.close(status)
            except Exception as caught:  # noqa: BLE001  teardown: the other trackers must still be closed
                if tracker.required:
                    error = error or caught
                else:
                    self._report(f"{type(tracker).__name__} did not close cleanly: {caught!r}")
        if error is not None:
            raise error

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._active):
            if tracker.required:
                call(tracker)
                continue
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  a view of the run must never stop the run
                self._count_failure(tracker, error)
            else:
                self._failures_in_a_row[id(tracker)] = 0

    def _count_failure(self, tracker: Tracker, error: Exception) -> None:
        self.num_failures += 1
        name = type(tracker).__name__
        if id(tracker) not in self._reported:
            self._reported.add(id(tracker))
            self._report(f"{name} failed, training goes on ({error!r}); metrics.jsonl has everything")
        in_a_row = self._failures_in_a_row.get(id(tracker), 0) + 1
        self._failures_in_a_row[id(tracker)] = in_a_row
        if in_a_row >= _MOST_FAILURES_IN_A_ROW:
            self._report(f"{name} failed {in_a_row} times in a row and is left out from now on")
            self._active.remove(tracker)
            self._close_quietly(tracker)

    def _close_quietly(self, tracker: Tracker) -> None:
        try:
            tracker.close("failed")
        except Exception as error:  # noqa: BLE001  teardown of something that is already broken
            logger.debug("%s: close raised %r", type(tracker).__name__, error)
