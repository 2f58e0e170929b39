"""`aim up` as a context: started, waited for, and ended with everything that it started.

    serve ──own session──> aim up ──> alembic (once), uvicorn ──> its workers

`aim up` does not pass SIGTERM on to uvicorn, which then holds the port for ever. So it gets a session of its own, and
the end is sent to that process group: SIGTERM, and SIGKILL for whoever is left after `_GRACE_S`. Two waits: the page
answers and knows the run (bounded by `within_s`; remedy: the log's tail in the error), and the group is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from quintain.trainer.tracking.tracker import TrackingError

_GRACE_S = 3.0
_AIM = "from aim.cli.cli import cli_entry_point; cli_entry_point()"


@contextmanager
def serve_aim(repo: Path, run_hash: str, *, host: str, port: int, within_s: float = 90.0) -> Iterator[str]:
    """Aim's page for the repository folder `repo` (`.aim`), as a base URL; it knows the run when the block begins.

    `port` 0 takes a free one. Raises TrackingError where the port is taken, or the page is not ready within `within_s`.
    """
    port = _free_port(host, port)
    reached = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    base_url = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
    arguments = ["up", "--yes", "--repo", str(repo.parent), "--host", host, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _AIM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Else the working directory, a checkout of this repository say, would shadow packages in Aim's processes.
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        try:
            _wait_ready(process, base_url, run_hash, within_s, log.fileno())
            yield base_url
        finally:
            with _deaf():
                end_group(process)


@contextmanager
def _deaf() -> Iterator[None]:
    """No signal ends the block: a second Ctrl-C during the clean-up would leave Aim's processes running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process group that `process` leads, and wait until none of its processes runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal_group(process.pid, number)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader
            if not group_members(process.pid):
                return
            time.sleep(0.05)


def group_members(group: int) -> list[int]:
    """Ids of the processes of a group that run; those that ended and wait to be reaped don't count."""
    import psutil  # comes with aim

    members: list[int] = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except ProcessLookupError:
            continue
    return members


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _free_port(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise TrackingError(
                f"{host}:{port} can't be listened on ({error.strerror}); choose another --port"
            ) from error
        return probe.getsockname()[1]


def _wait_ready(process: subprocess.Popen[bytes], base_url: str, run_hash: str, within_s: float, log: int) -> None:
    question = quote(f"run.hash == '{run_hash}'")
    url = f"{base_url}/api/runs/search/run/?q={question}&report_progress=false&exclude_params=true&exclude_traces=true"
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TrackingError(f"`aim up` ended with code {process.returncode}:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.read():  # empty until `aim up` has indexed the run
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise TrackingError(f"Aim's page did not show run {run_hash} within {within_s:.0f} s:\n{_tail(log)}")


def _tail(log: int, most: int = 2000) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, most, max(0, size - most)).decode("utf-8", "replace").strip()
