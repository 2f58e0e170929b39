"""Docker engines of a test's own, which it may kill: real ones, each with its own socket, data and control groups."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "testbed" / "engine.sh"


class PrivateEngine:
    """`start`, `kill`, `start` again, …, `purge`. Example: ``PrivateEngine("a")``"""

    def __init__(self, name: str, options: str = "", pid: int | None = None) -> None:
        """`options`: more of them for dockerd. `pid`: of the test process that it belongs to, if not this one."""
        tag = f"quintain-test-{name}-{pid or os.getpid()}"
        self.run = Path("/run") / tag
        self.url = f"unix://{self.run}/docker.sock"
        self._environment = {
            **os.environ,
            "QUINTAIN_TEST_ENGINE_PRIVATE": "1",
            "QUINTAIN_TEST_ENGINE_ROOT": f"/var/lib/{tag}",
            "QUINTAIN_TEST_ENGINE_RUN": str(self.run),
            "QUINTAIN_TEST_ENGINE_OPTIONS": options,
        }

    def _script(self, command: str) -> None:
        done = subprocess.run([SCRIPT, command], env=self._environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start it; before that, end those of test processes that were killed."""
        for run in self.run.parent.glob("quintain-test-*-*"):
            name, _, pid = run.name.removeprefix("quintain-test-").rpartition("-")
            if pid.isdigit() and not _runs(int(pid)):
                PrivateEngine(name, pid=int(pid)).purge()
        self._script("start")

    def kill(self) -> None:
        """SIGKILL of the daemon, and of its containerd, as an out-of-memory kill of the service would."""
        pids = [int((self.run / name).read_text()) for name in ("docker.pid", "exec/containerd/containerd.pid")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while any(_runs(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.02)

    def purge(self) -> None:
        self._script("purge")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
