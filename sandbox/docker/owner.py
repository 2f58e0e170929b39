"""Who owns a container, network or volume: labels that let a later run tell what a dead process left from a live one's.

A pid alone says little (it is reused, and another pid namespace has its own), so the labels hold the machine with its
pid namespace, the pid, and the process's start time together with the boot it belongs to.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

RUN, HOST, PID, STARTED = "quintain.run", "quintain.host", "quintain.pid", "quintain.started"
POOL, LEASE_S, NETWORK = "quintain.pool", "quintain.lease_s", "quintain.network"
"""Of which pool of its owner, how long a box lives without a word of it, and which network its recipe chose."""


def labels_of_this_process(run: str) -> dict[str, str]:
    """The labels of everything that this process makes for `run`."""
    pid = os.getpid()
    return {RUN: run, HOST: _host(), PID: str(pid), STARTED: _started(pid) or "unknown"}


def owner_is_dead(labels: Mapping[str, str]) -> bool:
    """True where the labels name a process of this machine that is gone; False where it lives or nobody can tell."""
    pid = labels.get(PID, "")
    if labels.get(HOST) != _host() or not pid.isdigit():
        return False
    return _started(int(pid)) != labels.get(STARTED)


def owner_state(labels: Mapping[str, str]) -> str:
    """`this process`, `alive`, `dead`, or `another machine` (whose processes can't be seen from here)."""
    if labels.get(HOST) != _host():
        return "another machine"
    if owner_is_dead(labels):
        return "dead"
    return "this process" if labels.get(PID) == str(os.getpid()) else "alive"


def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{platform.node()} {namespace}"


def _started(pid: int) -> str | None:
    """Boot and start time of a process, None where it is gone (or a zombie, which does nothing any more)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in (b"Z", b"X") else f"{boot} {fields[19].decode()}"
