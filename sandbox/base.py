"""What a sandbox is: the protocol, the result of one command, and the errors.

Two kinds of trouble are kept apart. A *command* that fails, is killed or runs too long is an `ExecResult`: data for the
model. *Our machinery* breaking (no engine, a dead box, a lost channel) is a `SandboxError`: the trajectory ends as an
infrastructure outcome and never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What was kept of one stream. Example: ``Output(data=b"85\\n", head_bytes=3, total_bytes=3)``"""

    data: bytes | bytearray
    """Head, then tail."""
    head_bytes: int
    """Length of the head."""
    total_bytes: int
    """Bytes the command wrote, cut ones included."""
    spilled: str = ""
    """Words for the notice: which file in the box holds more."""

    def text(self) -> str:
        """Decoded as UTF-8 with replacement. Where bytes are missing between head and tail a notice goes there, with no
        half characters beside it."""
        if self.total_bytes <= len(self.data):
            return str(self.data, "utf-8", "replace")
        with memoryview(self.data) as view:
            front = _half_at_end(bytes(view[max(self.head_bytes - 4, 0) : self.head_bytes]))
            back = _half_at_start(bytes(view[self.head_bytes : self.head_bytes + 3]))
            cut_bytes = self.total_bytes - len(self.data) + front + back
            head = str(view[: self.head_bytes - front], "utf-8", "replace")
            tail = str(view[self.head_bytes + back :], "utf-8", "replace")
        return f"{head}\n[... {cut_bytes} bytes cut ...]\n{self.spilled}{tail}"


def _half_at_start(data: bytes) -> int:
    """How many bytes at the start go on with a character whose first byte is not there."""
    return next((number for number, byte in enumerate(data) if not 0x80 <= byte < 0xC0), len(data))


