"""Aim as a view: what arrives in its storage, and that a killed run goes on as the same one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from constructed import TOKENS, group

from quintain.trainer.config import TrackingConfig
from quintain.trainer.tracking import AimTracker, TrackingError, read_aim_record
from quintain.trainer.tracking.aim import MOST_SERIES


def open_tracker(run_dir: Path, messages: list[str] | None = None, **config: Any) -> AimTracker:
    report = messages.append if messages is not None else lambda _message: None
    settings = TrackingConfig(**config)
    return AimTracker(run_dir, experiment="calculator", config=settings, decode=TOKENS.decode, report=report)


def stored(run_dir: Path) -> Any:
    """The run as Aim's own reader gives it, once the index that `aim up` makes is there."""
    from aim import Repo, Run
    from aim.sdk.index_manager import RepoIndexManager

    record = read_aim_record(run_dir)
    assert record is not None
    repo = Repo.from_path(str(record.repo.parent))
    RepoIndexManager.get_index_manager(repo).index(record.run_hash)
    return Run(record.run_hash, repo=repo, read_only=True)


def stored_texts(run: Any) -> dict[str, tuple[list[int], list[Any]]]:
    """Steps and records of every text series; each has the context `{"subset": "train"}`."""
    from aim.storage.context import Context

    found = run.collect_sequence_info(("texts",))["texts"]
    assert all(series["context"] == {"subset": "train"} for series in found)
    texts: dict[str, tuple[list[int], list[Any]]] = {}
    for series in found:
        steps, (records, *_) = run.get_text_sequence(series["name"], Context({"subset": "train"})).data.items_list()
        texts[series["name"]] = (list(steps), list(records))
    return texts


