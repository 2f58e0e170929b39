"""Inspect AI's own sandbox self-check against a Docker box. Run by Inspect's virtual environment, never by quintain's.

    python self_check.py '{"profile": "relaxed", …}'   settings of SandboxConfig; prints a JSON object: name -> problem

Each check gets a box of its own pool; a problem is null where the check passed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from typing import Any

from inspect_ai.util import (  # pyright: ignore[reportMissingImports]
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
)
from inspect_ai.util._sandbox import self_check  # pyright: ignore[reportMissingImports]

from quintain.sandbox import BlockingSandbox, SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

CHECK_TIMEOUT_S = 90.0


class QuintainEnvironment(SandboxEnvironment):
    """One box as Inspect wants it."""

    def __init__(self, box: BlockingSandbox) -> None:
        super().__init__()
        self._box = box

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        stdin = input.encode() if isinstance(input, str) else input or b""
        result = await asyncio.to_thread(
            self._box.exec, cmd, stdin=stdin, cwd=cwd, env=env, user=user, timeout_s=timeout or 60
        )
        if result.timed_out:
            raise TimeoutError(f"{cmd[:1]} took longer than {timeout} s")
        if result.exit_code == 126 and "permission denied" in result.stderr.lower():
            raise PermissionError(result.stderr)
        if result.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.stdout)
        return ExecResult(result.exit_code == 0, result.exit_code, result.stdout, result.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await asyncio.to_thread(self._box.write_file, file, contents)

    async def read_file(self, file: str, text: bool = True) -> Any:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await asyncio.to_thread(self._box.read_file, file, max_bytes=limit)
        except ValueError as error:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        return data.decode() if text else data

    @classmethod
    async def sample_cleanup(cls, *args: Any) -> None:
        return None


async def check(name: str, pool: SandboxPool) -> str | None:
    """What is wrong with one check; None where it passed."""
    with pool.lease() as box:
        try:
            await asyncio.wait_for(getattr(self_check, name)(QuintainEnvironment(box)), CHECK_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 a check may fail in any way
            return f"{type(error).__name__}: {error}"[:500]
    return None


def main() -> None:
    settings = json.loads(sys.argv[1])
    config = SandboxConfig.model_validate(
        {
            "type": "docker",
            "pool_size": 2,
            "max_output_bytes": SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            **settings,
        }
    )
    names = [name for name in self_check.__all__ if inspect.iscoroutinefunction(getattr(self_check, name))]
    with open_pool(config, needs_isolation=True, owner="inspect self-check") as pool:
        print(json.dumps({name: asyncio.run(check(name, pool)) for name in names}))


if __name__ == "__main__":
    main()
