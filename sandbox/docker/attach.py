"""A container's stdin and stdout as asyncio streams, over the engine's attach call.

    POST /containers/ID/attach -> 101, then raw bytes up, and frames down:
    stream (1 byte), 3 zeros, length (u32), payload

The SDK's own attach hands out a blocking socket through private attributes; this speaks the one request itself. Attach
before start, or the first bytes are lost.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable
from urllib.parse import urlsplit

from quintain.sandbox.base import SandboxError

HEADER = struct.Struct(">BxxxI")
STDOUT = 1
KEPT_STDERR_BYTES = 4096
ATTACH_TIMEOUT_S = 15.0


class StreamRefused(SandboxError):
    """The engine answered, but gave no stream."""


class Attachment(asyncio.Protocol):
    """Takes the stream apart: stdout goes to `reader`, the end of stderr to `last_words`."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        """Of the engine's response, then of the frame that is coming in."""
        self._open = False
        self._stream, self._left_bytes = 0, 0
        """Of the frame that is coming in."""
        self._stderr = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.reader.set_transport(transport)  # so that it stops reading where nobody takes what came

    def data_received(self, data: bytes) -> None:
        if not self._open:
            if self.upgraded.done():  # refused, or nobody waits any more
                return
            data = self._take_response(data)
        rest = memoryview(data)
        while rest:
            if self._left_bytes:  # a frame may be large, so its pieces go on as they come
                piece, rest = rest[: self._left_bytes], rest[self._left_bytes :]
                self._left_bytes -= len(piece)
                self.deliver(self._stream, bytes(piece))
                continue
            missing = HEADER.size - len(self._head)
            self._head += rest[:missing]
            rest = rest[missing:]
            if len(self._head) == HEADER.size:
                self._stream, self._left_bytes = HEADER.unpack(self._head)
                self._head.clear()

    def deliver(self, stream: int, payload: bytes) -> None:
        """Take a piece of the container's output."""
        if stream == STDOUT:
            self.reader.feed_data(payload)
        else:
            self._stderr = (self._stderr + payload)[-KEPT_STDERR_BYTES:]

    def _take_response(self, data: bytes) -> bytes:
        """What comes after the response; nothing where it is not over, or is a refusal."""
        self._head += data
        head, end, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not end:
            return b""
        status = head.split(b" ", 2)[1:2]
        if status in ([b"101"], [b"200"]):
            self._head.clear()
            self._open = True
            self.upgraded.set_result(None)
            return rest
        text = (head.splitlines()[0] + b": " + rest[:500]).decode("utf-8", "replace")
        self.upgraded.set_exception(StreamRefused(f"the Docker engine refused a stream: {text}"))
        return b""

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.upgraded.done():
            self.upgraded.set_exception(SandboxError(f"the Docker engine hung up during attach: {exc}"))
        self.reader.feed_eof()

    def write(self, data: bytes) -> None:
        """Queue bytes for the container's stdin."""
        if self._transport is not None:
            self._transport.write(data)

    def last_words(self) -> str:
        """The end of what the container's first process wrote to stderr."""
        return self._stderr.decode("utf-8", "replace")

    def end_input(self) -> None:
        """Say that nothing more comes; False from `can_end_input` means that it can't be said."""
        if self._transport is not None:
            self._transport.write_eof()

    def can_end_input(self) -> bool:
        """Whether the connection can be closed in one direction (not so with TLS)."""
        return self._transport is not None and self._transport.can_write_eof()

    def close(self) -> None:
        """Hang up; the container's stdin ends."""
        if self._transport is not None:
            self._transport.abort()


async def attach(
    url: str,
    api_version: str,
    container: str,
    *,
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    with_output: bool = True,
) -> Attachment:
    """Attach to a created container, its output where `with_output`. Raises SandboxError."""
    streams = f"stdin=1&stdout={int(with_output)}&stderr={int(with_output)}"
    path = f"/v{api_version}/containers/{container}/attach?stream=1&{streams}"
    return await upgrade(url, path, Attachment(), what=f"attach to container {container}", tls=tls)


async def upgrade(
    url: str,
    path: str,
    attachment: Attachment,
    *,
    what: str,
    body: bytes = b"",
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
) -> Attachment:
    """POST to the engine and keep the connection as a stream of frames. Raises SandboxError."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            if parts.scheme == "unix":
                await loop.create_unix_connection(lambda: attachment, parts.path)
            else:
                await loop.create_connection(
                    lambda: attachment, parts.hostname or "localhost", parts.port or 2375, ssl=tls()
                )
            head = f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            attachment.write(head.encode() + body)
            try:
                await attachment.upgraded
            except BaseException:
                attachment.close()
                raise
    except (OSError, TimeoutError) as error:
        raise SandboxError(f"cannot {what} at {url}: {error or 'no answer'}") from error
    return attachment
