"""The owner's end of a relay: streams out of frames that may come from anybody in the box.

The first frame that breaks the protocol drops the relay with all its streams. Memory is bounded by the windows: at most
`MAX_STREAMS` streams with `WINDOW_BYTES` each way. Frames for a stream that has ended here are ignored, since the relay
may have sent them before it heard of the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quintain.sandbox.relay import (
    BUSY,
    DATA,
    END,
    FRAME,
    MAX_PAYLOAD_BYTES,
    MAX_STREAMS,
    MORE,
    OPEN,
    PING,
    PONG,
    READY,
    RESET,
    WINDOW,
    WINDOW_BYTES,
)


class ProtocolViolation(Exception):
    """A frame that our relay never sends."""


class RelayStream:
    """One connection of the box. `read` until b"", `write`, `end`; or `reset`."""

    def __init__(self, number: int, link: RelayLink) -> None:
        self.number = number
        self.ended = self.owner_ended = self.lost = False
        self.window = WINDOW_BYTES
        self.unread = bytearray()
        self.changed = asyncio.Event()
        self._link = link

    async def read(self) -> bytes:
        """The next bytes, b"" after the last. Raises ConnectionResetError."""
        while not (self.unread or self.ended or self.lost):
            await self._change()
        if self.lost:
            raise ConnectionResetError("the box closed the connection")
        data = bytes(self.unread[:MAX_PAYLOAD_BYTES])
        del self.unread[: len(data)]
        if data and not self.ended:
            self._link.send(WINDOW, self.number, MORE.pack(len(data)))
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes, as fast as the box takes them. Raises ConnectionResetError."""
        rest = memoryview(data)
        while rest:
            while not self.window and not self.lost:
                await self._change()
            if self.lost:
                raise ConnectionResetError("the box closed the connection")
            piece = rest[: min(self.window, MAX_PAYLOAD_BYTES)]
            self.window -= len(piece)
            self._link.send(DATA, self.number, bytes(piece))
            rest = rest[len(piece) :]

    async def _change(self) -> None:
        """Wait for a frame. Both directions may wait at once, so nobody clears what the other has not seen."""
        changed = self.changed
        await changed.wait()

    def wake(self) -> None:
        """Tell whoever waits that something came."""
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self) -> None:
        """Nothing more comes from here."""
        if not self.owner_ended and not self.lost:
            self.owner_ended = True
            self._link.send(END, self.number)
            self._link.forget_ended(self)

    def reset(self) -> None:
        """Close it both ways at once. Idempotent."""
        if not self.lost and not (self.ended and self.owner_ended):
            self._link.send(RESET, self.number)
        self._link.lose(self)


class RelayLink:
    """Frames of one relay. `feed` takes what it wrote; `on_stream` is called with every new stream."""

    def __init__(
        self, write: Callable[[bytes], None], on_stream: Callable[[RelayStream], None], hang_up: Callable[[], None]
    ) -> None:
        self.broken: str | None = None
        """Why it is of no use any more; None while it is."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True once it listens, False where its port is taken or it is gone."""
        self._write, self._on_stream, self._hang_up = write, on_stream, hang_up
        self._data = bytearray()
        self._streams: dict[int, RelayStream] = {}
        self._last = 0
        self._pong: asyncio.Future[bool] | None = None

    def feed(self, data: bytes) -> None:
        """Take bytes from the box."""
        if self.broken is not None:
            return
        self._data += data
        try:
            while len(self._data) >= FRAME.size:
                kind, number, length = FRAME.unpack_from(self._data)
                if length > MAX_PAYLOAD_BYTES:
                    raise ProtocolViolation(f"a frame of {length} bytes")
                if len(self._data) < FRAME.size + length:
                    return
                payload = bytes(self._data[FRAME.size : FRAME.size + length])
                del self._data[: FRAME.size + length]
                self._take(kind, number, payload)
        except ProtocolViolation as violation:
            self.drop(f"it broke the protocol: {violation}")

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind not in (OPEN, DATA, END, RESET, WINDOW, PONG, READY, BUSY):
            raise ProtocolViolation(f"a frame of kind {kind}")
        if kind != DATA and len(payload) != (MORE.size if kind == WINDOW else 0):
            raise ProtocolViolation(f"{len(payload)} bytes in a frame of kind {kind}")
        if kind in (READY, BUSY):
            if self.ready.done():
                raise ProtocolViolation("it started twice")
            self.ready.set_result(kind == READY)
        elif kind == PONG:
            if self._pong is None or self._pong.done():
                raise ProtocolViolation("an answer to no question")
            self._pong.set_result(True)
        elif kind == OPEN:
            self._open(number)
        elif not 0 < number <= self._last:
            raise ProtocolViolation(f"stream {number} was never opened")
        elif number in self._streams:
            self._take_for(self._streams[number], kind, payload)

    def _open(self, number: int) -> None:
        if number <= self._last:
            raise ProtocolViolation(f"stream {number} was opened before")
        if len(self._streams) >= MAX_STREAMS:
            raise ProtocolViolation(f"more than {MAX_STREAMS} streams")
        self._last = number
        stream = self._streams[number] = RelayStream(number, self)
        self._on_stream(stream)

    def _take_for(self, stream: RelayStream, kind: int, payload: bytes) -> None:
        if kind == DATA:
            if not payload or stream.ended or len(stream.unread) + len(payload) > WINDOW_BYTES:
                raise ProtocolViolation(f"{len(payload)} bytes that stream {stream.number} has no room for")
            stream.unread += payload
        elif kind == WINDOW:
            stream.window += MORE.unpack(payload)[0]
            if stream.window > WINDOW_BYTES:
                raise ProtocolViolation(f"a window of {stream.window} bytes")
        elif kind == END:
            if stream.ended:
                raise ProtocolViolation(f"stream {stream.number} ended twice")
            stream.ended = True
            self.forget_ended(stream)
        else:
            self.lose(stream)
        stream.wake()

    def send(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Queue a frame for the relay."""
        if self.broken is None:
            self._write(FRAME.pack(kind, number, len(payload)) + payload)

    async def answers(self, timeout_s: float) -> bool:
        """Whether the relay still does its work."""
        if self.broken is not None:
            return False
        self._pong = asyncio.get_running_loop().create_future()
        self.send(PING)
        try:
            return await asyncio.wait_for(self._pong, timeout_s)
        except TimeoutError:
            return False

    def forget_ended(self, stream: RelayStream) -> None:
        """Free the place of a stream that both sides have ended."""
        if stream.ended and stream.owner_ended:
            self._streams.pop(stream.number, None)

    def lose(self, stream: RelayStream) -> None:
        """End a stream both ways, whatever is under way."""
        stream.lost = True
        self._streams.pop(stream.number, None)
        stream.wake()

    def drop(self, reason: str) -> None:
        """Hang up, and end every stream. Idempotent."""
        if self.broken is not None:
            return
        self.broken = reason
        self._data.clear()
        for stream in list(self._streams.values()):
            self.lose(stream)
        for future in (self.ready, self._pong):
            if future is not None and not future.done():
                future.set_result(False)
        self._hang_up()
