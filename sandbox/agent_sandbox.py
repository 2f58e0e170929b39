"""What both kinds of box share: the `Sandbox` operations, spoken to the agent inside over a channel.

A kind adds `start` (get an agent running and open a channel to it) and `stop`. Output cut in the middle carries a
marker, so that nobody reads it as complete.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintain.sandbox import (
    agent,
    agent_canary,
    agent_cleaning,
    agent_exec,
    agent_files,
    agent_frames,
    agent_lease,
    agent_output,
    agent_processes,
)
from quintain.sandbox.arguments import check_exec, check_number, check_path
from quintain.sandbox.base import CopyReport, ExecResult, FileEntry, SandboxDied, SandboxUnavailable
from quintain.sandbox.channel import Channel
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.copy_out import CopyTarget, copy_tree
from quintain.sandbox.output import bodies_of, exec_result

GRACE_S = 10.0
"""How long past a request's own deadline the agent may take to answer, on a busy machine."""
RESET_TIMEOUT_S = 15.0


AGENT_MODULES = (
    agent_frames,
    agent_processes,
    agent_cleaning,
    agent_canary,
    agent_lease,
    agent_output,
    agent_files,
    agent_exec,
    agent,
)
"""The agent's modules, each after those that it imports."""
BOOTSTRAP = """
import sys, types
for name, source in {sources!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, "<" + name + ">", "exec"), module.__dict__)
module.main()
"""


def agent_command(python: str, options: str) -> list[str]:
    """The command line that runs the agent: isolated, without site packages, writing no byte code."""
    packages = [("quintain", ""), ("quintain.sandbox", "")]
    sources = packages + [(module.__name__, inspect.getsource(module)) for module in AGENT_MODULES]
    return [python, "-I", "-S", "-B", "-c", BOOTSTRAP.format(sources=sources), options]


