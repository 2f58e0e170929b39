"""Takes over the lock that a killed process left on its Aim run, and only that one.

Aim marks an open run by a file `<machine>-<pid>-<time>`. It drops such a lock itself where the process is gone from
the same machine; it waits in vain where the number of the process was given to another one since, or where the lock
came from another host (a restarted container counts as one). A run folder has one writer, so a lock from elsewhere is
taken over, with a message.
"""

from __future__ import annotations

import os
from pathlib import Path

from quintain.trainer.tracking.tracker import TrackingError


def is_stale(lock_path: Path, *, machine_id: int) -> bool:
    """Whether the lock's writer is gone (or can't be asked); False where there is no lock.

    Raises TrackingError where a live process of this machine holds it.
    """
    try:
        content = lock_path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    parts = content.split("-")
    if len(parts) < 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return True  # written half: its process was killed in the middle
    if int(parts[0]) != machine_id:
        return True
    pid = int(parts[1])
    if _wrote(pid, created=float(parts[2])):
        raise TrackingError(
            f"process {pid} is writing to this Aim run ({lock_path}); stop it, or use another run folder (--out)"
        )
    return True


def _wrote(pid: int, *, created: float) -> bool:
    """Whether the process alive under `pid` is the one that made a lock at `created` (and not a later one)."""
    import psutil  # comes with aim

    try:
        return pid == os.getpid() or psutil.Process(pid).create_time() <= created + 1
    except psutil.Error:
        return False
