"""One command through the engine's own exec, with bounded output and a deadline: 50 times slower than the agent.

    POST /containers/ID/exec -> id      POST /exec/ID/start -> a stream of frames      GET /exec/ID/json -> exit code

The exit code is the engine's word, which no process of the box can forge. What ends the command past its deadline is
the caller's affair (`sweep`): the engine has no call for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import docker

from quintain.sandbox.agent_output import Kept
from quintain.sandbox.base import SandboxDied, SandboxError
from quintain.sandbox.docker.attach import Attachment, StreamRefused, upgrade
from quintain.sandbox.docker.engine import Engine, EngineError

STDERR = 2
POLL_S = 0.25
LAST_OUTPUT_S = 0.1
"""How long output may still arrive after the command has ended, where a child of it holds the stream open."""
WRAPPER = 'echo 1000 >/proc/self/oom_score_adj; cd -- "$0" 2>&3 || exit 126; exec "$@" 2>&3 3>&-'
Answer = tuple[dict[str, Any], tuple[bytearray, bytearray]]
NEVER_RAN = (b"OCI runtime exec failed", b"unable to start container process", b"unable to find ")


class ExecStream(Attachment):
    """Keeps head and tail of both streams, and says when they have ended."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.outputs = (Kept(limit), Kept(limit))
        self.ended = asyncio.Event()

    def deliver(self, stream: int, payload: bytes) -> None:
        """Take a piece of output."""
        self.outputs[stream == STDERR].add(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


async def run_by_engine(
    engine: Engine,
    container: str,
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    user: str,
    stdin: bytes,
    timeout_s: float,
    limit: int,
    sweep: Callable[[], Awaitable[list[Any]]],
) -> Answer:
    """Header as the agent's `exec` answers, and what was kept of stdout and of stderr: two bodies, so that a flood of
    both is in memory once. Raises SandboxDied, SandboxError."""
    started = time.monotonic()
    deadline = started + timeout_s
    stream = ExecStream(limit)
    try:
        exec_id = await _start(engine, container, _wrapped(argv, cwd), env, user, stdin, stream)
    except (StreamRefused, EngineError) as error:
        await _check_alive(engine, container, error)
        if isinstance(error, EngineError):
            raise
        stream.outputs[1].add(f"{error}\n".encode())  # no such user
        return _answer(stream, 126, False, [], started)
    timed_out, left = False, []
    try:
        while not stream.ended.is_set():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                timed_out, left = True, await sweep()
                await _wait(stream, LAST_OUTPUT_S)
                break
            await _wait(stream, min(left_s, POLL_S))
            if not stream.ended.is_set() and not (await _inspect(engine, exec_id))["Running"]:
                await _wait(stream, LAST_OUTPUT_S)
                break
    finally:
        stream.close()
    if timed_out:
        return _answer(stream, 137, True, left, started)
    exit_code = (await _inspect(engine, exec_id)).get("ExitCode")
    if exit_code is None or exit_code == 137:  # the engine says 137 of a command whose box went away, too
        await _check_alive(engine, container, None)
    if exit_code is None:
        raise SandboxDied(f"box {container}: the engine does not know how a command ended")
    return _answer(stream, exit_code, False, [], started)


async def _start(
    engine: Engine,
    container: str,
    argv: list[str],
    env: Mapping[str, str],
    user: str,
    stdin: bytes,
    stream: ExecStream,
) -> str:
    def create(client: docker.APIClient) -> str:
        return client.exec_create(container, argv, stdin=bool(stdin), user=user, environment=dict(env), workdir="/")[
            "Id"
        ]

    exec_id = await engine.call("prepare a command", create)
    path = f"/v{engine.api_version}/exec/{exec_id}/start"
    body = json.dumps({"Detach": False, "Tty": False}).encode()
    await upgrade(engine.url, path, stream, what="run a command", body=body, tls=engine.address.ssl_context)
    if stdin:
        stream.write(stdin)
        if not stream.can_end_input():
            raise SandboxError(f"box {container}: stdin for a command of another user can't be ended over TLS")
        stream.end_input()
    return exec_id


def _wrapped(argv: Sequence[str], cwd: str) -> list[str]:
    """The command, with its children first to go where memory runs out, in its folder, found by the box's own PATH."""
    return ["/bin/sh", "-c", f"exec 3>&2 2>/dev/null; {WRAPPER}", cwd, *argv]


def never_ran(reason: str, limit: int) -> Answer:
    """As `run_by_engine`, of a command that could not even be asked for."""
    stream = ExecStream(limit)
    stream.outputs[1].add(f"{reason}\n".encode())
    return _answer(stream, 126, False, [], time.monotonic())


def _answer(stream: ExecStream, exit_code: int, timed_out: bool, left: list[Any], started: float) -> Answer:
    stdout, stderr = stream.outputs
    if exit_code in (126, 127) and stdout.data.startswith(NEVER_RAN):
        stdout, stderr = stderr, stdout
    answer = {
        "exit_code": exit_code,
        "timed_out": timed_out,
        "oom_killed": False,
        "left": left,
        "duration_s": time.monotonic() - started,
        "totals": [stdout.total, stderr.total],
        "heads": [stdout.head_bytes, stderr.head_bytes],
        "spilled": [None, None],
    }
    return answer, (stdout.whole(), stderr.whole())


async def _wait(stream: ExecStream, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(stream.ended.wait(), timeout_s)
    except TimeoutError:
        return


async def _inspect(engine: Engine, exec_id: str) -> dict[str, Any]:
    return await engine.call("look at a command", lambda client: client.exec_inspect(exec_id))


async def _check_alive(engine: Engine, container: str, error: SandboxError | None) -> None:
    """Raises SandboxDied where the container is gone."""
    try:
        inspected = await engine.call("look at a box", lambda client: client.inspect_container(container))
    except EngineError as gone:
        if gone.status == 404:
            raise SandboxDied(f"box {container} died: it is gone ({error or gone})") from error
        raise
    if not inspected["State"]["Running"]:
        raise SandboxDied(f"box {container} died: it is not running any more ({error or 'exec ended with it'})")
