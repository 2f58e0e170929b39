"""Where a run's metrics and trajectories go: `metrics.jsonl` (the source of truth) and Aim (a view that can be
rebuilt)."""

from quintain.trainer.tracking.aim import AimTracker
from quintain.trainer.tracking.aim_run import AimRecord, read_aim_record
from quintain.trainer.tracking.jsonl import JsonlTracker, read_metrics
from quintain.trainer.tracking.supersede import supersede_after
from quintain.trainer.tracking.tracker import Tracker, Trackers, TrackingError

__all__ = [
    "AimRecord",
    "AimTracker",
    "JsonlTracker",
    "Tracker",
    "Trackers",
    "TrackingError",
    "read_aim_record",
    "read_metrics",
    "supersede_after",
]
