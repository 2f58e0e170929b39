"""Several trackers at once: a view never stops training, the source of truth does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quintain.agents.trajectory import Group
from quintain.trainer.tracking import JsonlTracker, Trackers, TrackingError, read_metrics


class BrokenView:
    """A tracker whose calls fail in the given steps."""

    required = False

    def __init__(self, broken_steps: Sequence[int]) -> None:
        self._broken_steps = broken_steps
        self.steps: list[int] = []
        self.closed: list[str] = []

    def log_params(self, params: Mapping[str, Any]) -> None: ...

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if step in self._broken_steps:
            raise OSError("no repository")

    def log_groups(
        self, step: int, groups: Sequence[Group], advantages_P_G: Sequence[Sequence[float]], *, policy_version: int
    ) -> None: ...

    def close(self, status: str) -> None:
        self.closed.append(status)
        if self._broken_steps:
            raise OSError("no repository")


def _log(trackers: Trackers, steps: range) -> None:
    for step in steps:
        trackers.log_metrics(step, {"reward/mean": step / 10})


def test_a_view_that_fails_once_is_reported_once_and_goes_on(tmp_path: Path) -> None:
    """G02: metrics never stop training."""
    messages: list[str] = []
    view = BrokenView([2])
    trackers = Trackers([view, JsonlTracker(tmp_path)], report=messages.append)
    _log(trackers, range(6))
    trackers.close("finished")

    assert view.steps == list(range(6))
    assert trackers.num_failures == 1
    assert len([m for m in messages if "no repository" in m and "training goes on" in m]) == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(6))


def test_a_view_that_keeps_failing_is_left_out(tmp_path: Path) -> None:
    """G02"""
    messages: list[str] = []
    view = BrokenView(range(2, 100))
    trackers = Trackers([JsonlTracker(tmp_path), view], report=messages.append)
    _log(trackers, range(20))
    trackers.close("finished")

    assert view.steps == [0, 1, 2, 3, 4]
    assert trackers.num_failures == 3
    assert [("left out" in m) for m in messages] == [False, True]
    assert view.closed == ["failed"]
    assert len(read_metrics(tmp_path)) == 20


def test_the_source_of_truth_is_written_first_and_its_failure_is_an_error(tmp_path: Path) -> None:
    view, source = BrokenView([]), JsonlTracker(tmp_path, strict=True)
    trackers = Trackers([view, source])
    _log(trackers, range(2))
    with pytest.raises(TrackingError, match="step 0"):
        trackers.log_metrics(0, {"reward/mean": 0.0})

    assert view.steps == [0, 1]
    trackers.close("failed")
    assert view.closed == ["failed"]


def test_all_are_closed_also_when_one_fails(tmp_path: Path) -> None:
    broken, good = BrokenView([1]), BrokenView([])
    messages: list[str] = []
    trackers = Trackers([broken, good], report=messages.append)
    trackers.close("interrupted")
    trackers.close("interrupted")

    assert broken.closed == good.closed == ["interrupted"]
    assert len(messages) == 1
