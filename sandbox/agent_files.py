"""The agent's file operations: read, write, list. What the kernel refuses leaves here as the OSError that it gave.

Only regular files are opened, since a FIFO or a device could block the agent for ever. A file whose mode gives a right
to nobody is refused to root too, so that a relaxed box answers as a hardened one does. Standard library only,
Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from quintain.sandbox.agent_frames import FILE_CHUNK_BYTES

KINDS = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))


def read(path, offset, length, follow=True):
    """One chunk of a file: the answer's header, and the bytes."""
    fd = open_regular(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW))
    try:
        data = os.pread(fd, min(length, FILE_CHUNK_BYTES), offset)
        return {"size": os.fstat(fd).st_size}, data
    finally:
        os.close(fd)


def write(path, data, offset, mode, last):
    """One chunk of a file; the first one makes the parents and cuts what was there, the last one sets the mode."""
    first = offset == 0
    if first:
        with contextlib.suppress(FileExistsError):  # a file in the way: opening says so
            os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = open_regular(path, os.O_WRONLY | (os.O_CREAT if first else 0))
    try:
        if first:
            os.ftruncate(fd, 0)
        rest = memoryview(data)
        while rest:
            written = os.pwrite(fd, rest, offset)
            rest, offset = rest[written:], offset + written
        if last:
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def list_folder(path, limit):
    """At most `limit` + 1 entries of a folder, in no order: [name, kind, size in bytes, mode]."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            kind = next((kind for test, kind in KINDS if test(status.st_mode)), "other")
            found.append([entry.name, kind, status.st_size, stat.S_IMODE(status.st_mode)])
            if len(found) > limit:
                break
    return found


def open_regular(path, flags):
    if os.geteuid() == 0:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode, right = os.stat(path).st_mode, 0o222 if flags & os.O_WRONLY else 0o444
            if stat.S_ISREG(mode) and not mode & right:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "not a regular file", path)
