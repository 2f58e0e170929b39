"""Checkpoints that are whole or absent: `Checkpoints.save` and `Checkpoints.latest_good`.

A checkpoint is a folder `step_000010/` with `model/` (Hugging Face format), `learner.pt`, `loop.json` and
`manifest.json`. Saving::

    .tmp-step_000010-<pid>/  files written -> every file and folder fsynced -> manifest.json (sizes, sha256) last
        -> renamed to step_000010/ -> root fsynced -> read back and verified
        -> newer and incomplete folders moved to superseded/ -> all but the newest `keep` deleted

Invariants: a folder without a manifest that fits its files is not a checkpoint; whenever the process dies, the newest
checkpoint that had been finished is still loadable; folders are ordered by step *number*; an older one goes only after
the new one was verified; only complete ones count as kept; what was just saved is the newest. Imports the standard
library only.

Does not do: what goes into the learner's files (`Learner.save`), several writers in one folder.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MANIFEST, LOOP_STATE = "manifest.json", "loop.json"
SUPERSEDED = "superseded"
"""Folder for step folders that no longer count; nothing in it is read or deleted."""
SCHEMA_VERSION = 1
_STEP_FOLDER = re.compile(r"step_(\d+)")
_SPARE_BYTES = 16 * 2**20
"""Beyond the learner's estimate: tokenizer, configuration, state files."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the older ones are untouched."""


class Saveable(Protocol):
    """What is checkpointed: the learner."""

    def save(self, folder: Path) -> None:
        """Write all files into `folder`, which exists and is empty."""
        ...

    def checkpoint_bytes(self) -> int:
        """About how many bytes `save` writes."""
        ...


class SavedTogether:
    """Several things in one checkpoint, the learner and its critic, each with files of its own."""

    def __init__(self, *parts: Saveable) -> None:
        self._parts = parts

    def save(self, folder: Path) -> None:
        """Write the files of all of them."""
        for part in self._parts:
            part.save(folder)

    def checkpoint_bytes(self) -> int:
        """Of all of them."""
        return sum(part.checkpoint_bytes() for part in self._parts)


