"""Reading and writing files, and what a reset leaves of them: the same behaviour in both kinds of box."""

from __future__ import annotations

import time

import pytest

from quintain.sandbox import BlockingSandbox, SandboxPool

MESS = """
import os
temporary = os.environ.get("TMPDIR", "/tmp")
for name in ("file", "new\\nline", "shut/in/file", temporary + "/file"):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    open(name, "w").write("x")
os.symlink("/etc", "loop")
os.mkfifo("pipe")
os.chmod("shut/in", 0)
os.chmod("shut", 0)
os.chmod(".", 0o500)
os.chdir(temporary)
for _ in range(1100):  # deeper than Python may recurse, and longer than a path may be
    os.mkdir("d" * 20)
    os.chdir("d" * 20)
open("bottom", "w").write("x")
"""


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 7])
def test_a_file_of_any_size_comes_back_as_it_was_written(box: BlockingSandbox, size: int):
    data = bytes(range(256)) * (size // 256 + 1)
    box.write_file("deep/er/file.bin", data[:size])
    assert box.read_file("deep/er/file.bin", max_bytes=size) == data[:size]
    assert box.exec("wc -c < deep/er/file.bin").stdout.strip() == str(size)


def test_writing_replaces_and_sets_the_mode(box: BlockingSandbox):
    box.write_file("script", b"#!/bin/sh\necho long long text\n")
    box.write_file("script", b"#!/bin/sh\necho hi\n", mode=0o755)
    assert box.exec(["./script"]).stdout == "hi\n"


def test_a_file_problem_is_the_error_that_open_would_raise(box: BlockingSandbox):
    box.exec("mkdir folder; mkfifo pipe; echo 12345 > five")
    with pytest.raises(FileNotFoundError, match="missing"):
        box.read_file("missing")
    with pytest.raises(IsADirectoryError):
        box.read_file("folder")
    with pytest.raises(IsADirectoryError):
        box.write_file("folder", b"")
    with pytest.raises(NotADirectoryError):
        box.write_file("five/x", b"")
    with pytest.raises(ValueError, match="max_bytes=5"):
        box.read_file("five", max_bytes=5)
    with pytest.raises(ValueError, match="null byte"):
        box.read_file("nul\0byte")


def test_a_fifo_or_device_cannot_hang_the_box(box: BlockingSandbox):
    box.exec("mkfifo pipe")
    for path in ("pipe", "/dev/zero"):
        with pytest.raises(OSError, match="not a regular file"):
            box.read_file(path)
    with pytest.raises(OSError):
        box.write_file("pipe", b"x")
    assert box.exec("echo ok").stdout == "ok\n"


def test_reset_leaves_no_file_of_any_shape(pool: SandboxPool):
    with pool.lease() as box:
        made = box.exec(["python3", "-c", MESS])
        assert made.exit_code == 0, made.stderr
    with pool.lease() as box:
        assert box.exec('find . "${TMPDIR:-/tmp}" -mindepth 1').stdout == ""
        box.write_file("works", b"again")
    assert pool.num_replaced == 0


def test_reset_ends_what_a_trajectory_left_running(pool: SandboxPool):
    with pool.lease() as box:
        pid_text = box.exec("(setsid sh -c 'trap \"\" TERM; while :; do sleep 0.05; done' & echo $!)").stdout
        assert int(pid_text) > 1
        box.exec("mkfifo gate; sleep 1000 > gate & (setsid sleep 1000 &)")
    with pool.lease() as box:
        time.sleep(0.1)
        children = box.exec("awk -v agent=$PPID '$4 == agent' /proc/[0-9]*/stat 2>/dev/null | wc -l").stdout
        assert children.strip() == "1"  # the shell that counts
    assert pool.num_replaced == 0


def test_a_large_file_may_be_read_only_and_stays_so(box: BlockingSandbox):
    data = bytes(range(256)) * 10_000
    box.write_file("fixed", data, mode=0o444)
    assert box.read_file("fixed", max_bytes=len(data)) == data
    with pytest.raises(PermissionError, match="fixed"):
        box.write_file("fixed", b"x")
    box.exec("chmod 200 fixed")
    with pytest.raises(PermissionError, match="fixed"):
        box.read_file("fixed")


def test_a_folder_lists_what_is_in_it(box: BlockingSandbox):
    box.exec(["python3", "-c", "open(b'no\\xffutf', 'w').write('12345')"])
    box.exec("mkdir sub; touch sub/inner; ln -s /etc/passwd link; mkfifo pipe; echo 123 > file; chmod 640 file")
    found = {entry.name: entry for entry in box.list_folder()}
    kinds = {name: entry.kind for name, entry in found.items()}
    assert kinds == {"no\udcffutf": "file", "sub": "folder", "link": "link", "pipe": "other", "file": "file"}
    assert (found["file"].size_bytes, found["file"].mode) == (4, 0o640)
    assert box.read_file("no\udcffutf") == b"12345"
    assert [entry.name for entry in box.list_folder("sub")] == ["inner"]
    with pytest.raises(FileNotFoundError):
        box.list_folder("missing")
    with pytest.raises(NotADirectoryError):
        box.list_folder("file")
    with pytest.raises(ValueError, match="max_entries=3"):
        box.list_folder(max_entries=3)


def test_text_is_utf_8_with_its_line_ends(box: BlockingSandbox):
    box.write_file("text", "naïve 😀\r\n")
    assert box.read_text("text") == "naïve 😀\r\n"
    box.write_file("bytes", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        box.read_text("bytes")
