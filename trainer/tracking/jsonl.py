"""`RUN/metrics.jsonl`, the source of truth of a run's numbers.

One strict-JSON row a call: `{"step": 12, "time": 1767225600.0, "reward/mean": 0.5, …}`. `step` is the trainer's
(finished batches), `time` is Unix seconds. A value that is NaN or infinite is `null` and counted in
`metrics/nonfinite_num`. Rows are appended and flushed one by one: a killed run loses at most the row it was writing,
and a torn last line is cut off when the file is opened again. Trajectories are not written here: `TrajectoryStore`
keeps them all.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from quintain.agents.trajectory import Group
from quintain.trainer.tracking.convert import split_nonfinite
from quintain.trainer.tracking.tracker import TrackingError

logger = logging.getLogger(__name__)

NONFINITE_METRIC = "metrics/nonfinite_num"


class JsonlTracker:
    """Appends to `RUN/metrics.jsonl`. Opened by the constructor, closed by `close`."""

    required = True

    def __init__(self, run_dir: Path, *, strict: bool = False) -> None:
        """`strict`: a step that goes back is an error (tests) instead of a warning (runs)."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self._strict = strict
        _cut_torn_line(self.path)
        self._last_step = max((row["step"] for row in _rows(self.path)), default=-1)
        self._file: IO[str] | None = self.path.open("a", encoding="utf-8")

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Nothing: `config.yaml` and `summary.json` of the run hold them."""

    def log_groups(
        self, step: int, groups: Sequence[Group], advantages_P_G: Sequence[Sequence[float]], *, policy_version: int
    ) -> None:
        """Nothing: `TrajectoryStore` writes them."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row.

        Raises TrackingError where the file can't be written, where a name is taken by the row itself, and, when strict,
        where `step` is smaller than an earlier one.
        """
        if self._file is None:
            raise TrackingError(f"{self.path} is closed: metrics of step {step} came after the end of the run")
        taken = {"step", "time"} & metrics.keys()
        if taken:
            raise TrackingError(f"metric names {sorted(taken)} are fields of the row itself; use area/what_unit")
        if step < self._last_step:
            message = f"metrics of step {step} came after step {self._last_step}: every row names the trainer's step"
            if self._strict:
                raise TrackingError(message)
            logger.warning("%s; the row is kept", message)
        self._last_step = max(step, self._last_step)
        values, num_nonfinite = split_nonfinite(metrics)
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if num_nonfinite:
            row[NONFINITE_METRIC] = num_nonfinite
        try:
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrackingError(
                f"{self.path} can't be written ({error}); free some space and go on with --resume"
            ) from error

    def close(self, status: str) -> None:
        """Flush to disk and close; `status` is kept in `status.json`, not here."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole row, in the order written; `null` comes back as None, a torn last line is left out."""
    return _rows(run_dir / "metrics.jsonl")


def parse_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def lines_of(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        return file.readlines()


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = lines_of(path)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise TrackingError(f"{path}, line {number}: not a row of metrics: {line[:80]!r}; remove the line")
    return rows


def _cut_torn_line(path: Path) -> None:
    """A kill in the middle of a write leaves a line without its end; appending to it would spoil the next row too."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s: the last line was cut by a crash and is removed: %r", path, content[whole : whole + 80])
            file.truncate(whole)
