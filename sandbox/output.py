"""An `ExecResult` from what was kept of a command's output.

Where the middle was cut, a notice says so and names the file in the box that holds more: nobody reads cut output as
complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quintain.sandbox.base import ExecResult, Output


def bodies_of(answer: Mapping[str, Any], body: bytearray) -> tuple[bytearray, bytearray]:
    """Stdout and stderr, which an agent sends as one. Takes `body` apart, so that large output is in memory once."""
    length: int = answer["lengths"][0]
    with memoryview(body) as view, view[length:] as rest:
        stderr = bytearray(rest)
    if stderr:
        del body[length:]
    return body, stderr


def exec_result(answer: Mapping[str, Any], bodies: Sequence[bytearray], max_output_bytes: int) -> ExecResult:
    """What a command did, from the header of an answer and what was kept of stdout and of stderr."""
    totals: Sequence[int] = answer["totals"]
    spilled: Sequence[Mapping[str, Any] | None] = answer["spilled"]
    stdout, stderr = (
        Output(data=data, head_bytes=head_bytes, total_bytes=total, spilled=_notice(spill))
        for data, head_bytes, total, spill in zip(bodies, answer["heads"], totals, spilled, strict=True)
    )
    files: list[str | None] = [spill["path"] if spill else None for spill in spilled]
    return ExecResult(
        exit_code=answer["exit_code"],
        timed_out=answer["timed_out"],
        truncated=max(totals) > max_output_bytes,
        duration_s=answer["duration_s"],
        stdout_bytes=totals[0],
        stderr_bytes=totals[1],
        stdout_file=files[0],
        stderr_file=files[1],
        files_cut=any(spill["cut"] for spill in spilled if spill and spill["path"]),
        oom_killed=answer["oom_killed"],
        box_lost=bool(answer["left"]),
        outputs=(stdout, stderr),
    )


def _notice(spill: Mapping[str, Any] | None) -> str:
    if not spill or not spill["path"]:
        return ""
    what = f"its first {spill['bytes']} bytes are" if spill["cut"] else "all of it is"
    return f"[{what} in {spill['path']}]\n"
