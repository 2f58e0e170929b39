"""ExecBox: a Docker box that also runs commands through the engine's own exec, 50 times slower than by the agent.

Two cases take that path:

- `user=`: a command as another user of an ordinary box. Its exit code is the engine's; past the deadline every process
  of that user is killed, then the agent kills the rest. Output beyond the cap is counted, but in no file.
- an image without python3. PID 1 is a shell that only sweeps (`kill -9 -1` when told) and ends when its owner does.

| guarantee                               | agent          | exec, `user=`  | exec, no python3                         |
|-----------------------------------------|----------------|----------------|------------------------------------------|
| exit code and output can't be forged    | not dumpable   | engine's word  | engine's word                            |
| output bounded while it runs, counted   | yes            | yes            | yes                                      |
| more of cut output in a file of the box | yes            | no             | no                                       |
| whole tree dead at deadline + 1 s       | swept by PID 1 | swept, checked | swept, checked with the engine's `top`,  |
|                                         |                |                | else the box is killed (`box_lost`)      |
| `oom_killed`                            | yes            | yes            | no: exit code 137 at most                |
| used again after `reset`                | once proved    | once proved    | never: a job may have tampered with the  |
|                                         | clean          | clean          | shell, which can't be proved not to be   |
| ended with its owner                    | stream, lease  | stream, lease  | stream                                   |
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

from quintain.sandbox.agent_sandbox import GRACE_S
from quintain.sandbox.arguments import check_exec
from quintain.sandbox.base import ExecResult, FileEntry, SandboxDied, SandboxError, SandboxUnavailable
from quintain.sandbox.channel import Channel
from quintain.sandbox.docker.attach import Attachment
from quintain.sandbox.docker.box import WORK, DockerSandbox, ProgramMissing
from quintain.sandbox.docker.exec_stream import Answer, never_ran, run_by_engine
from quintain.sandbox.docker.relay_exec import BoxRelay
from quintain.sandbox.docker.shell_files import LIST, READ, WRITE, entries_of, raise_file_error
from quintain.sandbox.output import exec_result

SWEEPER = """trap hit=1 CHLD
while :; do
  hit=
  if read -r word; then [ "$word" != sweep ] || kill -9 -1; else :; [ "$hit" ] || exit 0; fi
  jobs
