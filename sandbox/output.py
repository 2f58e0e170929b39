"""An `ExecResult` from what was kept of a command's output.

Where the middle was cut, a notice says so and names the file in the box that holds more: nobody reads cut output as
complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintain.sandbox.base import ExecResult


def exec_result(answer: Mapping[str, Any], body: bytearray, max_output_bytes: int) -> ExecResult:
    """What a command did, from the agent's answer. Takes `body` apart, so that large output is in memory once."""
    lengths: Sequence[int] = answer["lengths"]
    totals: Sequence[int] = answer["totals"]
    spilled: Sequence[Mapping[str, Any] | None] = answer["spilled"]
    stdout = _take(body, lengths[0], lengths[1], totals[0], _notice(spilled[0]))
    stderr = _take(body, lengths[2], lengths[3], totals[1], _notice(spilled[1]))
    files: list[str | None] = [spill["path"] if spill else None for spill in spilled]
    return ExecResult(
        exit_code=answer["exit_code"],
        stdout=stdout.text,
        stderr=stderr.text,
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
        notices=(stdout.notice, stderr.notice),
        lossy=(stdout.lossy, stderr.lossy),
    )


def _notice(spill: Mapping[str, Any] | None) -> str:
    if not spill or not spill["path"]:
        return ""
    what = f"its first {spill['bytes']} bytes are" if spill["cut"] else "all of it is"
    return f"[{what} in {spill['path']}]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    text: str
    notice: tuple[int, int] | None
    lossy: bytes | None


def _take(body: bytearray, head_bytes: int, tail_bytes: int, total: int, spilled: str) -> _Stream:
    """Take one stream off the front of `body`. Where bytes are missing between head and tail, a notice goes there, with
    no half characters beside it."""
    kept_bytes, notice = head_bytes + tail_bytes, b""
    if total > kept_bytes:
        front = _half_at_end(bytes(body[max(head_bytes - 4, 0) : head_bytes]))
        back = _half_at_start(bytes(body[head_bytes : head_bytes + min(tail_bytes, 3)]))
        notice = f"\n[... {total - kept_bytes + front + back} bytes cut ...]\n{spilled}".encode()
        body[head_bytes - front : head_bytes + back] = notice
        head_bytes -= front
        kept_bytes += len(notice) - front - back
    with memoryview(body) as view:
        start = len(str(view[:head_bytes], "utf-8", "replace")) if notice else 0
        text = str(view[:kept_bytes], "utf-8", "replace")
        lossy = None
        if "\ufffd" in text:
            lossy = bytes(view[:head_bytes]) + bytes(view[head_bytes + len(notice) : kept_bytes])
    del body[:kept_bytes]
    return _Stream(text=text, notice=(start, start + len(notice.decode())) if notice else None, lossy=lossy)


def _half_at_start(data: bytes) -> int:
    """How many bytes at the start go on with a character whose first byte is not there."""
    return next((number for number, byte in enumerate(data) if not 0x80 <= byte < 0xC0), len(data))


def _half_at_end(data: bytes) -> int:
    """How many bytes at the end begin a character that is not whole."""
    for back in range(1, len(data) + 1):
        byte = data[-back]
        if 0xC2 <= byte <= 0xF4:
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needs else 0
        if not 0x80 <= byte < 0xC0:
            return 0
    return 0
