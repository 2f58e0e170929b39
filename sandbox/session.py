"""A session: commands that share a working folder and exported variables, though each runs in a shell of its own.

    before each command   the state of the last one is read:  export -p, then cd
    after it              it is written anew, by a trap on the shell's exit

The state is a file in the box's folder for temporary files, so a reset ends every session, and what a command did to
that file harms its own session only. Not kept: shell functions, aliases, options, and that one of
the box's own variables was unset. A command
that replaces its shell (`exec`), sets its own exit trap, or is killed leaves the state as it was before it.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping

from quintain.sandbox.base import ExecResult, Sandbox

PROLOGUE = """\
_state="${{TMPDIR:-/tmp}}/{name}"
if [ -r "$_state" ]; then . "$_state"; cd -- "$_cwd"; unset _cwd; else {first}fi
trap '_code=$?; export _cwd="$PWD"; export -p > "$_state.new" && mv -f "$_state.new" "$_state"; exit $_code' EXIT
"""


class Session:
    """Commands whose `cd` and `export` persist. Example: ``session = Session(box); await session.exec("cd /tmp")``"""

    def __init__(self, box: Sandbox, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> None:
        """`cwd` and `env`: where the first command starts, and with what beside the box's own variables."""
        self._box = box
        self._prologue = _prologue(cwd, env)

    async def exec(self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"") -> ExecResult:
        """As `Sandbox.exec`, for a shell command line."""
        return await self._box.exec(self._prologue + command, timeout_s=timeout_s, stdin=stdin)


class BlockingSession:
    """`Session` for synchronous code; made by `BlockingSandbox.session`."""

    def __init__(
        self, run: Callable[..., ExecResult], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """`run`: the box's `exec`."""
        self._run = run
        self._prologue = _prologue(cwd, env)

    def exec(self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"") -> ExecResult:
        """As `BlockingSandbox.exec`, for a shell command line."""
        return self._run(self._prologue + command, timeout_s=timeout_s, stdin=stdin)


def _prologue(cwd: str | None, env: Mapping[str, str] | None) -> str:
    first = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (env or {}).items())
    first += f"cd -- {shlex.quote(cwd)}; " if cwd else ":; "
    return PROLOGUE.format(name=f".session-{secrets.token_hex(6)}", first=first)
