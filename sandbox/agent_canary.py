"""The proof that a box is as it was at its start: taken after the cleaning, by looking again at everything.

The cleaning may fail in a way that nobody thought of; what this finds is what the next trajectory would find. Standard
library only, Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat

from quintain.sandbox.agent_processes import own_condition

IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
IOPRIO_WHO_PROCESS = 1


class Canary:
    """What the box was like at its start, to compare with."""

    def __init__(self, processes, folders):
        """`folders`: each an open `Folder`."""
        self.processes = processes
        self.folders = list(folders)
        self.start = self.look()

    def look(self):
        """Everything about the box that a job can change without leaving a file or a process."""
        seen = {"limits, priority or CPUs of the agent": own_condition(), "I/O priority of the agent": _io_priority()}
        for folder in self.folders:
            status = os.fstat(folder.fd)
            seen["owner or mode of " + folder.path] = (status.st_dev, status.st_uid, status.st_gid, status.st_mode)
        if self.processes.private:
            with open("/proc/self/mountinfo") as file:
                seen["mounts"] = file.read()
        return seen

    def problems(self):
        """What is not as at the start; empty where the box is proved clean."""
        self._restore_modes()
        now = self.look()
        found = [f"{what} changed" for what, before in self.start.items() if now[what] != before]
        for folder in self.folders:
            names = os.listdir(folder.fd)
            if names:
                found.append(f"{folder.path} holds {names[:3]!r}")
            with contextlib.suppress(OSError):
                found += [f"{folder.path} has the attribute {name}" for name in os.listxattr(folder.fd)]
        if self.processes.private:
            found += [f"process {pid} is there" for pid in self.processes.others()]
            found += _ipc_objects()
            if not os.statvfs("/").f_flag & os.ST_RDONLY:
                found.append("the root file system is writable, so nothing can vouch for it")
        return found

    def _restore_modes(self):
        for folder in self.folders:
            mode, status = self.start["owner or mode of " + folder.path][3], os.fstat(folder.fd)
            if status.st_mode != mode and status.st_uid == os.getuid():
                os.fchmod(folder.fd, stat.S_IMODE(mode))


def _ipc_objects():
    found = []
    with contextlib.suppress(FileNotFoundError):
        found += [f"message queue {name}" for name in os.listdir("/dev/mqueue")]
    for kind in ("shm", "sem", "msg"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sysvipc/{kind}") as file:
            found += [f"System V {kind} {line.split()[1]}" for line in file.readlines()[1:]]
    return found


def _io_priority():
    number = IOPRIO_GET.get(platform.machine())
    return None if number is None else ctypes.CDLL(None).syscall(number, IOPRIO_WHO_PROCESS, 0)
