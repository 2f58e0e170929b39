"""On resume: what was recorded past the checkpoint moves out of the way, so that every step is in the record once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from quintain.trainer.tracking.jsonl import lines_of, parse_row


def supersede_after(run_dir: Path, step: int) -> Path | None:
    """Move what was recorded past the checkpoint of `step` to a new folder under `RUN/superseded/`, and return that
    folder.

    Rows of metrics.jsonl and files trajectories/step_*.jsonl with a greater step are moved; a torn last line goes
    with them. Nothing is lost by a kill in the middle: rows are copied before the shorter file takes the old one's
    place. Returns None where there was nothing to move.
    """
    metrics = run_dir / "metrics.jsonl"
    files = [path for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")) if _step_of(path) > step]
    kept, moved = _split_lines(metrics, step)
    if not files and not moved:
        return None
    folder = _new_folder(run_dir / "superseded")
    if moved:
        _write_synced(folder / "metrics.jsonl", moved)
        beside = metrics.with_name(".metrics.jsonl.tmp")
        _write_synced(beside, kept)
        os.replace(beside, metrics)
    if files:
        (folder / "trajectories").mkdir()
        for path in files:
            os.replace(path, folder / "trajectories" / path.name)
    return folder


def _split_lines(path: Path, step: int) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    moved: list[str] = []
    if path.exists():
        for line in lines_of(path):
            row = parse_row(line)
            (kept if row is not None and row["step"] <= step else moved).append(line)
    return kept, moved


def _write_synced(path: Path, lines: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _new_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    number = max((int(p.name) for p in parent.iterdir() if p.name.isdecimal()), default=0) + 1
    folder = parent / f"{number:03d}"
    folder.mkdir()
    return folder


def _step_of(path: Path) -> int:
    match = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
    return int(match[1]) if match else -1
