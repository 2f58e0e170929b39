"""`ManagedServer`: an SGLang server that the run starts, waits for, starts again and stops.

The server runs from an environment of its own (`launch.python`), in a session of its own, below a tiny watcher that
holds a pipe from us: where we end, however we end, the pipe closes and the watcher kills the whole group. Output goes
to a log file; its tail is part of every error.

It does not know weights beyond what it is started with: who has newer ones sets `model_dir` and `weight_version`, and
`on_restart` brings a restarted server up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from quintain.agents.config import LaunchConfig
from quintain.agents.sglang.answers import EngineError
from quintain.agents.sglang.client import SGLangClient

_LOG = logging.getLogger(__name__)

POLL_S = 0.2
TAIL_LINES = 25
CPU_ARGS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "65536", "--sleep-on-idle"),
)
"""What SGLang needs, or should have, on CPU: without the last the scheduler spins a core while idle."""
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}

WATCHER = """
import os, signal, subprocess, sys
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
def end(*_):
    child.terminate()
signal.signal(signal.SIGTERM, end)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.read(int(sys.argv[1]), 1)
    os.killpg(0, signal.SIGKILL)
os.close(int(sys.argv[1]))
code = child.wait()
os.killpg(0, signal.SIGKILL)
"""
"""Runs the server and, in a second process, waits for the end of our pipe; then, and when the server has ended, kills
the group (the scheduler and the detokenizer are processes of their own, and outlive a main process that was killed)."""

OnRestart = Callable[[SGLangClient], Coroutine[Any, Any, None]]


class ManagedServer:
    """One server process with its children.

    Life cycle: `start` (blocks until it can sample), `restart` as often as `max_restarts` allows, `stop`.
    """

    def __init__(self, launch: LaunchConfig, *, model_dir: Path, log: Path, weight_version: int = 0) -> None:
        self._launch, self._log = launch, log
        self.model_dir = model_dir
        """What the next start serves."""
        self.weight_version = weight_version
        """Of `model_dir`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._port = _free_port()
        self.num_restarts = 0
        self.url = f"http://127.0.0.1:{self._port}"
        """Stays the same over restarts."""

    @property
    def pid(self) -> int | None:
        """The process group; None where nothing runs."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if alive and self._process else None

    async def start(self) -> None:
        """Raises EngineError, with the end of the log, where it ends or can't sample within `start_timeout_s`."""
        self._spawn()
        client = SGLangClient(self.url)
        deadline = time.monotonic() + self._launch.start_timeout_s
        try:
            while not (await client.healthy() and await client.ready()):
                code = self._process.poll() if self._process else None
                if code is not None:
                    raise EngineError(f"the SGLang server ended while it started (exit {code}){self._tail()}")
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the SGLang server could not sample within engine.launch.start_timeout_s = "
                        f"{self._launch.start_timeout_s}{self._tail()}"
                    )
                await asyncio.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        finally:
            await client.close()

    async def restart(self, on_restart: OnRestart | None = None) -> None:
        """Stop what is left and start again; then `on_restart` brings the weights up to date before anyone samples.

        Raises EngineError where it was started again `max_restarts` times already, or does not start.
        """
        if self.num_restarts >= self._launch.max_restarts:
            raise EngineError(
                f"the SGLang server at {self.url} died once more after engine.launch.max_restarts = "
                f"{self._launch.max_restarts} new starts{self._tail()}"
            )
        self.num_restarts += 1
        _LOG.warning("the SGLang server at %s is started again (%d)%s", self.url, self.num_restarts, self._tail(5))
        await asyncio.to_thread(self.stop)
        await self.start()
        if on_restart is not None:
            client = SGLangClient(self.url)
            try:
                await on_restart(client)
            finally:
                await client.close()

    def stop(self) -> None:
        """SIGTERM to the server, SIGKILL to the whole group after `stop_timeout_s`. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(self._launch.stop_timeout_s)
            except subprocess.TimeoutExpired:
                _kill_group(process.pid)
        _kill_group(process.pid)
        process.wait()
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def command(self) -> list[str]:
        """The server's command line."""
        launch = self._launch
        python = launch.python if "/" in launch.python else shutil.which(launch.python)
        if python is None or not Path(python).is_file():
            raise EngineError(f"engine.launch.python: there is no interpreter {launch.python}")
        where = ["--host", "127.0.0.1", "--port", str(self._port), "--weight-version", str(self.weight_version)]
        device = ["--device", launch.device] if launch.device else []
        return [
            *(python, "-m", "sglang.launch_server", "--model-path", str(self.model_dir), *where, *device),
            *("--dtype", launch.dtype, "--log-level", "warning"),
            *(CPU_ARGS if launch.device == "cpu" else ()),
            *launch.extra_args,
        ]

    def _spawn(self) -> None:
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME")}
        env |= CPU_ENV if self._launch.device == "cpu" else {}
        env |= self._launch.env
        self._log.parent.mkdir(parents=True, exist_ok=True)
        read, self._pipe = os.pipe()  # not inheritable: only the watcher gets the reading end
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", WATCHER, str(read), *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=(read,),
                start_new_session=True,
            )
        os.close(read)

    def _tail(self, num_lines: int = TAIL_LINES) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-num_lines:] if self._log.exists() else []
        return "\n".join([f"; the end of {self._log}:", *(f"    {line[:300]}" for line in lines)])


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of it has ended
        os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