class SavesItself(Protocol):
    """A tokenizer, as far as a checkpoint needs it."""

    def save_pretrained(self, save_directory: str | Path) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodCheckpoint:
    """A complete checkpoint, verified against its manifest."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """The dictionary that the loop gave to `save`."""
    passed_over: tuple[str, ...] = ()
    """Why each newer folder was not taken, newest first; empty where this is the newest."""

    @property
    def model_path(self) -> Path:
        """Hugging Face folder with weights and tokenizer."""
        return self.path / "model"


class Checkpoints:
    """The checkpoints of one run, in one folder that only this process writes to."""

    def __init__(self, root: Path, *, keep: int, tokenizer: SavesItself | None = None) -> None:
        """Use `root` (made if absent).

        Args:
            keep: how many of the newest are kept, >= 1.
            tokenizer: saved beside the weights, so that the folder serves as `model.path`.
        """
        self.root, self.keep, self.tokenizer = root, keep, tokenizer
        root.mkdir(parents=True, exist_ok=True)
        _finish_interrupted(root)

    def save(self, step: int, learner: Saveable, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, replacing one of the same step, and delete those beyond `keep`.

        Folders of later steps (the run went on from before them) and incomplete ones are moved to `superseded/`.
        `state` is the loop's own and must be JSON.

        Raises:
            CheckpointError: the disk is full (or would be), or what was written does not read back.
        """
        self.check_free_space(learner)
        beside = self.root / f".tmp-{_name(step)}-{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir()
            learner.save(beside)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(beside / "model")
            (beside / LOOP_STATE).write_text(json.dumps(dict(state), indent=1), encoding="utf-8")
            _write_manifest(beside, step)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(self._cannot_write(step, error)) from error
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        final = self.root / _name(step)
        _put_in_place(beside, final)
        if problem := find_problem(final):
            raise CheckpointError(f"checkpoint {final} does not read back as written: {problem}; older ones are kept")
        self._set_aside(step)
        self._delete_old()
        return final

    def latest_good(self) -> GoodCheckpoint | None:
        """The newest complete checkpoint, with the reasons why newer folders were passed over; None where none is."""
        return latest_good(self.root)

    def check_free_space(self, learner: Saveable) -> None:
        """Raise CheckpointError unless one more checkpoint fits; worth calling before a run starts."""
        needed, free = learner.checkpoint_bytes() + _SPARE_BYTES, shutil.disk_usage(self.root).free
        if free < needed:
            raise CheckpointError(
                f"{self.root} has {free / 2**20:.0f} MiB free, and a checkpoint takes about {needed / 2**20:.0f} MiB: "
                "make room, or choose another run folder with --out"
            )

    def _cannot_write(self, step: int, error: OSError) -> str:
        whole = (number for number, path in step_folders(self.root).items() if not find_problem(path, content=False))
        newest = max(whole, default=None)
        kept = f"the checkpoint of step {newest} is kept" if newest is not None else "no older checkpoint exists"
        remedy = "make room or lower checkpoint.keep, then --resume" if error.errno == errno.ENOSPC else "see the cause"
        return f"the checkpoint of step {step} could not be written to {self.root}: {error}; {kept}; {remedy}"

    def _set_aside(self, saved_step: int) -> None:
        """Leave only complete folders up to `saved_step`: any other would take a place among the `keep` newest."""
        for step, path in step_folders(self.root).items():
            if step > saved_step or find_problem(path, content=False):
                superseded = self.root / SUPERSEDED
                superseded.mkdir(exist_ok=True)
                targets = (superseded / f"{path.name}-{number}" for number in itertools.count(1))
                path.rename(next(target for target in targets if not target.exists()))

    def _delete_old(self) -> None:
        folders = step_folders(self.root)
        for step in sorted(folders)[: -self.keep]:
            # Renamed first: a kill in the middle of the deletion must not leave something that looks like a checkpoint.
            doomed = self.root / f".tmp-delete-{_name(step)}"
            shutil.rmtree(doomed, ignore_errors=True)
            folders[step].rename(doomed)
            (doomed / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(doomed, ignore_errors=True)


def latest_good(root: Path) -> GoodCheckpoint | None:
    """The newest complete checkpoint below `root` (see `Checkpoints.latest_good`); writes nothing."""
    passed_over: list[str] = []
    folders = step_folders(root)
    for step in sorted(folders, reverse=True):
        problem = find_problem(folders[step])
        if problem is None:
            state = json.loads((folders[step] / LOOP_STATE).read_text(encoding="utf-8"))
            return GoodCheckpoint(path=folders[step], step=step, state=state, passed_over=tuple(passed_over))
        passed_over.append(f"{folders[step].name}: {problem}")
    return None


def step_folders(root: Path) -> dict[int, Path]:
    """Step number -> folder, of all that are named like a checkpoint, complete or not."""
    if not root.is_dir():
        return {}
    matches = ((_STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in matches if match}


def find_problem(folder: Path, *, content: bool = True) -> str | None:
    """Why `folder` is not a complete checkpoint; None where it is one.

    Without `content` only the files' presence and sizes are compared, which is cheap.
    """
    try:
        files = _listed_files(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing (it was not finished)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is not readable ({error})"
    if LOOP_STATE not in files:
        return f"its manifest does not list {LOOP_STATE}"
    for name, (num_bytes, sha256) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {num_bytes}"
        try:
            if content and _sha256(path) != sha256:
                return f"the content of {name} was changed (sha256)"
        except OSError as error:
            return f"{name} is not readable ({error})"
    return None


def _listed_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> bytes and sha256, of the manifest. Raises OSError and whatever JSON of another shape leads to."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["schema"] != SCHEMA_VERSION:
        raise ValueError(f"it has schema {manifest['schema']}, this version reads {SCHEMA_VERSION}")
    return {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _write_manifest(folder: Path, step: int) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
    for path in paths:
        _fsync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"schema": SCHEMA_VERSION, "step": step, "files": files}, indent=1) + "\n")
    _fsync(manifest)
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _fsync(directory)


def _put_in_place(beside: Path, final: Path) -> None:
    if final.exists():
        replaced = final.with_name(f".tmp-replaced-{final.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        beside.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        beside.rename(final)
    _fsync(final.parent)


def _finish_interrupted(root: Path) -> None:
    """After a kill: a temporary folder that is complete and whose place is free takes it; the others are deleted."""
    for path in sorted(root.glob(".tmp-*"), key=lambda path: path.name.startswith(".tmp-replaced-")):
        match = _STEP_FOLDER.search(path.name)
        if match and not path.name.startswith(".tmp-delete-") and find_problem(path) is None:
            final = root / match[0]
            if not final.exists():
                path.rename(final)
                _fsync(root)
                continue
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
