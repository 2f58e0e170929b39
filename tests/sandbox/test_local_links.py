"""A local box whose job puts a link, or another folder, where the box's own was: nothing past it is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from quintain.sandbox import BlockingSandbox

REPLACE = {
    "a link for the work folder": 'rm -rf "$HOME"; ln -s {victim} "$HOME"',
    "a link for the folder for temporary files": 'rm -rf "$TMPDIR"; ln -s {victim} "$TMPDIR"',
    "a link above both": 'rm -rf "${{HOME%/*}}"; ln -s {victim} "${{HOME%/*}}"',
    "a link with the folder moved away": 'mv "$HOME" "$TMPDIR/kept"; ln -s {victim} "$HOME"',
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of this machine that looks like a box's, with a file in every place that a cleaning could reach."""
    folder = tmp_path / "victim"
    for place in (folder, folder / "work", folder / "tmp"):
        place.mkdir()
        (place / "precious").write_text("kept")
    folder.chmod(0o751)
    return folder


def whole(victim: Path) -> bool:
    places = (victim, victim / "work", victim / "tmp")
    kept = all(place.joinpath("precious").read_text() == "kept" for place in places)
    return kept and stat.S_IMODE(victim.stat().st_mode) == 0o751


def box_folder(box: BlockingSandbox) -> Path:
    return Path(box.exec('printf %s "${HOME%/*}"').stdout)


@pytest.mark.parametrize("script", REPLACE.values(), ids=REPLACE)
def test_a_reset_does_not_follow_a_link_and_the_box_is_replaced(make_pool, victim: Path, script: str):
    pool = make_pool("local")
    with pool.lease() as box:
        first, folder = box.id, box_folder(box)
        box.exec("cd /; " + script.format(victim=victim))
        assert folder.is_symlink() or any(path.is_symlink() for path in folder.iterdir())
    with pool.lease() as box:
        assert box.id != first
        assert box.exec("pwd -P; ls -A").stdout.split("\n")[1:] == [""]
        assert str(victim) not in box.exec("pwd -P").stdout
    pool.close()
    assert whole(victim) and not os.path.lexists(folder)


@pytest.mark.parametrize("script", REPLACE.values(), ids=REPLACE)
def test_the_end_of_a_box_does_not_follow_a_link(make_pool, victim: Path, script: str):
    pool = make_pool("local")
    box = pool.acquire()
    folder = box_folder(box)
    box.exec("cd /; " + script.format(victim=victim))
    pool.close()
    assert whole(victim) and not os.path.lexists(folder)


def test_links_inside_the_folders_are_removed_and_never_followed(make_pool, victim: Path):
    pool = make_pool("local")
    with pool.lease() as box:
        first = box.id
        box.exec(
            f"mkdir -p a/b/c; ln -s {victim} one; ln -s {victim} a/two; ln -s {victim} a/b/c/3; chmod 0 a/b; ls -R"
        )
    with pool.lease() as box:
        assert box.id == first and box.exec("ls -A").stdout == ""
    assert whole(victim)


def test_another_folder_in_the_place_of_the_boxs_own_costs_the_box(make_pool):
    pool = make_pool("local")
    with pool.lease() as box:
        first = box.id
        box.exec('cd /; mv "$HOME" "$TMPDIR"; mkdir "$HOME"')
    with pool.lease() as box:
        assert box.id != first and box.exec("echo ok").stdout == "ok\n"