class AgentSandbox:
    """A box with quintain's agent inside. `start`, use, `reset`, …, `stop`; all on the background loop."""

    kind = "agent"

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.id = f"{self.kind}-{secrets.token_hex(6)}"
        self._channel: Channel | None = None

    @property
    def alive(self) -> bool:
        """Whether the box has been started and its channel still works."""
        return self._channel is not None and self._channel.broken is None

    async def start(self) -> None:
        """Create the box and wait until it answers. Raises SandboxError."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Remove the box. Idempotent."""
        raise NotImplementedError

    async def _request(
        self, header: Mapping[str, Any], body: bytes = b"", *, timeout_s: float
    ) -> tuple[dict, bytearray]:
        if self._channel is None:
            raise SandboxDied(f"box {self.id} is not running: start it first")
        return await self._channel.request(header, body, timeout_s=timeout_s)

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
        """As `Sandbox.exec`."""
        if user is not None:
            raise SandboxUnavailable(f"box {self.id} runs every command as its own user, so user={user!r} can't be had")
        deadline_s = self.config.exec_timeout_s if timeout_s is None else timeout_s
        check_exec(command, timeout_s=deadline_s, stdin=stdin, cwd=cwd, env=env, user=user)
        header = {
            "op": "exec",
            "command": command if isinstance(command, str) else list(command),
            "timeout_s": float(deadline_s),
            "cwd": cwd,
            "env": dict(env or {}),
            "max_output_bytes": self.config.max_output_bytes,
            "max_spill_bytes": self.config.max_spill_bytes,
        }
        answer, body = await self._request(header, stdin, timeout_s=deadline_s + GRACE_S)
        if "error" in answer:
            self.give_up(f"it could not be asked to run a command: {answer['error']['message']}")
            raise SandboxDied(f"box {self.id} is not used again: {self._channel.broken if self._channel else ''}")
        if answer["left"]:
            self.give_up(f"what a command left can't be undone (processes, or a changed agent): {answer['left'][:10]}")
        return exec_result(answer, bodies_of(answer, body), self.config.max_output_bytes)

    def give_up(self, reason: str) -> None:
        """Make every later call raise SandboxDied."""
        if self._channel is not None:
            self._channel.broken = reason

    async def read_file(self, path: str, *, max_bytes: int = 2**20) -> bytes:
        """As `Sandbox.read_file`."""
        check_number("max_bytes", max_bytes, 0)
        data = bytearray()
        while True:
            wanted = min(agent_frames.FILE_CHUNK_BYTES, max_bytes + 1 - len(data))
            size_bytes, chunk = await self._read_chunk(path, len(data), wanted)
            data += chunk
            if max(len(data), size_bytes) > max_bytes:
                raise ValueError(f"{path} holds more than max_bytes={max_bytes} bytes ({size_bytes})")
            if len(chunk) < wanted:
                return bytes(data)

    async def _read_chunk(
        self, path: str, offset: int, length: int, *, follow: bool = True
    ) -> tuple[int, bytes | bytearray]:
        """The file's size, and a chunk of it."""
        check_path(path)
        header = {"op": "read", "path": path, "offset": offset, "length": length, "follow": follow}
        answer, chunk = await self._request(header, timeout_s=self.config.exec_timeout_s + GRACE_S)
        _raise_file_error(answer, path)
        return answer["size"], chunk

    async def read_text(self, path: str, *, max_bytes: int = 2**20) -> str:
        """As `Sandbox.read_text`."""
        return (await self.read_file(path, max_bytes=max_bytes)).decode("utf-8")

    async def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """As `Sandbox.write_file`."""
        check_path(path)
        check_number("mode", mode, 0, 0o7777)
        content = data.encode("utf-8") if isinstance(data, str) else data
        if not isinstance(content, bytes | bytearray):
            raise TypeError(f"data is a {type(content).__name__}, neither bytes nor str")
        for offset in range(0, max(len(content), 1), agent_frames.FILE_CHUNK_BYTES):
            chunk = content[offset : offset + agent_frames.FILE_CHUNK_BYTES]
            last = offset + len(chunk) == len(content)
            header = {"op": "write", "path": path, "offset": offset, "mode": mode, "last": last}
            answer, _ = await self._request(header, chunk, timeout_s=self.config.exec_timeout_s + GRACE_S)
            _raise_file_error(answer, path)

    async def list_folder(self, path: str = ".", *, max_entries: int = 10_000) -> tuple[FileEntry, ...]:
        """As `Sandbox.list_folder`."""
        check_path(path)
        check_number("max_entries", max_entries, 0)
        header = {"op": "list", "path": path, "limit": max_entries}
        answer, _ = await self._request(header, timeout_s=self.config.exec_timeout_s + GRACE_S)
        _raise_file_error(answer, path)
        if len(answer["entries"]) > max_entries:
            raise ValueError(f"{path} holds more than max_entries={max_entries} entries")
        entries = [
            FileEntry(name=name, kind=kind, size_bytes=size_bytes, mode=mode)
            for name, kind, size_bytes, mode in answer["entries"]
        ]
        return tuple(sorted(entries, key=lambda entry: entry.name))

    async def copy_out(self, path: str, target: Path, *, max_bytes: int = 2**26, max_files: int = 10_000) -> CopyReport:
        """As `Sandbox.copy_out`."""

        async def list_folder(folder: str) -> tuple[FileEntry, ...]:
            return await self.list_folder(folder, max_entries=max_files)

        async def read_chunks(file: str) -> AsyncIterator[bytes]:
            offset = 0
            while True:
                _, chunk = await self._read_chunk(file, offset, agent_frames.FILE_CHUNK_BYTES, follow=False)
                if not chunk:
                    return
                offset += len(chunk)
                yield bytes(chunk)

        await list_folder(path)
        copy = CopyTarget(target, max_bytes=max_bytes, max_files=max_files)
        await copy_tree(path, copy, list_folder, read_chunks)
        return copy.report()

    async def renew(self) -> None:
        """Tell the box that its owner lives. Raises SandboxError."""
        await self._request({"op": "ping"}, timeout_s=GRACE_S)

    async def reset(self) -> None:
        """As `Sandbox.reset`; a box that can't be cleaned counts as dead."""
        answer, _ = await self._request({"op": "reset"}, timeout_s=RESET_TIMEOUT_S)
        problems = answer.get("problems", [answer.get("error")])
        if problems and self._channel is not None:
            self._channel.broken = f"it could not be cleaned: {'; '.join(map(str, problems))}"
            raise SandboxDied(f"box {self.id} is not used again: {self._channel.broken}")


def _raise_file_error(answer: Mapping[str, Any], path: str) -> None:
    error = answer.get("error")
    if error is None:
        return
    if error["errno"] is None:
        raise ValueError(f"{path!r}: {error['message']}")
    raise OSError(error["errno"], error["message"], path)
