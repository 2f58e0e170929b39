"""File operations for a box without an agent: scripts for its shell, and what their answers mean.

They need `head`, `tail`, `wc`, `cat`, `chmod`, `mkdir` and `stat`, as coreutils and busybox have them. Errors are those
that Python's own `open` would raise, told by exit codes and by the tools' words.
"""

from __future__ import annotations

import errno
import os
import stat

from quintain.sandbox.base import FileEntry

CODES = {81: errno.EISDIR, 82: errno.ENOTDIR, 83: errno.EINVAL, 84: errno.EACCES, 85: errno.ENOENT}
WORDS = (errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ENOENT)
_PARENT = """
p=$1; case $p in */*) d=${p%/*} ;; *) d=. ;; esac; [ -n "$d" ] || d=/
if [ -e "$d" ]; then [ -d "$d" ] || exit 82; [ -x "$d" ] || exit 84; fi
"""
READ = (
    _PARENT
    + """
[ -z "$4" ] || [ ! -L "$p" ] || exit 83
[ -e "$p" ] || exit 85; [ ! -d "$p" ] || exit 81; [ -f "$p" ] || exit 83; [ -r "$p" ] || exit 84
wc -c < "$p" && tail -c +"$2" < "$p" | head -c "$3"
"""
)
"""Arguments: path, first byte (from 1), length, anything = follow no link. Answer: the size, a line end, bytes."""
WRITE = (
    _PARENT
    + """
[ -e "$d" ] || mkdir -p -- "$d" || exit 1
[ ! -d "$p" ] || exit 81
if [ -e "$p" ]; then [ -f "$p" ] || exit 83; [ -w "$p" ] || exit 84; fi
cat > "$p" && chmod -- "$2" "$p"
"""
)
LIST = (
    _PARENT
    + """
[ -e "$p" ] || exit 85; [ -d "$p" ] || exit 82; [ -r "$p" ] && [ -x "$p" ] || exit 84
n=0
for f in "$p"/* "$p"/.[!.]* "$p"/..?*; do
  [ -e "$f" ] || [ -L "$f" ] || continue
  printf '%s %s\\000' "$(stat -c '%f %s' -- "$f")" "${f##*/}"
  n=$((n + 1)); [ $n -lt "$2" ] || break
done
"""
)


def raise_file_error(exit_code: int, stderr: bytes, path: str) -> None:
    """Raises OSError for anything but success."""
    if exit_code == 0:
        return
    text = stderr.decode("utf-8", "replace").strip()
    code = CODES.get(exit_code) or next((code for code in WORDS if os.strerror(code) in text), errno.EIO)
    message = "not a regular file" if code == errno.EINVAL else os.strerror(code)
    raise OSError(code, message if code != errno.EIO else text or message, path)


def entries_of(data: bytes) -> tuple[FileEntry, ...]:
    """What `LIST` printed."""
    found = []
    for line in data.split(b"\0")[:-1]:
        bits, size, name = line.split(b" ", 2)
        mode = int(bits, 16)
        kind = (
            "file"
            if stat.S_ISREG(mode)
            else "folder"
            if stat.S_ISDIR(mode)
            else "link"
            if stat.S_ISLNK(mode)
            else "other"
        )
        found.append(FileEntry(name=os.fsdecode(name), kind=kind, size_bytes=int(size), mode=stat.S_IMODE(mode)))
    return tuple(sorted(found, key=lambda entry: entry.name))
