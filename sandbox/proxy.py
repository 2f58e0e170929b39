"""The allow-list proxy: the owner's decision about each connection that a box asks for, and that connection itself.

    request head -> host and port -> allow-list -> one look-up -> checked address -> connect -> bytes
                        400             403          502            403           502, 504

Plain HTTP by absolute URLs, anything else (TLS above all) by CONNECT, not looked into. The address that was checked
is the one connected to, so a name can't mean another one a moment later. An answer says its reason in status line and
body. Deadlines: `HEAD_TIMEOUT_S` for the head, `CONNECT_TIMEOUT_S` for look-up and connection; afterwards none, since
the box's end closes everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from quintain.sandbox.allow_list import AllowList, literal, normal, split
from quintain.sandbox.background import BlockingCalls
from quintain.sandbox.network_log import NetworkLog
from quintain.sandbox.relay_link import RelayStream

MAX_HEAD_BYTES = 2**14
HEAD_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 15.0
LAST_WORDS_S = 5.0
CHUNK_BYTES = 2**16
MAX_SERVED = 128
"""Most streams served at once, those included whose last bytes are still under way."""
NUM_LOOKUP_THREADS = 2
NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")
OF_THE_HOP = re.compile(rb"(?i)(proxy-[a-z-]+|connection|keep-alive|host|upgrade)[ \t]*:")
WORDS = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway", 504: "Gateway Timeout"}


class Refused(Exception):
    """The request is answered with an error."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """Where a client wants to go. Example: ``ProxyRequest(host="pypi.org", port=443, head=b"")``"""

    host: str
    port: int
    head: bytes
    """What the server gets first: the rewritten head of a plain request; empty for CONNECT."""


class Proxy:
    """Serves the streams of one box."""

    def __init__(self, allowed: AllowList, log: NetworkLog) -> None:
        self._allowed, self._log = allowed, log
        self._tasks: set[asyncio.Task[None]] = set()
        self._lookups: BlockingCalls | None = None

    def begin(self, stream: RelayStream) -> None:
        """Serve a new stream in a task of its own."""
        if len(self._tasks) >= MAX_SERVED:
            stream.reset()
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End everything that is under way. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._lookups is not None:
            self._lookups.close()
            self._lookups = None

    async def _serve(self, stream: RelayStream) -> None:
        try:
            try:
                async with asyncio.timeout(HEAD_TIMEOUT_S):
                    head, rest = await _read_head(stream)
                request = parse(head)
            except TimeoutError:
                raise Refused(400, f"no whole request in {HEAD_TIMEOUT_S:g} s") from None
            try:
                reader, writer = await self._connect(request.host, request.port)
            except Refused as refused:
                allowed = refused.status != 403
                self._log.add(request.host, request.port, allowed=allowed, reason=str(refused))
                raise
            await self._exchange(stream, reader, writer, request, rest)
        except Refused as refused:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await _answer(stream, refused)
        except (ConnectionError, OSError):
            pass  # either side hung up: the reset tells the other
        finally:
            stream.reset()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to an address that was checked. Raises Refused."""
        if not self._allowed.allows(host, port):
            raise Refused(403, f"{host}:{port} is not in sandbox.allowed_hosts")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                addresses = await self._addresses(host, port)
                usable = [address for address in addresses if self._allowed.allows_address(host, address)]
                if not usable:
                    raise Refused(403, f"{host} stands for {', '.join(addresses)[:200]}, which is not a public address")
                return await _first_that_answers(usable, port)
        except TimeoutError:
            raise Refused(504, f"{host}:{port} does not answer") from None
        except (OSError, UnicodeError) as error:  # the latter: a name that no name server could be asked for
            why = getattr(error, "strerror", None) or type(error).__name__
            raise Refused(502, f"{host}:{port} can't be reached: {why}") from error

    async def _addresses(self, host: str, port: int) -> list[str]:
        """What the name stands for, looked up once. Raises OSError."""
        if literal(host) is not None:
            return [host]
        if self._lookups is None:
            self._lookups = BlockingCalls(NUM_LOOKUP_THREADS, name="quintain-names")
        found = await self._lookups.call(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def _exchange(
        self,
        stream: RelayStream,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: ProxyRequest,
        rest: bytes,
    ) -> None:
        counts = [0, 0]
        first = request.head + rest

        async def to_server() -> None:
            data = first or await stream.read()
            while data:
                counts[0] += len(data)
                writer.write(data)
                await writer.drain()
                data = await stream.read()
            writer.write_eof()

        async def from_server() -> None:
            if not request.head:
                await stream.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            while data := await reader.read(CHUNK_BYTES):
                counts[1] += len(data)
                await stream.write(data)
            stream.end()

        directions = [asyncio.ensure_future(to_server()), asyncio.ensure_future(from_server())]
        try:
            await asyncio.gather(*directions)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            writer.transport.abort() if any(map(_failed, directions)) else writer.close()
            self._log.add(request.host, request.port, allowed=True, sent_bytes=counts[0], received_bytes=counts[1])


def _failed(direction: asyncio.Future[None]) -> bool:
    return direction.cancelled() or direction.exception() is not None


async def _first_that_answers(addresses: list[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(addresses[-1], port)


async def _read_head(stream: RelayStream) -> tuple[bytes, bytes]:
    """The head of a request without its empty line, and what came after. Raises Refused, ConnectionError."""
    data = bytearray()
    while True:
        head, end, rest = bytes(data).partition(b"\r\n\r\n")
        if end:
            return head, rest
        if len(data) > MAX_HEAD_BYTES:
            raise Refused(400, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes")
        piece = await stream.read()
        if not piece:
            raise Refused(400, "the request ended before its head did")
        data += piece


def parse(head: bytes) -> ProxyRequest:
    """Take the head of a request apart. Raises Refused."""
    line, *fields = head.split(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if (
        len(words) != 3
        or not words[2].startswith("HTTP/1.")
        or not line.isascii()
        or b"\n" in head.replace(b"\r\n", b"")
    ):
        raise Refused(400, "this is no HTTP/1 request to a proxy")
    method, target, version = words
    try:
        if method == "CONNECT":
            host, port = split(target)
            if port is None:
                raise ValueError("CONNECT needs host:port")
            return ProxyRequest(host=_checked(host), port=port, head=b"")
        url = urlsplit(target)
        if url.scheme != "http" or not url.hostname:
            raise ValueError("the proxy takes http://host/... and CONNECT host:port")
        host, port = _checked(url.hostname), url.port or 80
    except ValueError as error:
        raise Refused(400, f"{error}"[:200]) from error
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    place = url.netloc.rpartition("@")[2]
    kept = [field for field in fields if not OF_THE_HOP.match(field)]
    lines = [f"{method} {path} {version}".encode("latin-1"), f"Host: {place}".encode("latin-1")]
    return ProxyRequest(host=host, port=port, head=b"\r\n".join([*lines, *kept, b"Connection: close", b"", b""]))


def _checked(host: str) -> str:
    if literal(host) is None and not NAME.fullmatch(host):
        raise ValueError("the host's name has letters that no name has")
    return normal(host)


async def _answer(stream: RelayStream, refused: Refused) -> None:
    reason = "".join(letter if " " <= letter <= "~" else "?" for letter in str(refused))
    body = f"quintain: {reason}\n".encode()
    head = f"HTTP/1.1 {refused.status} {WORDS[refused.status]}: {reason}\r\nContent-Type: text/plain\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    async with asyncio.timeout(LAST_WORDS_S):
        await stream.write(head.encode() + body)
        stream.end()
        while await stream.read():  # until the client has hung up: a reset now could overtake the answer
            pass
