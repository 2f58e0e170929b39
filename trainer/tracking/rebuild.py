"""Aim's data of a run, made again from its JSONL files: the proof that Aim is only a view."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quintain.agents.store import read_step
from quintain.agents.trajectory import Group
from quintain.trainer.config import TrackingConfig
from quintain.trainer.tracking.aim import AimTracker
from quintain.trainer.tracking.aim_run import AimRecord, forget_run, read_aim_record
from quintain.trainer.tracking.jsonl import NONFINITE_METRIC, read_metrics
from quintain.trainer.tracking.token_text import Decode


def rebuild(
    run_dir: Path,
    *,
    experiment: str,
    params: Mapping[str, Any],
    config: TrackingConfig,
    decode: Decode | None,
    mask_truncated: bool = False,
    report: Callable[[str], None] = lambda _message: None,
) -> AimRecord:
    """Replace the run's Aim data by what metrics.jsonl and trajectories/ say; the Aim run gets a new hash.

    Raises TrackingError where a live process writes to the old one, ValueError for a trajectory file that can't be
    read.
    """
    rows = read_metrics(run_dir)
    forget_run(run_dir)
    tracker = AimTracker(
        run_dir, experiment=experiment, config=config, decode=decode, mask_truncated=mask_truncated, report=report
    )
    try:
        tracker.log_params(params)
        for row in rows:
            tracker.log_metrics(row["step"], _metrics_of(row))
        for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
            record = read_step(path)
            advantages_P_G = record.advantages or tuple((math.nan,) * len(g.trajectories) for g in record.groups)
            version = _version_at_step(rows, record.step, record.groups)
            tracker.log_groups(record.step, record.groups, advantages_P_G, policy_version=version)
    finally:
        tracker.close(_status_of(run_dir))
    rebuilt = read_aim_record(run_dir)
    assert rebuilt is not None
    return rebuilt


def _metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    left_out = ("step", "time", NONFINITE_METRIC)
    return {name: math.nan if value is None else value for name, value in row.items() if name not in left_out}


def _version_at_step(rows: list[dict[str, Any]], step: int, groups: tuple[Group, ...]) -> int:
    """The learner's version at the first optimizer step of the batch: the one after it, minus its optimizer steps.

    Without those metrics, the newest version that sampled a token of the batch (exact for synchronous runs).
    """
    for row in rows:
        after = row.get("policy/version")
        if row["step"] == step and after is not None:
            taken = row.get("train/minibatch_steps", 1) - row.get("train/num_skipped_steps", 0)
            return int(after - taken)
    versions = (v for g in groups for t in g.trajectories for r in t.rows for v in r.policy_versions)
    return max(versions, default=0)


def _status_of(run_dir: Path) -> str:
    try:
        return str(json.loads((run_dir / "status.json").read_text(encoding="utf-8"))["state"])
    except (OSError, ValueError, KeyError):
        return "unknown"
