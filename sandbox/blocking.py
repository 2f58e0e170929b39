"""A box for synchronous code: what tools are given."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quintain.sandbox.background import background_loop
from quintain.sandbox.base import CopyReport, ExecResult, FileEntry, Sandbox, SandboxError
from quintain.sandbox.session import BlockingSession

T = TypeVar("T")


class BlockingSandbox:
    """The commands and files of a `Sandbox`, blocking. Usable from any thread but the background loop's.

    One comes from `SandboxPool.acquire` and is void after `release`: the box behind it belongs to somebody else then.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox: Sandbox | None = sandbox
        self.kind = sandbox.kind
        self.id = sandbox.id
        self._void = "was given back to its pool; acquire another one"
        self._calls: set[concurrent.futures.Future[Any]] = set()

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """As `Sandbox.exec`. Raises also BackgroundLoopError, and SandboxError after release."""
        box = self._box()
        call = box.exec(command, timeout_s=timeout_s, stdin=stdin, cwd=cwd, env=env, user=user)
        return self._run(call)

    def session(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> BlockingSession:
        """A session of this box, in which `cd` and `export` persist: see `sandbox/session.py`."""
        return BlockingSession(self.exec, cwd=cwd, env=env)

    def read_file(self, path: str, *, max_bytes: int = 2**20) -> bytes:
        """As `Sandbox.read_file`. Raises also BackgroundLoopError, and SandboxError after release."""
        return self._run(self._box().read_file(path, max_bytes=max_bytes))

    def read_text(self, path: str, *, max_bytes: int = 2**20) -> str:
        """As `Sandbox.read_text`. Raises also BackgroundLoopError, and SandboxError after release."""
        return self._run(self._box().read_text(path, max_bytes=max_bytes))

    def list_folder(self, path: str = ".", *, max_entries: int = 10_000) -> tuple[FileEntry, ...]:
        """As `Sandbox.list_folder`. Raises also BackgroundLoopError, and SandboxError after release."""
        return self._run(self._box().list_folder(path, max_entries=max_entries))

    def copy_out(self, path: str, target: Path, *, max_bytes: int = 2**26, max_files: int = 10_000) -> CopyReport:
        """As `Sandbox.copy_out`. Raises also BackgroundLoopError, and SandboxError after release."""
        return self._run(self._box().copy_out(path, target, max_bytes=max_bytes, max_files=max_files))

    def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """As `Sandbox.write_file`. Raises also BackgroundLoopError, and SandboxError after release."""
        self._run(self._box().write_file(path, data, mode=mode))

    @property
    def inner(self) -> Sandbox:
        """The box itself, for coroutines on the background loop; not to be kept. Raises SandboxError after release."""
        return self._box()

    def detach(self) -> None:
        """Make this handle void; the pool does so at release."""
        self._sandbox = None

    def interrupt(self) -> None:
        """End the call that runs in another thread: it raises SandboxError there, and so does every later one. Giving
        the box back then kills what it ran, and removes it. Returns at once."""
        self._void, self._sandbox = "was interrupted", None
        for call in tuple(self._calls):
            call.cancel()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        def on_start(call: concurrent.futures.Future[T]) -> None:
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            self._box()  # raises where `interrupt` came just before

        try:
            return background_loop().run(coroutine, on_start=on_start)
        except concurrent.futures.CancelledError:
            raise SandboxError(f"box {self.id} {self._void}") from None

    def _box(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError(f"box {self.id} {self._void}")
        return self._sandbox
