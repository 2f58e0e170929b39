"""One Aim run for one run folder: opened, found again after a crash, remembered in `RUN/aim.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintain.trainer.tracking.aim_lock import is_stale
from quintain.trainer.tracking.tracker import TrackingError


@dataclass(frozen=True, slots=True, kw_only=True)
class AimRecord:
    """What `RUN/aim.json` says: where Aim keeps this run."""

    run_hash: str
    repo: Path
    """Absolute path of the repository folder (`.aim`); stored relative to the run folder, so that runs can be moved."""


def read_aim_record(run_dir: Path) -> AimRecord | None:
    """The run's place in Aim; None where it was never tracked there."""
    path = run_dir / "aim.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return AimRecord(run_hash=content["run_hash"], repo=(run_dir.resolve() / content["repo"]).resolve())


def open_run(run_dir: Path, *, experiment: str, report: Callable[[str], None]) -> Any:
    """The `aim.Run` of a run folder: the one it had before, or a new one in the repository beside it.

    Raises TrackingError where another live process writes to it, or Aim can't be opened.
    """
    try:
        return _open(run_dir, experiment, report)
    except TrackingError:
        raise
    except Exception as error:  # the storage of Aim has errors of many kinds, for a damaged repository say
        raise TrackingError(
            f"Aim can't be opened beside {run_dir} ({error!r}); remove the .aim folder there, `quintain view` makes it "
            "again from the run's JSONL files, or set tracking.aim=false"
        ) from error


def forget_run(run_dir: Path) -> None:
    """Delete the folder's Aim run, where it has one, and `RUN/aim.json`."""
    from aim import Repo

    record = read_aim_record(run_dir)
    if record is None:
        return
    if record.repo.is_dir():
        repo = Repo.from_path(str(record.repo.parent))
        if repo.run_exists(record.run_hash):
            _take_over(record.repo, record.run_hash, lambda _message: None)
            repo.delete_run(record.run_hash)
    (run_dir / "aim.json").unlink()


def _open(run_dir: Path, experiment: str, report: Callable[[str], None]) -> Any:
    from aim import Repo, Run

    record = read_aim_record(run_dir)
    folder = record.repo.parent if record else run_dir.resolve().parent
    run_dir.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    repo = Repo.from_path(str(folder), init=True)
    run_hash = record.run_hash if record else None
    if run_hash is not None and not repo.run_exists(run_hash):
        report(f"Aim run {run_hash} is gone from {repo.path}: a new one is made")
        run_hash = None
    run = Run(
        run_hash,
        repo=repo,
        experiment=experiment,
        force_resume=_take_over(Path(repo.path), run_hash, report),
        system_tracking_interval=None,
        capture_terminal_logs=False,
        log_system_params=False,
    )
    run.name = run_dir.resolve().name
    _write_record(run_dir, run.hash, Path(repo.path))
    return run


def _take_over(repo: Path, run_hash: str | None, report: Callable[[str], None]) -> bool:
    """Whether there is a stale lock that has to be forced open."""
    if run_hash is None:
        return False
    from aim.sdk.lock_manager import LockManager

    lock_path = repo / "locks" / LockManager.softlock_fname(run_hash)
    stale = is_stale(lock_path, machine_id=LockManager.machine_id)
    if stale:
        report(f"Aim run {run_hash} was left open by a process that is gone: its lock is taken over")
    return stale


def _write_record(run_dir: Path, run_hash: str, repo: Path) -> None:
    relative = os.path.relpath(repo, run_dir.resolve())
    beside = run_dir / ".aim.json.tmp"
    beside.write_text(json.dumps({"run_hash": run_hash, "repo": relative}) + "\n", encoding="utf-8")
    os.replace(beside, run_dir / "aim.json")
