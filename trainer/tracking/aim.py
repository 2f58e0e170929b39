"""Aim as a view of the run: curves, parameters and a bounded sample of trajectories, in a repository beside the runs.

Layout, so that Aim's pages stay usable: the trainer's step is the only axis; a series' context holds `subset` and
nothing else; names are fixed (no ids in them), at most `MOST_SERIES`; a step's trajectories are *one* record of whole
groups, so that a group's members stand side by side. `rollouts_html` is what the Text explorer shows, `rollouts` its
plain twin for search.

Aim is imported when a tracker is made, since that takes seconds. What it does not do: Aim's index is built by `aim
up` only, so nothing written here can be queried before `quintain view` was started once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintain.agents.trajectory import Group
from quintain.trainer.config import TrackingConfig
from quintain.trainer.tracking.aim_lock import is_stale
from quintain.trainer.tracking.convert import split_nonfinite, to_json
from quintain.trainer.tracking.html import trajectory_html
from quintain.trainer.tracking.jsonl import NONFINITE_METRIC
from quintain.trainer.tracking.text import trajectory_text
from quintain.trainer.tracking.token_text import CachedDecode, Decode

logger = logging.getLogger(__name__)

HTML_SERIES = "rollouts_html"
TEXT_SERIES = "rollouts"
MOST_SERIES = 300
"""Most different metric names of one run in Aim; later ones are in metrics.jsonl only."""
_CONTEXT = {"subset": "train"}


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


class AimTracker:
    """One run in Aim. A run folder that was tracked before goes on with the same Aim run (its hash is in
    `RUN/aim.json`)."""

    required = False

    def __init__(
        self,
        run_dir: Path,
        *,
        experiment: str,
        config: TrackingConfig,
        decode: Decode,
        report: Callable[[str], None] = logger.info,
    ) -> None:
        """`decode`: token ids to text, control tokens kept; `report` gets a message where a stale lock is taken over.

        Raises TrackingError where another live process writes to this Aim run.
        """
        self._run_dir, self._config, self._decode, self._report = run_dir, config, CachedDecode(decode), report
        self._names: set[str] = set()
        self._too_many = False
        self._run = self._open(experiment)
        self._run["status"] = "running"

    @property
    def run_hash(self) -> str:
        """Aim's id of the run; the same after a resume."""
        return self._run.hash

    def log_params(self, params: Mapping[str, Any]) -> None:
        converted = to_json(params)
        assert isinstance(converted, dict)
        for name, value in converted.items():
            self._run[name] = value

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """NaN and infinite values are kept, and counted in a series of their own."""
        values, num_nonfinite = split_nonfinite(metrics)
        if num_nonfinite:
            values[NONFINITE_METRIC] = float(num_nonfinite)
        for name, value in values.items():
            if self._admit(name):
                self._run.track(value, name=name, step=step, context=_CONTEXT)

    def log_groups(
        self, step: int, groups: Sequence[Group], advantages_P_G: Sequence[Sequence[float]], *, policy_version: int
    ) -> None:
        """The first `groups_per_step` groups of every `trajectories_every_steps`-th step, whole."""
        from aim import Text

        config = self._config
        shown = list(zip(groups, advantages_P_G, strict=True))[: config.groups_per_step]
        if not shown or step % config.trajectories_every_steps:
            return
        pages: list[str] = []
        transcripts: list[str] = []
        for group, advantages_G in shown:
            for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True):
                page = trajectory_html(
                    trajectory,
                    advantage=advantage,
                    decode=self._decode,
                    policy_version=policy_version,
                    max_tokens=config.max_text_tokens,
                )
                pages.append(page)
                transcripts.append(
                    trajectory_text(
                        trajectory,
                        advantage=advantage,
                        policy_version=policy_version,
                        max_tokens=config.max_text_tokens,
                    )
                )
        # Always lists, also of one: a series of Aim takes either lists or single texts.
        self._run.track([Text(page) for page in pages], name=HTML_SERIES, step=step, context=_CONTEXT)
        self._run.track([Text(text) for text in transcripts], name=TEXT_SERIES, step=step, context=_CONTEXT)

    def close(self, status: str) -> None:
        """Mark the run as ended. Idempotent."""
        if self._run.active:
            self._run["status"] = status
            self._run.close()

    def _open(self, experiment: str) -> Any:
        from aim import Repo, Run

        record = read_aim_record(self._run_dir)
        folder = record.repo.parent if record else self._run_dir.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        self._run_dir.mkdir(exist_ok=True)
        repo = Repo.from_path(str(folder), init=True)
        run_hash = record.run_hash if record else None
        if run_hash is not None and not repo.run_exists(run_hash):
            self._report(f"Aim run {run_hash} is gone from {repo.path}: a new one is made")
            run_hash = None
        run = Run(
            run_hash,
            repo=repo,
            experiment=experiment,
            force_resume=self._take_over(Path(repo.path), run_hash),
            system_tracking_interval=None,
            capture_terminal_logs=False,
            log_system_params=False,
        )
        run.name = self._run_dir.resolve().name
        self._write_record(run.hash, Path(repo.path))
        return run

    def _take_over(self, repo: Path, run_hash: str | None) -> bool:
        if run_hash is None:
            return False
        from aim.sdk.lock_manager import LockManager

        lock_path = repo / "locks" / LockManager.softlock_fname(run_hash)
        stale = is_stale(lock_path, machine_id=LockManager.machine_id)
        if stale:
            self._report(f"Aim run {run_hash} was left open by a process that is gone: its lock is taken over")
        return stale

    def _write_record(self, run_hash: str, repo: Path) -> None:
        relative = os.path.relpath(repo, self._run_dir.resolve())
        beside = self._run_dir / ".aim.json.tmp"
        beside.write_text(json.dumps({"run_hash": run_hash, "repo": relative}) + "\n", encoding="utf-8")
        os.replace(beside, self._run_dir / "aim.json")

    def _admit(self, name: str) -> bool:
        if name not in self._names:
            if len(self._names) >= MOST_SERIES:
                if not self._too_many:
                    self._too_many = True
                    self._report(
                        f"{name!r} is one metric name too many for Aim ({MOST_SERIES}): metrics.jsonl has it; "
                        "names must be fixed, without ids"
                    )
                return False
            self._names.add(name)
        return True
