"""metrics.jsonl: strict rows, explicit steps, crashes, resume."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from quintain.trainer.tracking import JsonlTracker, TrackingError, read_metrics, supersede_after


def _strict(path: Path) -> list[dict[str, object]]:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_row_is_strict_json_and_nonfinite_values_are_null_and_counted(tmp_path: Path) -> None:
    """G01"""
    tracker = JsonlTracker(tmp_path, strict=True)
    tracker.log_metrics(1, {"reward/mean": 0.5, "train/loss": math.nan, "train/grad_norm": math.inf})
    tracker.log_metrics(2, {"reward/mean": 0.25})

    first, second = _strict(tmp_path / "metrics.jsonl")  # before close: every row is flushed at once

    assert first.pop("time") == pytest.approx(second.pop("time"), abs=60)
    assert first == {
        "step": 1,
        "reward/mean": 0.5,
        "train/loss": None,
        "train/grad_norm": None,
        "metrics/nonfinite_num": 2,
    }
    assert second == {"step": 2, "reward/mean": 0.25}
    tracker.close("finished")
    tracker.close("finished")


def test_a_step_that_goes_back_is_a_warning_and_kept_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """G05"""
    tracker = JsonlTracker(tmp_path)
    tracker.log_metrics(5, {"reward/mean": 0.5})
    with caplog.at_level(logging.WARNING):
        tracker.log_metrics(4, {"reward/mean": 0.4})

    assert "step 4 came after step 5" in caplog.text
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(5, 0.5), (4, 0.4)]


def test_a_step_that_goes_back_is_an_error_in_tests(tmp_path: Path) -> None:
    """G05"""
    tracker = JsonlTracker(tmp_path, strict=True)
    tracker.log_metrics(5, {"reward/mean": 0.5})
    tracker.log_metrics(5, {"eval/success_frac_sampled": 0.5})
    with pytest.raises(TrackingError, match="step 4 came after step 5"):
        tracker.log_metrics(4, {"reward/mean": 0.4})
    tracker.close("failed")
    with pytest.raises(TrackingError, match="step 3 came after step 5"):
        JsonlTracker(tmp_path, strict=True).log_metrics(3, {"reward/mean": 0.3})


def test_rollouts_and_training_share_one_axis_and_both_are_stored(tmp_path: Path) -> None:
    """G07"""
    tracker = JsonlTracker(tmp_path, strict=True)
    for step in (1, 2):
        tracker.log_metrics(step, {"rollout/num_trajectories": 128.0 * step})
        tracker.log_metrics(step, {"train/loss": 0.1 / step, "policy/version": 4.0 * step})

    rows = [{key: value for key, value in row.items() if key != "time"} for row in read_metrics(tmp_path)]

    assert rows == [
        {"step": 1, "rollout/num_trajectories": 128.0},
        {"step": 1, "train/loss": 0.1, "policy/version": 4.0},
        {"step": 2, "rollout/num_trajectories": 256.0},
        {"step": 2, "train/loss": 0.05, "policy/version": 8.0},
    ]


def test_a_name_that_is_a_field_of_the_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="step"):
        JsonlTracker(tmp_path).log_metrics(1, {"step": 3.0})


def test_a_line_cut_by_a_crash_spoils_no_other_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log_metrics(1, {"reward/mean": 0.5})
    tracker.close("failed")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')

    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    with caplog.at_level(logging.WARNING):
        tracker = JsonlTracker(tmp_path)
    tracker.log_metrics(2, {"reward/mean": 0.6})

    assert "cut by a crash" in caplog.text
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_full_disk_stops_the_run_with_the_remedy(tmp_path: Path) -> None:
    """A limit on the file size of a process stands for the full disk: the same failing write."""
    code = f"""
import resource
from pathlib import Path
from quintain.trainer.tracking import JsonlTracker, TrackingError
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
tracker = JsonlTracker(Path({str(tmp_path)!r}))
try:
    for step in range(100):
        tracker.log_metrics(step, {{"reward/mean": 0.5}})
except TrackingError as error:
    print(step, error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)

    assert "can't be written" in result.stdout
    assert "--resume" in result.stdout
    assert read_metrics(tmp_path)


def test_resume_moves_what_is_past_the_checkpoint_out_of_the_way(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in range(5):
        tracker.log_metrics(step, {"reward/mean": step / 10})
    tracker.close("failed")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    (tmp_path / "trajectories").mkdir()
    for step in (1, 2, 3, 10):
        (tmp_path / "trajectories" / f"step_{step:06d}.jsonl").write_text(f"{step}\n")

    folder = supersede_after(tmp_path, 2)

    assert folder is not None and folder == tmp_path / "superseded" / "001"
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert (folder / "metrics.jsonl").read_text().count("\n") == 2
    assert '{"step": 5, "rew' in (folder / "metrics.jsonl").read_text()
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    moved = sorted(p.name for p in (folder / "trajectories").iterdir())
    assert moved == ["step_000003.jsonl", "step_000010.jsonl"]

    assert supersede_after(tmp_path, 2) is None
    JsonlTracker(tmp_path).log_metrics(3, {"reward/mean": 0.9})
    assert supersede_after(tmp_path, 2) == tmp_path / "superseded" / "002"


def test_resume_of_a_run_that_wrote_nothing_has_nothing_to_move(tmp_path: Path) -> None:
    assert supersede_after(tmp_path, 0) is None
    assert not (tmp_path / "superseded").exists()
