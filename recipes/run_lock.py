"""One process at a time in a run folder: a lock that the operating system drops when its holder dies.

Two runs in one folder would move each other's rows, delete each other's checkpoints and mix their metrics.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintain.recipes.loader import RecipeError

LOCK_FILE = ".lock"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock, without which nothing in it may be written. Raises RecipeError naming who has it."""
    path = run_dir / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise RecipeError(
                f"{run_dir} is in use: process {holder} is training in it; wait for it or end it, or name another --out"
            ) from error
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)  # which gives the lock back


def make_run_folder(name: str, time_text: str) -> Path:
    """A new `runs/<name>-<time>` below the working directory; runs that start in the same second get a number."""
    Path("runs").mkdir(exist_ok=True)
    for number in range(1000):
        folder = Path("runs") / (f"{name}-{time_text}" + (f"-{number + 1}" if number else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder.resolve()
    raise RecipeError(f"runs/{name}-{time_text} and 999 more like it exist; name a folder with --out")
