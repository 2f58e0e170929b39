"""Images without a registry, named after what is in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintain.sandbox.docker.build import BUILT, BuildError, build
from quintain.sandbox.docker.engine import Engine

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def engine(engine_url: str) -> Iterator[Engine]:
    """The engine; images that a test built are removed afterwards."""
    engine = Engine.connect()
    before = {tag for image in engine.client().images() for tag in image.get("RepoTags") or ()}
    yield engine
    for image in engine.client().images():
        for tag in image.get("RepoTags") or ():
            if tag.startswith(BUILT) and tag not in before:
                engine.client().remove_image(tag, force=True)
    engine.close()


@pytest.fixture
def context(engine: Engine, tmp_path: Path) -> Path:
    """A Dockerfile on top of quintain's own image, with a file beside it."""
    base = build(engine, None).image.reference
    (tmp_path / "note").write_text("hello\n")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base}\nCOPY note /etc/note\nARG WORD=none\nRUN echo $WORD >/etc/word\n"
    )
    return tmp_path


def test_the_default_image_is_built_once_and_has_what_an_agent_needs(engine: Engine, make_pool):
    first, again = build(engine, None), build(engine, None)
    assert again.cached and again.image == first.image and again.image.digest.startswith("sha256:")
    wanted = ["sh", "bash", "ls", "cat", "grep", "sed", "awk", "find", "python3", "tar"]
    wanted += ["git"] if shutil.which("git") == "/usr/bin/git" else []
    with make_pool("docker", image=first.image.reference).lease() as box:
        for program in wanted:
            assert box.exec(f"command -v {program}").exit_code == 0, program
        if "git" in wanted:
            commands = (
                "git init -q r && cd r && touch f && git add f && git -c user.name=a -c user.email=a@b commit -qm x"
            )
            assert box.exec(f"{commands} && git log --oneline | wc -l").stdout == "1\n"


def test_a_dockerfile_is_built_once_and_anew_when_its_content_changes(engine: Engine, context: Path, make_pool):
    first = build(engine, context)
    assert not first.cached and first.source == "Dockerfile"
    os.utime(context / "note", (0, 0))
    assert build(engine, context / "Dockerfile").cached
    with make_pool("docker", image=first.image.reference).lease() as box:
        assert box.exec("cat /etc/note /etc/word").stdout == "hello\nnone\n"
    (context / "note").write_text("other\n")
    second = build(engine, context, args={"WORD": "given"})
    assert not second.cached and second.image.reference != first.image.reference
    with make_pool("docker", image=second.image.reference).lease() as box:
        assert box.exec("cat /etc/note /etc/word").stdout == "other\ngiven\n"


def test_files_that_dockerignore_names_do_not_count(engine: Engine, context: Path):
    (context / ".dockerignore").write_text("big*\n")
    first = build(engine, context)
    (context / "big.bin").write_bytes(b"x" * 1000)
    assert build(engine, context).cached and build(engine, context).image == first.image


def test_a_dockerfile_that_fails_says_where(engine: Engine, context: Path):
    (context / "Dockerfile").write_text((context / "Dockerfile").read_text() + "RUN echo words; exit 7\n")
    with pytest.raises(BuildError, match=r"returned a non-zero code: 7(.|\n)*words"):
        build(engine, context)
    (context / "Dockerfile").write_text("FROM no/such:image\n")
    with pytest.raises(BuildError, match=r"no/such:image.*docker pull"):
        build(engine, context)
    with pytest.raises(BuildError, match="no such file"):
        build(engine, context / "missing")


def test_a_run_line_has_no_network_unless_asked(engine: Engine, context: Path):
    text = (context / "Dockerfile").read_text()
    (context / "Dockerfile").write_text(
        text + "RUN ls /sys/class/net >/etc/interfaces; test $(wc -l </etc/interfaces) = 1\n"
    )
    assert not build(engine, context).cached


def test_a_root_file_system_becomes_an_image_as_folder_and_as_tar(engine: Engine, tmp_path: Path, make_pool):
    base = engine.client().create_container(build(engine, None).image.reference, ["x"])["Id"]
    with open(tmp_path / "root.tar", "wb") as file:
        file.writelines(engine.client().export(base))
    engine.client().remove_container(base)
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "xf", tmp_path / "root.tar", "-C", root], check=True)
    (root / "etc" / "mine").write_text("folder\n")
    for source, text in ((tmp_path / "root.tar", ""), (root, "folder\n")):
        built = build(engine, source)
        assert built.source == "root file system" and not built.cached and build(engine, source).cached
        with make_pool("docker", image=built.image.reference).lease() as box:
            assert box.exec("cat /etc/mine").stdout == text
    assert tarfile.is_tarfile(tmp_path / "root.tar")
