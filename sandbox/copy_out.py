"""Writing what came out of a box to a folder of this machine: nothing outside it, no link, no device, within limits.

What comes out is hostile: names and kinds are whatever the box's agent or its `tar` said, so each is checked here, and
a member that fails is left out with its reason, logged and counted. Only folders and regular files are ever made, all
of them in a folder that did not exist before, so there never is a link in the way.
"""

from __future__ import annotations

import logging
import os
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import IO

from quintain.sandbox.base import CopyReport, FileEntry

MAX_REPORTED = 1000
MAX_DEPTH = 64
MAX_NAME_BYTES = 255
log = logging.getLogger("quintain.sandbox")


class LimitReached(Exception):
    """Nothing more is taken."""


class CopyTarget:
    """The new folder, and what has been written to it so far."""

    def __init__(self, folder: Path, *, max_bytes: int, max_files: int) -> None:
        """Makes the folder. Raises FileExistsError."""
        folder.mkdir(parents=True)
        self._folder = folder
        self._max_bytes, self._max_members = max_bytes, max_files
        self._num_members = 0
        self.num_files = self.num_bytes = self._num_skipped = 0
        self._skipped: list[str] = []

    def skip(self, name: str, reason: str) -> None:
        """Leave a member out."""
        self._num_skipped += 1
        if len(self._skipped) < MAX_REPORTED:
            self._skipped.append(f"{name[:300]!a}: {reason}")
            log.warning("not copied out of the box: %s", self._skipped[-1])

    def add_folder(self, name: str) -> bool:
        """Make a folder; False where it was left out. Raises LimitReached."""
        path = self._checked(name)
        if path is None:
            return False
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.skip(name, f"cannot be made ({error.strerror})")
            return False
        return True

    def open_file(self, name: str, size_bytes: int, mode: int) -> IO[bytes] | None:
        """A new file to write to by `write`; None where it was left out. Raises LimitReached."""
        path = self._checked(name)
        if path is None:
            return None
        if self.num_bytes + size_bytes > self._max_bytes:
            self.skip(name, f"{size_bytes} bytes more than max_bytes={self._max_bytes} allows")
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            file = os.fdopen(os.open(path, flags, 0o600 | (mode & 0o777)), "wb")
        except OSError as error:
            self.skip(name, f"cannot be made ({error.strerror})")
            return None
        self.num_files += 1
        return file

    def write(self, file: IO[bytes], name: str, data: bytes) -> bool:
        """Write to a file; False, and the file is cut, where that would exceed `max_bytes`."""
        if self.num_bytes + len(data) > self._max_bytes:
            self.skip(name, f"cut: it grew beyond max_bytes={self._max_bytes} while it was copied")
            return False
        file.write(data)
        self.num_bytes += len(data)
        return True

    def report(self) -> CopyReport:
        """What was done."""
        more = self._num_skipped - len(self._skipped)
        skipped = (*self._skipped, f"and {more} more") if more else tuple(self._skipped)
        return CopyReport(num_files=self.num_files, num_bytes=self.num_bytes, skipped=skipped)

    def _checked(self, name: str) -> Path | None:
        """Where a member goes; None where its name is not one of a path below the folder."""
        parts = PurePosixPath(name).parts
        problem = None
        if "\0" in name or not parts:
            problem = "no name of a file"
        elif name.startswith("/"):
            problem = "an absolute path"
        elif ".." in parts:
            problem = "a path that leaves its folder"
        elif len(parts) > MAX_DEPTH or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
            problem = "too deep or too long a path"
        if problem is not None:
            self.skip(name, problem)
            return None
        self._num_members += 1
        if self._num_members > self._max_members:
            self.skip(name, f"more than max_files={self._max_members} members; nothing after this one was copied")
            raise LimitReached
        return self._folder.joinpath(*parts)


async def copy_tree(
    top: str,
    target: CopyTarget,
    list_folder: Callable[[str], Awaitable[tuple[FileEntry, ...]]],
    read_chunks: Callable[[str], AsyncIterator[bytes]],
) -> None:
    """Copy a folder of a box entry by entry; `read_chunks` must not follow a link. Raises what listing `top` raises."""
    todo = [("", await list_folder(top))]
    try:
        while todo:
            prefix, entries = todo.pop()
            for entry in entries:
                name = prefix + entry.name
                if entry.kind == "folder":
                    if target.add_folder(name):
                        try:
                            todo.append((f"{name}/", await list_folder(f"{top}/{name}")))
                        except (OSError, ValueError) as error:
                            target.skip(name, str(error))
                elif entry.kind != "file":
                    target.skip(name, "a link" if entry.kind == "link" else "neither a file nor a folder")
                else:
                    await _copy_file(top, name, entry, target, read_chunks)
    except LimitReached:
        return


async def _copy_file(
    top: str, name: str, entry: FileEntry, target: CopyTarget, read_chunks: Callable[[str], AsyncIterator[bytes]]
) -> None:
    file = target.open_file(name, entry.size_bytes, entry.mode)
    if file is None:
        return
    with file:
        try:
            async for chunk in read_chunks(f"{top}/{name}"):
                if not target.write(file, name, chunk):
                    break
        except OSError as error:
            target.skip(name, f"cut: {error}")


def unpack_tar(source: IO[bytes], target: CopyTarget) -> None:
    """Copy what a tar stream holds. A stream that is no tar, or ends early, is a skipped member."""
    try:
        with tarfile.open(fileobj=source, mode="r|") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isdir():
                    if name not in ("", "."):
                        target.add_folder(name)
                elif not member.isreg():
                    target.skip(name, "a link" if member.issym() or member.islnk() else "neither a file nor a folder")
                else:
                    _unpack_file(tar, member, name, target)
    except LimitReached:
        return
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        target.skip("(the rest)", f"the archive can't be read any further: {error}")


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, target: CopyTarget) -> None:
    file = target.open_file(name, member.size, member.mode)
    if file is None:
        return
    with file:
        content = tar.extractfile(member)
        while content is not None and (chunk := content.read(2**20)):
            if not target.write(file, name, chunk):
                break
