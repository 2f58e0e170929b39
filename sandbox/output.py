"""An `ExecResult` from what was kept of a command's output.

Where the middle was cut, a notice says so and names the file in the box that holds more: nobody reads cut output as
complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quintain.sandbox.base import ExecResult


def exec_result(answer: Mapping[str, Any], body: bytes, max_output_bytes: int) -> ExecResult:
    """What a command did, from the agent's answer."""
    parts, offset = [], 0
    for length in answer["lengths"]:
        parts.append(body[offset : offset + length])
        offset += length
    totals: Sequence[int] = answer["totals"]
    files = [spill and spill["path"] for spill in answer["spilled"]]
    stdout, stderr = (
        text_of(parts[2 * number], parts[2 * number + 1], totals[number], _notice(answer["spilled"][number]))
        for number in (0, 1)
    )
    return ExecResult(
        exit_code=answer["exit_code"],
        stdout=stdout,
        stderr=stderr,
        timed_out=answer["timed_out"],
        truncated=max(totals) > max_output_bytes,
        duration_s=answer["duration_s"],
        stdout_bytes=totals[0],
        stderr_bytes=totals[1],
        raw_stdout=parts[0] + parts[1],
        raw_stderr=parts[2] + parts[3],
        stdout_file=files[0],
        stderr_file=files[1],
        files_cut=any(spill["cut"] for spill in answer["spilled"] if spill and spill["path"]),
        oom_killed=answer["oom_killed"],
        box_lost=bool(answer["left"]),
    )


def _notice(spill: Mapping[str, Any] | None) -> str:
    if not spill or not spill["path"]:
        return ""
    what = f"its first {spill['bytes']} bytes are" if spill["cut"] else "all of it is"
    return f"[{what} in {spill['path']}]\n"


def text_of(head: bytes, tail: bytes, total: int, notice: str = "") -> str:
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
    marker = f"\n[... {total - len(head) - len(tail)} bytes cut ...]\n{notice}"
    return head.decode("utf-8", "replace") + marker + tail.decode("utf-8", "replace")