def test_curves_params_and_whole_groups_arrive(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "calc"
    tracker = open_tracker(run_dir)
    tracker.log_params({"recipe": {"seed": 7, "rate": math.nan, "path": Path("/x")}, "sandbox": "docker"})
    for step in (1, 2, 3):
        tracker.log_metrics(step, {"reward/mean": step / 10})
        whole, advantages = group(draw=step)
        other, other_advantages = group(draw=step + 100)
        tracker.log_groups(step, [whole, other], [advantages, other_advantages], policy_version=4)
    tracker.close("finished")
    tracker.close("finished")
    run = stored(run_dir)

    assert (tmp_path / "runs" / ".aim").is_dir()
    assert json.loads((run_dir / "aim.json").read_text()) == {"run_hash": run.hash, "repo": "../.aim"}
    params = run[...]
    assert params["recipe"] == {"seed": 7, "rate": "nan", "path": "/x"}
    assert (params["sandbox"], params["status"]) == ("docker", "finished")
    json.dumps(params, allow_nan=False)
    assert {metric.name for metric in run.metrics()} == {"reward/mean"}
    texts = stored_texts(run)
    assert set(texts) == {"rollouts_html", "rollouts"}
    steps, records = texts["rollouts"]
    assert steps == [1, 2, 3]
    assert [len(record) for record in records] == [4, 4, 4]
    assert records[0][1].data.startswith("task=train-17 draw=1 member=1 reward=0.000")


def test_a_group_of_one_is_still_a_list_and_its_series_goes_on(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path / "run")
    for step, size in ((1, 4), (2, 1), (3, 4)):
        whole, advantages = group(draw=step, size=size)
        tracker.log_groups(step, [whole], [advantages], policy_version=4)
    tracker.close("finished")

    steps, records = stored_texts(stored(tmp_path / "run"))["rollouts_html"]
    assert steps == [1, 2, 3]
    assert [len(record) for record in records] == [4, 1, 4]


def test_nonfinite_values_are_kept_and_counted(tmp_path: Path) -> None:
    """G01"""
    tracker = open_tracker(tmp_path / "run")
    tracker.log_metrics(1, {"train/loss": math.nan, "reward/mean": math.inf, "train/grad_norm": 1.0})
    tracker.close("finished")

    last = {metric.name: metric.values.last_value() for metric in stored(tmp_path / "run").metrics()}
    assert math.isnan(last["train/loss"]) and math.isinf(last["reward/mean"])
    assert (last["train/grad_norm"], last["metrics/nonfinite_num"]) == (1.0, 2.0)


def test_series_and_texts_stay_under_their_bounds(tmp_path: Path) -> None:
    """G04: 1,000 steps of 64 trajectories, and names that someone puts an id into."""
    messages: list[str] = []
    tracker = open_tracker(
        tmp_path / "run", messages, groups_per_step=2, trajectories_every_steps=50, max_text_tokens=50
    )
    batch = [group(draw=number, size=8) for number in range(8)]
    groups, advantages = [g for g, _ in batch], [a for _, a in batch]
    for step in range(1, 1001):
        tracker.log_metrics(step, {"reward/mean": 0.5, f"reward/task_{step}": 1.0})
        tracker.log_groups(step, groups, advantages, policy_version=4)
    tracker.close("finished")
    run = stored(tmp_path / "run")

    assert len(list(run.metrics())) == MOST_SERIES
    assert len([m for m in messages if "one metric name too many" in m]) == 1
    texts = stored_texts(run)
    assert set(texts) == {"rollouts_html", "rollouts"}
    assert len(texts["rollouts"][0]) == 1000 // 50
    records = texts["rollouts_html"][1]
    assert [len(record) for record in records] == [16] * 20
    longest = max(len(text.data) for record in records for text in record)
    assert longest < 110 * 50 + 6000


_WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_aim_tracker import open_tracker
tracker = open_tracker(Path({run!r}))
tracker.log_metrics(1, {{"reward/mean": 0.1}})
print(tracker.run_hash, flush=True)
time.sleep(60)
"""


def _killed_writer(run_dir: Path) -> str:
    """A process that opens the run, logs one point and is killed; returns Aim's hash."""
    code = _WRITER.format(here=str(Path(__file__).parent), run=str(run_dir))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    run_hash = process.stdout.readline().strip()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return run_hash


def _lock(run_dir: Path) -> Path:
    record = read_aim_record(run_dir)
    assert record is not None
    return record.repo / "locks" / f"{record.run_hash}.softlock"


@pytest.mark.parametrize("left_by", ["this machine", "another machine", "a process whose id is in use again"])
def test_a_killed_run_goes_on_as_the_same_run(tmp_path: Path, left_by: str) -> None:
    """G03"""
    run_dir = tmp_path / "run"
    run_hash = _killed_writer(run_dir)
    assert _lock(run_dir).exists()
    machine, pid, created = _lock(run_dir).read_text().split("-")
    if left_by == "another machine":
        _lock(run_dir).write_text(f"{int(machine) + 1}-{pid}-{created}")
    elif left_by != "this machine":
        _lock(run_dir).write_text(f"{machine}-{os.getppid()}-{1000.0}")
    messages: list[str] = []
    started = time.monotonic()
    tracker = open_tracker(run_dir, messages)
    tracker.log_metrics(2, {"reward/mean": 0.2})
    tracker.close("finished")

    assert tracker.run_hash == run_hash
    assert time.monotonic() - started < 8
    assert any("lock is taken over" in message for message in messages)
    assert not _lock(run_dir).exists()
    (metric,) = stored(run_dir).metrics()
    assert list(metric.data.indices_list()) == [1, 2]
    assert stored(run_dir).end_time is not None


def test_a_run_that_a_live_process_writes_is_not_taken_over(tmp_path: Path) -> None:
    """G03"""
    tracker = open_tracker(tmp_path / "run")
    with pytest.raises(TrackingError, match=f"process {os.getpid()} is writing"):
        open_tracker(tmp_path / "run")
    tracker.close("interrupted")

    assert stored(tmp_path / "run")["status"] == "interrupted"


def test_a_step_written_again_after_a_resume_replaces_the_old_value(tmp_path: Path) -> None:
    for value in (0.1, 0.9):
        tracker = open_tracker(tmp_path / "run")
        tracker.log_metrics(1, {"reward/mean": value})
        whole, advantages = group(size=4)
        tracker.log_groups(1, [whole], [advantages], policy_version=4)
        tracker.close("finished")

    run = stored(tmp_path / "run")
    (metric,) = run.metrics()
    assert list(metric.data.indices_list()) == [1]
    assert metric.values.last_value() == 0.9
    assert [steps for steps, _ in stored_texts(run).values()] == [[1], [1]]


def test_a_run_whose_repository_was_deleted_gets_a_new_one(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path / "run")
    tracker.close("finished")
    (tmp_path / "run" / "aim.json").write_text(json.dumps({"run_hash": "0" * 24, "repo": "../.aim"}))
    messages: list[str] = []
    again = open_tracker(tmp_path / "run", messages)
    again.close("finished")

    assert again.run_hash not in ("0" * 24, tracker.run_hash)
    assert "is gone" in messages[0]


def test_importing_the_trackers_does_not_import_aim() -> None:
    code = "import sys, quintain.trainer.tracking; print('aim' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.split()[0] == "False"
