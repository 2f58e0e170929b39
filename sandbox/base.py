"""What a sandbox is: the protocol, the result of one command, and the errors.

Two kinds of trouble are kept apart. A *command* that fails, is killed or runs too long is an `ExecResult`: data for the
model. *Our machinery* breaking (no engine, a dead box, a lost channel) is a `SandboxError`: the trajectory ends as an
infrastructure outcome and never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did.

    Example: ``ExecResult(exit_code=0, stdout="85\\n", stderr="", timed_out=False, truncated=False, duration_s=0.002)``
    """

    exit_code: int
    """The process's exit status; a command ended by signal N has `128 + N`, as in a shell."""
    stdout: str
    """Decoded as UTF-8 with replacement; head and tail where `truncated`."""
    stderr: str
    """As `stdout`."""
    timed_out: bool
    """The deadline passed and everything that the command had started was killed; output so far is kept."""
    truncated: bool
    """Some output was cut because it exceeded the cap."""
    duration_s: float
    """Wall clock in the box, seconds."""
    stdout_bytes: int = 0
    """Bytes the command wrote to stdout, cut ones included (0 <= n)."""
    stderr_bytes: int = 0
    """Bytes the command wrote to stderr, cut ones included (0 <= n)."""


class SandboxError(Exception):
    """Our machinery broke. Never raised because a command failed."""


class SandboxUnavailable(SandboxError):
    """No sandbox of the wanted type can be had here; the message names the remedy."""


class SandboxDied(SandboxError):
    """The box or its channel is gone; what ran in it is lost."""


class SandboxTimeout(SandboxError):
    """Our machinery did not answer in time: no free box, or no answer from engine or agent past every deadline."""


class BackgroundLoopError(SandboxError):
    """A blocking sandbox call was made from the background loop itself, where it would wait for ever."""


class Sandbox(Protocol):
    """One box: `start`, then any number of `exec`/file calls and `reset`s, then `stop`. All coroutines run on the
    background loop; blocking code uses `BlockingSandbox`."""

    kind: str
    """`docker` or `local`."""
    id: str
    """Unique in the run; names the box in logs."""

    async def start(self) -> None:
        """Create the box and wait until it answers. Raises SandboxError."""
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a shell command line (str) or an argv (sequence) in the work folder.

        A missing program is exit code 127, one that cannot be executed 126. Past `timeout_s` (default: the config's)
        every process of the box but PID 1 is killed and `timed_out` is set.
        Raises SandboxDied where the box is gone; never raises because of what the command did.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 2**20) -> bytes:
        """Contents of a file, relative paths from the work folder.

        Raises FileNotFoundError, IsADirectoryError, PermissionError as Python's own `open` would, ValueError where the
        file holds more than `max_bytes`, SandboxDied.
        """
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making missing parent folders. Raises as `read_file`, and OSError (no space)."""
        ...

    async def reset(self) -> None:
        """Make the box clean: no process but PID 1, every writable mount empty, no IPC objects. Raises SandboxDied."""
        ...

    async def stop(self) -> None:
        """Remove the box. Idempotent; never raises for a box that is gone already."""
        ...
