"""The client's side of the agent's protocol, over any pair of byte streams.

One request at a time. A channel that holds something else than our frames, was left in the middle of a request, or did
not answer by the deadline is broken for good: nobody can tell any more which answer belongs to which request. One whose
stream ended may be opened anew over another stream, once for a request: the agent then says what became of it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from quintain.sandbox.agent_frames import FRAME, MAX_BODY_BYTES, pack, unpack_sizes
from quintain.sandbox.base import SandboxDied, SandboxTimeout

PIECE_BYTES = 2**18


class StreamEnded(SandboxDied):
    """The stream ended; the agent may live on."""


class Stream(Protocol):
    """A pair of byte streams to an agent."""

    reader: asyncio.StreamReader

    def write(self, data: bytes, /) -> None: ...

    def last_words(self) -> str: ...


class Channel:
    """Requests to one agent. `write` queues bytes for it, `reader` gives its answers, `last_words` its stderr."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        write: Callable[[bytes], None],
        *,
        box: str,
        last_words: Callable[[], str] = lambda: "",
        reopen: Callable[[], Awaitable[Stream | None]] | None = None,
    ) -> None:
        """`reopen` gives another stream to the same agent where one can be had, else None; it must not raise."""
        self._reader = reader
        self._write = write
        self._box = box
        self._last_words = last_words
        self._reopen = reopen
        self._lock = asyncio.Lock()
        self._number = 0
        self.broken: str | None = None
        """Why the channel can't be used any more; None while it can."""
        self.num_reopened = 0
        """How often its stream ended and another one took its place."""

    async def request(
        self, header: Mapping[str, Any], body: bytes = b"", *, timeout_s: float
    ) -> tuple[dict, bytearray]:
        """Send one request and wait for its answer: header and body.

        Where the stream ends, it is opened anew once: a request that the agent has got is not sent again, so a command
        never runs twice. Raises SandboxDied (the stream ended and could not be opened anew, ended again, or holds
        garbage), SandboxTimeout (no answer in `timeout_s`).
        """
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(
                f"a request holds at most {MAX_BODY_BYTES} bytes, this one {len(body)}; write a file instead"
            )
        async with self._lock:
            if self.broken is not None:
                raise SandboxDied(f"box {self._box} is gone: {self.broken}")
            self._number += 1
            op = header["op"]
            frame = pack({**header, "id": self._number}, body)  # raises for what is no JSON, before anything is sent
            self.broken = f"request {self._number} ({op}) was left unfinished"
            try:
                async with asyncio.timeout(timeout_s):
                    try:
                        return await self._attempt(frame, op)
                    except StreamEnded as lost:
                        return await self._attempt_again(frame, op, lost)
            except TimeoutError:
                self.broken = f"no answer to {op} in {timeout_s:.1f} s"
                raise SandboxTimeout(f"box {self._box}: {self.broken}") from None

    async def _attempt(self, frame: bytes, op: str, mark: bytes = b"") -> tuple[dict, bytearray]:
        """Write a frame and wait for the answer that follows `mark`. Raises SandboxDied."""
        try:
            self._write(frame)
            if mark:
                await self._skip_to(mark)
            answer = await self._answer()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.broken = f"its channel ended during {op}{self._stderr()}"
            raise StreamEnded(f"box {self._box} died: {self.broken}") from None
        except (OSError, ValueError) as error:
            self.broken = f"its channel failed during {op}: {error}{self._stderr()}"
            raise SandboxDied(f"box {self._box} died: {self.broken}") from error
        self.broken = None
        return answer

    async def _attempt_again(self, frame: bytes, op: str, lost: StreamEnded) -> tuple[dict, bytearray]:
        """Over a new stream, get the answer to a request that may be under way, answered, or never have come."""
        stream = await self._reopen() if self._reopen is not None else None
        if stream is None:
            raise lost
        self._reader, self._write, self._last_words = stream.reader, stream.write, stream.last_words
        self.num_reopened += 1
        mark = secrets.token_hex(32)
        answer, body = await self._attempt(pack({"op": "again", "id": self._number, "mark": mark}), op, mark.encode())
        if not answer.get("missing"):
            return answer, body
        self.broken = f"request {self._number} ({op}) was left unfinished"
        return await self._attempt(frame, op)

    async def _skip_to(self, mark: bytes) -> None:
        """Drop what is left of older answers."""
        while True:
            try:
                await self._reader.readuntil(mark)
                return
            except asyncio.LimitOverrunError as error:
                await self._reader.readexactly(error.consumed)

    async def _answer(self) -> tuple[dict, bytearray]:
        header_bytes, body_bytes = unpack_sizes(await self._reader.readexactly(FRAME.size))
        header = json.loads(await self._reader.readexactly(header_bytes))
        body, filled = bytearray(body_bytes), 0  # piece by piece: a large answer is in memory once, not twice
        while filled < body_bytes:
            piece = await self._reader.read(min(body_bytes - filled, PIECE_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(b"", body_bytes)
            body[filled : filled + len(piece)] = piece
            filled += len(piece)
        if header.pop("id", None) != self._number:
            raise ValueError(f"answer to another request than {self._number}")
        return header, body

    def _stderr(self) -> str:
        words = self._last_words().strip()
        return f"; it said: {words[-800:]}" if words else ""
