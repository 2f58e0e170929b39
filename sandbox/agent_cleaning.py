"""What the agent empties at reset: folders of any shape, message queues, System V objects.

Standard library only, Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat

NOT_STORAGE = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue")


def empty_folder(top):
    """Delete all that is in `top`, of any depth: sub-folders move up to `top` first, so no path ever gets long.

    Raises OSError. Links are removed, never followed; no other process may run.
    """
    if os.stat(top).st_uid == os.getuid():
        os.chmod(top, os.stat(top).st_mode | 0o700)
    number = 0
    while True:
        names = os.listdir(top)
        if not names:
            break
        for name in names:
            path = os.path.join(top, name)
            if not _is_folder(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for child in os.listdir(path):
                inner = os.path.join(path, child)
                if _is_folder(inner):
                    os.chmod(inner, 0o700)  # a folder that is not writable cannot be moved
                    number += 1
                    os.rename(inner, os.path.join(top, f".{number}.emptying.{os.urandom(4).hex()}"))
                else:
                    os.unlink(inner)
            os.rmdir(path)
    with contextlib.suppress(OSError):
        for name in os.listxattr(top):
            os.removexattr(top, name)


def remove_ipc():
    """Remove message queues and System V objects, which outlive their makers; what could not be removed."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/dev/mqueue"):
            os.unlink(os.path.join("/dev/mqueue", name))
    problems = []
    libc = ctypes.CDLL(None, use_errno=True)
    removers = {
        "shm": lambda number: libc.shmctl(number, 0, None),
        "sem": lambda number: libc.semctl(number, 0, 0),
        "msg": lambda number: libc.msgctl(number, 0, None),
    }
    for kind, remove in removers.items():
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sysvipc/{kind}") as file:
            for line in file.readlines()[1:]:
                if remove(int(line.split()[1])) != 0:
                    problems.append(f"System V {kind} {line.split()[1]} can't be removed")
    return problems


def writable_mounts():
    """Mount points of storage that this user may write to; never the root, which holds what the box runs on."""
    found = []
    with open("/proc/self/mounts") as file:
        for line in file:
            _, path, kind, flags = line.split()[:4]
            path = path.encode().decode("unicode_escape")
            if path == "/" or kind in NOT_STORAGE or "rw" not in flags.split(",") or not os.path.isdir(path):
                continue
            if os.access(path, os.W_OK | os.X_OK):
                found.append(path)
    return found


def _is_folder(path):
    return stat.S_ISDIR(os.lstat(path).st_mode)
