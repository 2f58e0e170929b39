"""How requests and answers travel between `Channel` and the agent; this module runs on both sides.

    frame = MAGIC, header length (u32), body length (u64), header (JSON object), body (bytes)

Standard library only, Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import json
import os
import struct

FRAME = struct.Struct(">4sIQ")
MAGIC = b"\x00Qn1"
MAX_HEADER_BYTES = 2**23
MAX_BODY_BYTES = 2**28
FILE_CHUNK_BYTES = 2**20


def pack(header, body=b""):
    """One frame."""
    text = json.dumps(header).encode()
    return FRAME.pack(MAGIC, len(text), len(body)) + text + body


def unpack_sizes(frame):
    """Lengths of header and body. Raises ValueError for anything that is not the start of a frame."""
    magic, header_bytes, body_bytes = FRAME.unpack(frame)
    if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise ValueError(f"not a frame of the agent's protocol: {bytes(frame)!r}")
    return header_bytes, body_bytes


class Body:
    """The bytes that follow a request's header, read when they are wanted. Raises EOFError where the stream ends."""

    def __init__(self, fd, left):
        self.fd, self.left = fd, left

    def read(self, most):
        """The next piece, of at most `most` bytes."""
        piece = os.read(self.fd, min(most, self.left))
        if not piece:
            raise EOFError
        self.left -= len(piece)
        return piece

    def all(self):
        """What is left, as one."""
        data = bytearray()
        while self.left:
            data += self.read(2**20)
        return data

    def drop(self):
        """Read past what is left."""
        while self.left:
            self.read(2**16)


def receive(fd):
    """The next frame of a file descriptor as (header, Body), or None at the end of the stream. Blocks."""
    frame = _read_exactly(fd, FRAME.size)
    if frame is None:
        return None
    header_bytes, body_bytes = unpack_sizes(frame)
    header = _read_exactly(fd, header_bytes)
    return None if header is None else (json.loads(header), Body(fd, body_bytes))


def send(fd, header, body=b""):
    """Write one frame. Blocks."""
    text = json.dumps(header).encode()
    write_all(fd, FRAME.pack(MAGIC, len(text), len(body)) + text)
    write_all(fd, body)  # apart: a large one is not copied


def write_all(fd, data):
    """Write bytes. Blocks."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_exactly(fd, count):
    data = bytearray()
    while len(data) < count:
        chunk = os.read(fd, min(count - len(data), 2**20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
