"""Copying a folder out of a box: nothing outside the target, no link in it, limits, and what was left out is said."""

from __future__ import annotations

import io
import logging
import os
import tarfile
from pathlib import Path

import pytest

from quintain.sandbox import BlockingSandbox
from quintain.sandbox.copy_out import CopyTarget, unpack_tar

HOSTILE = """
import os
os.makedirs("top/sub/deep")
open("top/plain", "w").write("text")
open("top/sub/deep/run", "w").write("#!/bin/sh")
os.chmod("top/sub/deep/run", 0o755)
os.makedirs("top/empty")
os.symlink("/etc/passwd", "top/passwd")
os.symlink("/etc", "top/etc")
os.symlink("../../../../..", "top/sub/up")
os.symlink("missing", "top/dangling")
os.mkfifo("top/pipe")
open(b"top/no\\xffutf", "w").write("x")
open("top/shut", "w").write("x")
os.chmod("top/shut", 0)
"""


def members(folder: Path) -> list[str]:
    """Everything in a folder; a link or device in it is a failure."""
    found = []
    for path in sorted(folder.rglob("*")):
        assert not path.is_symlink() and (path.is_file() or path.is_dir()), path
        found.append(str(path.relative_to(folder)))
    return found


def test_only_files_and_folders_come_out(box: BlockingSandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """E14"""
    assert box.exec(["python3", "-c", HOSTILE]).exit_code == 0
    with caplog.at_level(logging.WARNING):
        report = box.copy_out("top", tmp_path / "new" / "out")
    names = members(tmp_path / "new" / "out")
    assert [name for name in names if "utf" not in name and name != "shut"] == [
        "empty", "plain", "sub", "sub/deep", "sub/deep/run",
    ]  # fmt: skip
    assert any("utf" in name for name in names)
    assert os.access(tmp_path / "new" / "out" / "sub" / "deep" / "run", os.X_OK)
    text = "\n".join(report.skipped)
    for name in ("passwd", "etc", "sub/up", "dangling"):
        assert f"'{name}': a link" in text
    assert "'pipe': neither a file nor a folder" in text
    if box.kind == "docker":  # the local box of a privileged test run may read everything
        assert "'shut': cut:" in text
    assert "not copied out of the box: 'passwd': a link" in caplog.text
    with pytest.raises(FileExistsError):
        box.copy_out("top", tmp_path / "new" / "out")
    with pytest.raises(FileNotFoundError):
        box.copy_out("missing", tmp_path / "other")
    with pytest.raises(NotADirectoryError):
        box.copy_out("top/plain", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_copying_stops_at_its_limits(box: BlockingSandbox, tmp_path: Path):
    """E14"""
    box.exec("mkdir many big; cd many; seq 300 | xargs touch; cd ../big; head -c 5000 /dev/zero > a; cp a b; echo > c")
    with pytest.raises(ValueError, match="max_entries=100"):
        box.copy_out("many", tmp_path / "many", max_files=100)
    report = box.copy_out("big", tmp_path / "big", max_bytes=6000)
    assert members(tmp_path / "big") == ["a", "c"] and report.num_bytes == 5001
    assert report.skipped == ("'b': 5000 bytes more than max_bytes=6000 allows",)
    report = box.copy_out(".", tmp_path / "all", max_files=200)
    assert len(members(tmp_path / "all")) == 5 and any("max_entries=200" in line for line in report.skipped)


def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path):
    """E14"""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", data: bytes = b"") -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size, entry.mode = kind, link, len(data), 0o6755
            tar.addfile(entry, io.BytesIO(data))

        add("./good", data=b"fine")
        add("/absolute", data=b"x")
        add("../outside", data=b"x")
        add("a/../../outside", data=b"x")
        add("link", tarfile.SYMTYPE, link=str(tmp_path))
        add("link/through", data=b"inside all the same")
        add("hard", tarfile.LNKTYPE, link="/etc/passwd")
        add("device", tarfile.CHRTYPE)
        add("pipe", tarfile.FIFOTYPE)
        add("good", data=b"second")
        add("good/below", data=b"x")
        add("x" * 300, data=b"x")
        add("/".join("d" * 100), data=b"x")
        add("big", data=bytes(2000))
    archive.seek(0)
    target = CopyTarget(tmp_path / "out", max_bytes=1000, max_files=100)
    unpack_tar(archive, target)
    assert members(tmp_path / "out") == ["good", "link", "link/through"]
    assert (tmp_path / "out" / "good").read_text() == "fine"
    assert (tmp_path / "out" / "good").stat().st_mode & 0o7000 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    report = target.report()
    assert report.num_files == 2 and len(report.skipped) == 12


def test_a_broken_archive_is_said_and_the_rest_of_many_members_is_counted(tmp_path: Path):
    target = CopyTarget(tmp_path / "broken", max_bytes=1000, max_files=10)
    unpack_tar(io.BytesIO(b"no tar at all" * 100), target)
    assert "can't be read any further" in target.report().skipped[0]
    for number in range(1500):
        target.skip(f"x{number}", "a link")
    assert len(target.report().skipped) == 1001 and target.report().skipped[-1] == "and 501 more"
