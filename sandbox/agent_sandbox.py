"""What both kinds of box share: the `Sandbox` operations, spoken to the agent inside over a channel.

A kind adds `start` (get an agent running and open a channel to it) and `stop`. Output cut in the middle carries a
marker, so that nobody reads it as complete.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping, Sequence
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
from quintain.sandbox.base import ExecResult, SandboxDied
from quintain.sandbox.channel import Channel
from quintain.sandbox.config import SandboxConfig

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

    async def _request(self, header: Mapping[str, Any], body: bytes = b"", *, timeout_s: float) -> tuple[dict, bytes]:
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
    ) -> ExecResult:
        """As `Sandbox.exec`."""
        deadline_s = self.config.exec_timeout_s if timeout_s is None else timeout_s
        header = {
            "op": "exec",
            "command": command if isinstance(command, str) else list(command),
            "timeout_s": deadline_s,
            "cwd": cwd,
            "env": dict(env or {}),
            "max_output_bytes": self.config.max_output_bytes,
        }
        answer, body = await self._request(header, stdin, timeout_s=deadline_s + GRACE_S)
        parts, offset = [], 0
        for length in answer["lengths"]:
            parts.append(body[offset : offset + length])
            offset += length
        stdout_bytes, stderr_bytes = answer["totals"]
        return ExecResult(
            exit_code=answer["exit_code"],
            stdout=_text(parts[0], parts[1], stdout_bytes),
            stderr=_text(parts[2], parts[3], stderr_bytes),
            timed_out=answer["timed_out"],
            truncated=max(stdout_bytes, stderr_bytes) > self.config.max_output_bytes,
            duration_s=answer["duration_s"],
            stdout_bytes=stdout_bytes,
            stderr_bytes=stderr_bytes,
        )

    async def read_file(self, path: str, *, max_bytes: int = 2**20) -> bytes:
        """As `Sandbox.read_file`."""
        data = bytearray()
        while True:
            wanted = min(agent_frames.FILE_CHUNK_BYTES, max_bytes + 1 - len(data))
            header = {"op": "read", "path": path, "offset": len(data), "length": wanted}
            answer, chunk = await self._request(header, timeout_s=self.config.exec_timeout_s + GRACE_S)
            _raise_file_error(answer, path)
            data += chunk
            if max(len(data), answer["size"]) > max_bytes:
                raise ValueError(f"{path} holds more than max_bytes={max_bytes} bytes ({answer['size']})")
            if len(chunk) < wanted:
                return bytes(data)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """As `Sandbox.write_file`."""
        for offset in range(0, max(len(data), 1), agent_frames.FILE_CHUNK_BYTES):
            header = {"op": "write", "path": path, "offset": offset, "mode": mode}
            chunk = data[offset : offset + agent_frames.FILE_CHUNK_BYTES]
            answer, _ = await self._request(header, chunk, timeout_s=self.config.exec_timeout_s + GRACE_S)
            _raise_file_error(answer, path)

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


def _text(head: bytes, tail: bytes, total: int) -> str:
    """Head and tail as text; where bytes are missing between them, a marker, and no half characters beside it."""
    cut = total - len(head) - len(tail)
    if cut <= 0:
        return (head + tail).decode("utf-8", "replace")
    while head and tail and 0x80 <= tail[0] < 0xC0 and cut < total - len(head) - len(tail) + 4:
        tail = tail[1:]
        if total - len(head) - len(tail) - cut >= 3:
            break
    for back in range(1, min(4, len(head)) + 1):
        if head[-back] >= 0xC0:  # a lead byte: drop it where its character is not complete
            needs = 2 if head[-back] < 0xE0 else 3 if head[-back] < 0xF0 else 4
            head = head[:-back] if back < needs else head
            break
    marker = f"\n[... {total - len(head) - len(tail)} bytes cut ...]\n"
    return head.decode("utf-8", "replace") + marker + tail.decode("utf-8", "replace")


def _raise_file_error(answer: Mapping[str, Any], path: str) -> None:
    error = answer.get("error")
    if error is None:
        return
    if error["errno"] is None:
        raise ValueError(f"{path!r}: {error['message']}")
    raise OSError(error["errno"], error["message"], path)
