"""LocalSandbox: the agent as a subprocess of this machine. IT ISOLATES NOTHING.

What runs in it runs as this user, with this user's files and network; only the environment variables are withheld, and
a command past its deadline is killed with everything it started. Use it for environments that never run model-written
commands, or on a machine that may be thrown away.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from quintain.sandbox.agent_sandbox import GRACE_S, AgentSandbox, agent_command
from quintain.sandbox.base import SandboxDied, SandboxError
from quintain.sandbox.channel import Channel
from quintain.sandbox.config import SandboxConfig

PASSED_VARIABLES = ("PATH", "LANG")
"""The only variables of this process's environment that a box sees."""
NO_ISOLATION = "the local sandbox isolates nothing: its commands run on this machine with your files and network"


class IsolationWarning(UserWarning):
    """Commands run on the host itself."""


class LocalSandbox(AgentSandbox):
    """A temporary folder and an agent process on this machine; it isolates NOTHING (see the module).

    Example: ``LocalSandbox(SandboxConfig(type="local"), acknowledged=True)``
    """

    kind = "local"

    def __init__(self, config: SandboxConfig, *, acknowledged: bool = False) -> None:
        """`acknowledged`: whoever makes the box tells the user that nothing is isolated, so no warning is given."""
        super().__init__(config)
        self._process: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        if not acknowledged:
            warnings.warn(NO_ISOLATION, IsolationWarning, stacklevel=2)

    async def start(self) -> None:
        """Make the folder and start the agent. Raises SandboxError."""
        self._folder = Path(tempfile.mkdtemp(prefix="quintain-box-"))
        work, temporary = self._folder / "work", self._folder / "tmp"
        work.mkdir()
        temporary.mkdir()
        env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        options = {
            "private": False,
            "work": str(work),
            "folders": [str(work), str(temporary)],
            "env": {"HOME": str(work), "TMPDIR": str(temporary)},
        }
        try:
            self._process = await asyncio.create_subprocess_exec(
                *agent_command(sys.executable, json.dumps(options)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                cwd="/",
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal is for us, not for it
            )
        except OSError as error:
            await self.stop()
            raise SandboxError(f"cannot start the local sandbox's agent with {sys.executable}: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = Channel(self._process.stdout, self._process.stdin.write, box=self.id)
        await self._request({"op": "ping"}, timeout_s=GRACE_S)

    async def stop(self) -> None:
        """End the agent, which ends what it started and removes its folder. Idempotent."""
        process, self._process = self._process, None
        if self._channel is not None:
            self._channel.broken = self._channel.broken or "it was stopped"
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise SandboxDied(f"box {self.id} did not end when asked; what it ran may go on") from None
            finally:
                self._remove_folder()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            if self._folder.is_symlink():  # a job put it there, and where it leads is not ours
                self._folder.unlink()
            shutil.rmtree(self._folder, ignore_errors=True)  # follows no link
            self._folder = None
