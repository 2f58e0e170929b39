"""A box for synchronous code: what tools are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quintain.sandbox.background import background_loop
from quintain.sandbox.base import ExecResult, Sandbox, SandboxError


class BlockingSandbox:
    """`Sandbox.exec`, `read_file` and `write_file`, blocking. Usable from any thread but the background loop's.

    One comes from `SandboxPool.acquire` and is void after `release`: the box behind it belongs to somebody else then.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox: Sandbox | None = sandbox
        self.kind = sandbox.kind
        self.id = sandbox.id

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """As `Sandbox.exec`. Raises also BackgroundLoopError, and SandboxError after release."""
        box = self._box()
        return background_loop().run(box.exec(command, timeout_s=timeout_s, stdin=stdin, cwd=cwd, env=env))

    def read_file(self, path: str, *, max_bytes: int = 2**20) -> bytes:
        """As `Sandbox.read_file`. Raises also BackgroundLoopError, and SandboxError after release."""
        return background_loop().run(self._box().read_file(path, max_bytes=max_bytes))

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """As `Sandbox.write_file`. Raises also BackgroundLoopError, and SandboxError after release."""
        background_loop().run(self._box().write_file(path, data, mode=mode))

    def detach(self) -> None:
        """Make this handle void; the pool does so at release."""
        self._sandbox = None

    def _box(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError(f"box {self.id} was given back to its pool; acquire another one")
        return self._sandbox