def _half_at_end(data: bytes) -> int:
    """How many bytes at the end begin a character that is not whole."""
    for back in range(1, len(data) + 1):
        byte = data[-back]
        if 0xC2 <= byte <= 0xF4:
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needs else 0
        if not 0x80 <= byte < 0xC0:
            return 0
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did.

    `stdout` and `stderr` are text, `raw_stdout` and `raw_stderr` bytes.
    Example: ``ExecResult.of_text(exit_code=0, stdout="85\\n", duration_s=0.002)``
    """

    exit_code: int
    """The process's exit status; a command ended by signal N has `128 + N`, as in a shell."""
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
    stdout_file: str | None = None
    """Path in the box of a file that holds stdout from its start, where it was cut; None where it was not, or where no
    file could be written. The cut's notice names it; it is there until a few later commands have been cut too."""
    stderr_file: str | None = None
    """As `stdout_file`."""
    files_cut: bool = False
    """`stdout_file` or `stderr_file` ends early: at the config's `max_spill_bytes`, or where the box was full."""
    oom_killed: bool = False
    """The kernel killed a process of the box for memory while the command ran (by the box's own cgroup; never known of
    a local box, which has none). The command itself may have survived it: its exit code says."""
    box_lost: bool = False
    """The box can't be used on: a process outlived the deadline, or the command changed PID 1's limits, priority or
    CPUs. Later calls raise SandboxDied, and the pool replaces the box."""
    outputs: tuple[Output, Output] = field(repr=False)
    """What was kept of stdout and of stderr. Text is made of it when it is asked for: a flood is in memory once."""

    @classmethod
    def of_text(
        cls, *, exit_code: int, stdout: str = "", stderr: str = "", timed_out: bool = False, duration_s: float = 0.0
    ) -> ExecResult:
        """A result whose output is whole and known as text, for sandboxes and tests of other packages."""
        raw = [text.encode("utf-8", "surrogateescape") for text in (stdout, stderr)]
        out, err = (Output(data=data, head_bytes=len(data), total_bytes=len(data)) for data in raw)
        return cls(
            exit_code=exit_code,
            timed_out=timed_out,
            truncated=False,
            duration_s=duration_s,
            stdout_bytes=out.total_bytes,
            stderr_bytes=err.total_bytes,
            outputs=(out, err),
        )

    @property
    def stdout(self) -> str:
        """Decoded as UTF-8 with replacement; head and tail with a notice between them where it was cut."""
        return self.outputs[0].text()

    @property
    def stderr(self) -> str:
        """As `stdout`."""
        return self.outputs[1].text()

    @property
    def raw_stdout(self) -> bytes:
        """What was kept of stdout as it was written; where it was cut, head and tail with nothing between them."""
        return bytes(self.outputs[0].data)

    @property
    def raw_stderr(self) -> bytes:
        """As `raw_stdout`."""
        return bytes(self.outputs[1].data)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What `copy_out` did. Example: ``CopyReport(num_files=3, num_bytes=120, skipped=("x: a link",))``"""

    num_files: int
    """Regular files written (0 <= n)."""
    num_bytes: int
    """Bytes in them (0 <= n)."""
    skipped: tuple[str, ...]
    """Each member that was left out, as `path: reason`; at most 1000 of them, then a last one with their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One entry of a folder. Example: ``FileEntry(name="a.txt", kind="file", size_bytes=5, mode=0o644)``"""

    name: str
    """Without the folder; bytes that are no UTF-8 as surrogates, as `os.listdir` gives them."""
    kind: Literal["file", "folder", "link", "other"]
    """`other`: a device, socket or FIFO."""
    size_bytes: int
    """Of the entry itself, not of what a link points at (0 <= n)."""
    mode: int
    """Permission bits."""


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
        user: str | None = None,
    ) -> ExecResult:
        """Run a shell command line (str) or an argv (sequence) in the work folder, in a process of its own: `cd` and
        `export` end with it (see `session`).

        A missing program is exit code 127, one that cannot be executed 126; so is an argument of 128 KiB or more, or
        2 MiB of them, which the kernel refuses (a command *line* may be longer). Past `timeout_s` (default: the
        config's) every process of the box but PID 1 is killed, `timed_out` is set, and the output so far is kept;
        `box_lost` where something survived that. `user` (name or uid) other than the box's own is for Docker boxes and
        takes 50 times longer: see `sandbox/docker/exec_box.py` for what it guarantees.
        Raises SandboxDied where the box is gone; never raises because of what the command did. TypeError or ValueError,
        before anything is sent, for what no box can be asked: an argument that is no str, a name or NUL that `env`
        can't hold, `timeout_s` that is not from 0 to 86,400, a command that takes more than 8 MiB as JSON.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 2**20) -> bytes:
        """Contents of a file, relative paths from the work folder.

        Raises FileNotFoundError, IsADirectoryError, PermissionError as Python's own `open` would, ValueError where the
        file holds more than `max_bytes`, SandboxDied.
        """
        ...

    async def read_text(self, path: str, *, max_bytes: int = 2**20) -> str:
        """As `read_file`, decoded as UTF-8; line ends are kept. Raises also UnicodeDecodeError."""
        ...

    async def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file (text as UTF-8), making missing parent folders. Raises as `read_file`; OSError (no space)."""
        ...

    async def list_folder(self, path: str = ".", *, max_entries: int = 10_000) -> tuple[FileEntry, ...]:
        """What is in a folder, by name. Raises as Python's own `os.scandir` would, ValueError where there are more
        than `max_entries`, SandboxDied."""
        ...

    async def copy_out(self, path: str, target: Path, *, max_bytes: int = 2**26, max_files: int = 10_000) -> CopyReport:
        """Copy a folder of the box to the new folder `target` of this machine: regular files and folders only.

        No link is made and none followed, nothing is written outside `target`; what is left out (links, devices, what
        can't be read, what exceeds the limits) is logged and in the report. Raises FileExistsError where `target` is
        there, and as `list_folder` for `path` itself.
        """
        ...

    async def reset(self) -> None:
        """Make the box clean: no process but PID 1, every writable mount empty, no IPC objects. Raises SandboxDied."""
        ...

    async def stop(self) -> None:
        """Remove the box. Idempotent; never raises for a box that is gone already."""
        ...
