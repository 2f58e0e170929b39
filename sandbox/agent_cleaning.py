"""What the agent empties at reset: folders of any shape, message queues, System V objects.

Standard library only, Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat

FOLDER_ONLY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NOT_STORAGE = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue")


class Folder:
    """A writable folder of the box, held open from the start: what a job puts in its place is never taken for it."""

    def __init__(self, path):
        """Before any job: a link in `path` is the box's own."""
        self.path = os.path.realpath(path)
        self.fd = os.open(self.path, FOLDER_ONLY)

    def check_in_place(self):
        """Raise OSError where the path leads to something else now, a link above all."""
        here, ours = os.lstat(self.path), os.fstat(self.fd)
        if (here.st_dev, here.st_ino) != (ours.st_dev, ours.st_ino):
            raise OSError("something else was put in its place")

    def empty(self):
        """Delete all that is in it. Raises OSError, and touches nothing where it is not in its place."""
        self.check_in_place()
        empty_folder(self.fd)

    def remove(self):
        """Delete it, or the link in its place. Raises OSError."""
        if os.path.islink(self.path):
            os.unlink(self.path)
            return
        self.empty()
        os.rmdir(self.path)


def empty_folder(top):
    """Delete all that is in the open folder `top`, of any depth: sub-folders move up to it first, so no path gets long.

    Raises OSError. Links are removed, never followed; no other process may run.
    """
    status = os.fstat(top)
    if status.st_uid == os.getuid():
        os.fchmod(top, stat.S_IMODE(status.st_mode) | 0o700)
    number = 0
    while True:
        names = os.listdir(top)
        if not names:
            break
        for name in names:
            if not _is_folder(name, top):
                os.unlink(name, dir_fd=top)
                continue
            os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, FOLDER_ONLY, dir_fd=top)
            try:
                for child in os.listdir(inner):
                    if not _is_folder(child, inner):
                        os.unlink(child, dir_fd=inner)
                        continue
                    os.chmod(child, 0o700, dir_fd=inner)  # a folder that is not writable cannot be moved
                    number += 1
                    moved = f".{number}.emptying.{os.urandom(4).hex()}"
                    os.rename(child, moved, src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
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


def _is_folder(name, parent):
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
