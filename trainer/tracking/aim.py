"""Aim as a view of the run: curves, parameters and a bounded sample of trajectories, in a repository beside the runs.

Layout, so that Aim's pages stay usable: the trainer's step is the only axis; a series' context holds `subset` and
nothing else; names are fixed (no ids in them), at most `MOST_SERIES`; a step's trajectories are *one* record of whole
groups, so that a group's members stand side by side. `rollouts_html` is what the Text explorer shows, `rollouts` its
plain twin for search.

Aim is imported when a tracker is made, since that takes seconds. What it does not do: Aim's index is built by `aim
up` only, so nothing written here can be queried before `quintain view` was started once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintain.agents.outcome import Outcome
from quintain.agents.trajectory import Group
from quintain.trainer.config import TrackingConfig
from quintain.trainer.tracking.aim_run import open_run
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
        decode: Decode | None,
        mask_truncated: bool = False,
        report: Callable[[str], None] = logger.info,
    ) -> None:
        """Open or go on with the run.

        Args:
            decode: token ids to text, control tokens kept; None shows messages without their tokens.
            mask_truncated: trajectories that hit a limit are left out of the loss (`algorithm.truncated: mask`).
            report: gets a message where a stale lock is taken over or a name is refused.

        Raises TrackingError where another live process writes to this Aim run, or Aim can't be opened.
        """
        self._run_dir, self._config, self._report = run_dir, config, report
        self._decode = CachedDecode(decode) if decode else None
        self._mask_truncated = mask_truncated
        self._names: set[str] = set()
        self._too_many = False
        self._closed = False
        self._run = open_run(run_dir, experiment=experiment, report=report)
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
                    trained=not (self._mask_truncated and trajectory.outcome is Outcome.TRUNCATED),
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
        if not self._closed:
            self._closed = True
            self._run["status"] = status
            self._run.close()

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
