"""What the agent keeps of a command's output: head and tail in memory, more of it in a file of the box.

Memory is bounded whatever a command writes; the files are few, and each is bounded too. Standard library only,
Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import contextlib
import os

PIPE_CHUNK_BYTES = 2**16
MAX_SPILL_FILES = 4


class Kept:
    """Head and tail of a stream of any length; once it is longer than that, `spill` gets all of it from the start.

    In memory there are never more than `limit` bytes (at least 1): what follows the head is written round and round.
    """

    def __init__(self, limit, spill=None):
        self.limit, self.spill = limit, spill
        self.head_bytes = limit // 2
        self.data, self.total = bytearray(), 0
        self.next = self.head_bytes

    def add(self, data):
        if self.spill is not None and self.total + len(data) > self.limit:
            if self.total <= self.limit:  # until now what is kept is all that there was
                self.spill.add(self.data)
            self.spill.add(data)
        self.total += len(data)
        room = self.limit - len(self.data)
        if room > 0:
            self.data += data[:room]
            data = data[room:]
        data = data[-(self.limit - self.head_bytes) :]
        while data:
            piece = data[: self.limit - self.next]
            self.data[self.next : self.next + len(piece)] = piece
            data = data[len(piece) :]
            self.next += len(piece)
            if self.next == self.limit:
                self.next = self.head_bytes

    def whole(self):
        """Head, then tail: after the end, once."""
        if self.next > self.head_bytes:
            tail = self.data[self.next :]
            self.data[len(self.data) - self.next + self.head_bytes :] = self.data[self.head_bytes : self.next]
            self.data[self.head_bytes : self.head_bytes + len(tail)] = tail
            self.next = self.head_bytes
        return self.data


class Spill:
    """One file of at most `limit` bytes, made at the first write. Where it can't be written, it just is shorter."""

    def __init__(self, folder, name, limit):
        self.folder, self.name, self.limit = folder, name, limit
        self.fd, self.written, self.cut = None, 0, False

    def add(self, data):
        if self.cut:
            return
        rest = memoryview(data)[: self.limit - self.written]
        self.cut = len(rest) < len(data)
        try:
            if self.fd is None:
                self.fd = self.folder.create(self.name)
            while rest:
                count = os.write(self.fd, rest)
                self.written, rest = self.written + count, rest[count:]
        except OSError:  # no space, or a job removed the folder: the caller is told that the file is not whole
            self.cut = True

    def close(self):
        """What the answer says of the file: its path (None where there is none), its size, whether it ends early."""
        if self.fd is not None:
            os.close(self.fd)
        path = self.folder.path_of(self.name) if self.written else None
        return {"path": path, "bytes": self.written, "cut": self.cut}


class SpillFolder:
    """Where the files are: numbered, the newest few kept, so that they can't fill the box."""

    def __init__(self, path):
        self.path = path
        self.number = 0
        self.names = []

    def next_pair(self, limit):
        """Spills for the stdout and the stderr of the next command; None each where `limit` is 0."""
        if not limit:
            return [None, None]
        return [Spill(self, kind, limit) for kind in ("stdout", "stderr")]

    def path_of(self, name):
        return os.path.join(self.path, f"{self.number}.{name}")

    def begin(self):
        self.number += 1

    def create(self, name):
        """A new file: never one that a job put there, nor in a place that a job's link leads to."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        path = self.path_of(name)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(os.path.basename(path), flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        self.names.append(path)
        while len(self.names) > MAX_SPILL_FILES:
            with contextlib.suppress(OSError):
                os.unlink(self.names.pop(0))
        return fd

    def forget(self):
        """After a reset, which removes the files: the next trajectory's names start anew."""
        self.number, self.names = 0, []