done >/dev/null 2>&1
"""
"""A child's end interrupts `read` (and sets `hit`, unlike the end of the stream), and `jobs` reaps. It never forks: a
full process table is no trouble to it."""
KILL_ALL = ["/bin/sh", "-c", "kill -9 -1"]
SWEEP_TRIES, SWEEP_PAUSE_S = 6, 0.05
MAX_LINE_BYTES = 2**17 - 1
_without_python: set[tuple[str, str]] = set()
"""(engine, image) of which a box has shown that there is no python3: the next box need not try."""


class ExecBox(DockerSandbox):
    """A `DockerSandbox` with `user=`, and for images without python3; the module says what each way guarantees."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.python_missing = (self._engine.url, self._image) in _without_python
        self._other_users: set[str] = set()
        self.relay: BoxRelay | None = None
        """Carries the box's connections to the proxy, with `network=proxy`."""

    async def _start(self) -> None:
        self._check_relay_possible()
        try:
            await super()._start()
        except ProgramMissing:
            if self.python_missing:
                raise
            await self._remove()
            self.python_missing = True
            self._check_relay_possible()
            self.id += "-sh"  # the engine may still hold the first name
            await super()._start()
            _without_python.add((self._engine.url, self._image))

    def _check_relay_possible(self) -> None:
        if self.python_missing and self.config.network == "proxy":
            raise SandboxUnavailable(
                f"sandbox.network=proxy needs quintain's agent in the box, which image {self._image} can't run: use an "
                "image with python3 (and a runtime that shuts the agent to jobs), or set sandbox.network=none"
            )

    async def stop(self) -> None:
        """As `DockerSandbox.stop`."""
        if self.relay is not None:
            self.relay.close()
        await super().stop()

    def _first_process(self) -> list[str]:
        return ["/bin/sh", "-c", SWEEPER] if self.python_missing else super()._first_process()

    def _channel_over(self, attachment: Attachment) -> Channel:
        if self.python_missing:
            return SweeperChannel(self, attachment)
        return super()._channel_over(attachment)

    @property
    def reusable(self) -> bool:
        """As `DockerSandbox.reusable`; a box without an agent never is."""
        return super().reusable and not self.python_missing

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
        """As `Sandbox.exec`; the module says what the engine's way guarantees."""
        if self.relay is not None and self.alive:
            await self.relay.ensure()
        if user is None and not self.python_missing:
            return await super().exec(command, timeout_s=timeout_s, stdin=stdin, cwd=cwd, env=env)
        deadline_s = self.config.exec_timeout_s if timeout_s is None else timeout_s
        check_exec(command, timeout_s=deadline_s, stdin=stdin, cwd=cwd, env=env, user=user)
        if user is not None:
            self._other_users.add(user)
        killed_before = await self._num_oom_kills()
        answer, bodies = await self._by_engine(
            command, stdin=stdin, cwd=cwd, env=env, user=user, timeout_s=deadline_s, limit=self.config.max_output_bytes
        )
        if answer["left"]:
            await self._kill(f"what a command left can't be undone: {answer['left'][:10]}")
        else:
            answer["oom_killed"] = await self._num_oom_kills() > killed_before
        return exec_result(answer, bodies, self.config.max_output_bytes)

    async def _by_engine(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        limit: int,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Answer:
        if not self.alive:
            reason = self._channel.broken if self._channel is not None else "it is not running"
            raise SandboxDied(f"box {self.id} is gone: {reason}")
        if isinstance(command, str):
            argv = ["/bin/sh", "-c", command]
            if len(command.encode("utf-8", "surrogateescape")) > MAX_LINE_BYTES and not stdin:
                argv, stdin = ["/bin/sh", "-s"], command.encode("utf-8", "surrogateescape")
        else:
            argv = list(command)
        problem = "no command" if not argv else "an embedded null byte" if any("\0" in part for part in argv) else None
        if problem:
            return never_ran(f"cannot run {argv[:1]}: {problem}", limit)
        try:
            return await run_by_engine(
                self._engine,
                self.id,
                argv,
                cwd=os.path.join(WORK, cwd or ""),
                env=env or {},
                user=user or "",
                stdin=stdin,
                timeout_s=timeout_s,
                limit=limit,
                sweep=self._sweep,
            )
        except SandboxDied as died:
            self.give_up(str(died))
            raise

    async def _num_oom_kills(self) -> int:
        if self.python_missing:
            return 0
        answer, _ = await self._request({"op": "ping"}, timeout_s=GRACE_S)
        return answer["oom_kills"]

    async def _sweep(self) -> list[Any]:
        """End every process but PID 1; those that could not be."""
        for name in sorted(self._other_users):
            await self._kill_all_of(name)
        left: list[Any] = []
        for _ in range(SWEEP_TRIES):  # what was killed by others than the agent takes a moment to go
            answer, _ = await self._request({"op": "sweep", "timeout_s": 0.5}, timeout_s=GRACE_S)
            left = answer["left"]
            if not left or self.python_missing:
                break
            await asyncio.sleep(SWEEP_PAUSE_S)
        return left

    async def _kill_all_of(self, name: str) -> None:
        def kill(client: Any) -> None:
            client.exec_start(client.exec_create(self.id, KILL_ALL, user=name)["Id"])

        await self._engine.call(f"end the processes of {name}", kill)

    async def _kill(self, reason: str) -> None:
        """End the box, since what runs in it can't be ended otherwise."""
        self.give_up(reason)
        await self._engine.call("kill a box", lambda client: client.kill(self.id))

    async def reset(self) -> None:
        """As `DockerSandbox.reset`; processes of other users and the relay are ended first."""
        if self.relay is not None:
            self.relay.close()
        if self.python_missing:
            self.give_up("its image has no python3, so it can't be proved clean")
            raise SandboxDied(f"box {self.id} is not used again: its image has no python3, so it can't be proved clean")
        try:
            if self._other_users:
                await self._sweep()
        except SandboxError as error:
            self.give_up(f"processes of other users could not be ended: {error}")
            raise SandboxDied(f"box {self.id} is not used again: {error}") from error
        self._other_users.clear()
        await super().reset()

    async def _file_operation(self, script: str, path: str, *arguments: str, stdin: bytes = b"", limit: int) -> bytes:
        if "\0" in path:
            raise ValueError(f"{path!r}: embedded null byte")
        answer, (stdout, stderr) = await self._by_engine(
            ["/bin/sh", "-c", script, "sh", path, *arguments],
            stdin=stdin,
            env={"LC_ALL": "C"},
            timeout_s=self.config.exec_timeout_s + GRACE_S,
            limit=limit,
        )
        if answer["timed_out"]:
            raise OSError(errno.ETIMEDOUT, "the box did not answer", path)
        raise_file_error(answer["exit_code"], bytes(stderr), path)
        if answer["totals"][0] > limit:
            raise ValueError(f"{path} holds more than fits an answer of {limit} bytes")
        return bytes(stdout)

    async def _read_chunk(
        self, path: str, offset: int, length: int, *, follow: bool = True
    ) -> tuple[int, bytes | bytearray]:
        if not self.python_missing:
            return await super()._read_chunk(path, offset, length, follow=follow)
        numbers = (str(offset + 1), str(length), "" if follow else "no")
        data = await self._file_operation(READ, path, *numbers, limit=length + 64)
        size, _, chunk = data.partition(b"\n")
        return int(size), chunk

    async def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """As `Sandbox.write_file`."""
        if not self.python_missing:
            await super().write_file(path, data, mode=mode)
            return
        content = data.encode("utf-8") if isinstance(data, str) else data
        await self._file_operation(WRITE, path, f"{mode:o}", stdin=content, limit=1024)

    async def list_folder(self, path: str = ".", *, max_entries: int = 10_000) -> tuple[FileEntry, ...]:
        """As `Sandbox.list_folder`."""
        if not self.python_missing:
            return await super().list_folder(path, max_entries=max_entries)
        data = await self._file_operation(LIST, path, str(max_entries + 1), limit=512 * (max_entries + 1))
        entries = entries_of(data)
        if len(entries) > max_entries:
            raise ValueError(f"{path} holds more than max_entries={max_entries} entries")
        return entries


class SweeperChannel(Channel):
    """To a shell as PID 1: told to sweep, it says nothing, since a job could say it as well; the engine is asked."""

    def __init__(self, box: ExecBox, attachment: Attachment) -> None:
        super().__init__(attachment.reader, attachment.write, box=box.id)
        self._of = box
        self._tell = attachment.write

    async def request(
        self, header: Mapping[str, Any], body: bytes = b"", *, timeout_s: float
    ) -> tuple[dict, bytearray]:
        """`ping` and `sweep`, as the agent answers them."""
        if self.broken is not None:
            raise SandboxDied(f"box {self._of.id} is gone: {self.broken}")
        try:
            async with asyncio.timeout(timeout_s):
                left = await self._sweep() if header["op"] == "sweep" else await self._others(check=True)
        except (SandboxError, TimeoutError) as error:
            self.broken = f"the engine does not vouch for it: {error}"
            raise SandboxDied(f"box {self._of.id} died: {self.broken}") from error
        return {"left": left}, bytearray()

    async def _sweep(self) -> list[Any]:
        left: list[Any] = []
        for _ in range(SWEEP_TRIES):
            self._tell(b"sweep\n")
            await asyncio.sleep(SWEEP_PAUSE_S)
            left = await self._others()
            if not left:
                break
        return left

    async def _others(self, *, check: bool = False) -> list[Any]:
        """Process ids of the box, on the engine's machine, but PID 1's; with `check` only that it runs."""
        engine, name = self._of._engine, self._of.id
        state = await engine.call("look at a box", lambda client: client.inspect_container(name)["State"])
        if not state["Running"]:
            raise SandboxDied(f"box {name} is not running any more")
        if check:
            self._tell(b"look\n")
            return []
        top = await engine.call("list a box's processes", lambda client: client.top(name, "-eo pid,stat,comm"))
        return [
            row[0] for row in top["Processes"] or [] if row[0] != str(state["Pid"]) and row[1][:1] not in ("Z", "X")
        ]
