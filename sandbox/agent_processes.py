"""The agent's hold on processes: what it makes of itself, and finding, reaping and killing all others of the box.

As PID 1 of a container, `kill(-1)` reaches everything else whatever it did (new sessions, fork bombs) and every orphan
is its child. On a host the agent makes itself the reaper of its descendants, so none of them can slip away either.
Standard library only, Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time

KILL_WAIT_S = 5.0
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
OOM_PREFERRED, OOM_NORMAL = b"1000", b"0"
OOM_COUNTS = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
"""Where the box's own cgroup counts its kills: version 1, version 2."""


class Processes:
    """Every process of the box but this one."""

    def __init__(self, private):
        self.private = private
        self.awaited, self.status = None, None

    def reap(self):
        """Collect every child that has ended; True where no child is left at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.awaited:
                self.status = status

    def others(self):
        """Pids of the box but our own: the whole pid namespace, or our descendants on a host."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if self.private:
            return [pid for pid in pids if pid != 1]
        parent_of = {}
        for pid in pids:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                parent_of[pid] = int(file.read().rsplit(b")", 1)[1].split()[1])
        found, frontier = [], {os.getpid()}
        while frontier:
            frontier = {pid for pid, parent in parent_of.items() if parent in frontier}
            found.extend(frontier)
        return found

    def kill_all(self, timeout_s=KILL_WAIT_S):
        """SIGKILL everything until nothing is left; the pids that could not be ended, at once where none may be."""
        deadline = time.monotonic() + timeout_s
        while True:
            # On a host "no child" means "no descendant", since orphans are handed to us: no need to walk /proc.
            left = [] if self.reap() and not self.private else self.others()
            if not left or time.monotonic() > deadline or not any(map(_may_end, left)):
                return left
            if self.private:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.0005)


def _may_end(pid):
    """False for a process of another user, which we have no right to signal."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True


class OomKills:
    """How many processes of the box the kernel has killed for memory, by the count of the box's cgroup."""

    def __init__(self, private):
        self.fd = None
        for path in OOM_COUNTS if private else ():
            with contextlib.suppress(OSError):
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break

    def count(self):
        if self.fd is None:
            return 0
        with contextlib.suppress(OSError):
            for line in os.pread(self.fd, 4096, 0).splitlines():
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
        return 0


def own_condition():
    """What a same-uid process may change about PID 1 without touching its memory: limits, priority, CPUs."""
    limits = []
    for number in range(16):
        with contextlib.suppress(ValueError, OSError):
            limits.append(resource.getrlimit(number))
    return limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)


def become_agent(private):
    """Shut our memory and files to the box, take the orphans, keep the long argument out of `ps`.

    Returns a file to set our own OOM score with, None where it can't be set.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _set_title(b"quintain-agent\0")
    oom_file = None
    if private:
        with contextlib.suppress(OSError):  # can be opened only while we are dumpable
            oom_file = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            if os.pread(oom_file, 16, 0).strip() != OOM_NORMAL:
                oom_file = None
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    if not private:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for PID 1 that is "not delivered"; Python's handler would raise
    return oom_file


def _set_title(title):
    """Overwrite our arguments in memory, as setproctitle(3) does."""
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/self/stat", "rb") as file:
        start, end = (int(field) for field in file.read().rsplit(b")", 1)[1].split()[45:47])
        if end - start > len(title):
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, title, len(title))
            ctypes.memset(end - 1, 1, 1)  # a last byte other than NUL tells the kernel that this is a title
