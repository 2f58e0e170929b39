"""Commands through the engine's own exec: another user, and images without python3."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from quintain.sandbox import BlockingSandbox, SandboxDied, SandboxPool, SandboxUnavailable, open_pool
from quintain.sandbox.config import SandboxConfig

pytestmark = pytest.mark.docker

TREE = """
    sleep 300 & (setsid sh -c 'trap "" TERM HUP; while :; do sleep 0.1; done' &) ; (sleep 301 &)
    echo before; sleep 302
"""


@pytest.fixture(scope="module")
def bare_pool(bare_image: str) -> Iterator[SandboxPool]:
    config = SandboxConfig(type="docker", image=bare_image, pool_size=1, max_output_bytes=10_000)
    with open_pool(config, needs_isolation=True, owner="tests") as pool:
        yield pool


@pytest.fixture
def bare(bare_pool: SandboxPool) -> Iterator[BlockingSandbox]:
    with bare_pool.lease() as box:
        yield box


def num_processes(engine: docker.APIClient, box: BlockingSandbox) -> int:
    return len(engine.top(box.id)["Processes"])


def test_a_box_without_python_runs_commands(bare: BlockingSandbox):
    """E06"""
    assert bare.exec("command -v python3").exit_code != 0
    result = bare.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert bare.exec(["echo", "$HOME; true", "a b"]).stdout == "$HOME; true a b\n"
    assert bare.exec("mkdir sub; pwd").stdout == "/work\n"
    result = bare.exec('wc -c; pwd; echo "$COLOUR"', stdin=b"x" * 3_000_000, cwd="sub", env={"COLOUR": "blue"})
    assert result.stdout.split() == ["3000000", "/work/sub", "blue"]
    assert bare.exec("kill -9 $$").exit_code == 137
    assert bare.exec("printf '\\377\\376ok'; exit 5").stdout == "\ufffd\ufffdok"
    assert bare.exec("cat /proc/self/oom_score_adj").stdout == "1000\n"
    assert bare.exec(f"echo {'x' * 200_000} | wc -c").stdout == "200001\n"


def test_what_cannot_be_started_there_is_a_result_too(bare: BlockingSandbox):
    assert bare.exec(["no-such-program"]).exit_code == 127
    assert "no-such-program" in bare.exec(["no-such-program"]).stderr
    bare.write_file("plain.txt", b"text")
    assert bare.exec(["./plain.txt"]).exit_code == 126
    assert bare.exec("true", cwd="no-such-folder").exit_code == 126
    assert bare.exec(["true", "nul\0byte"]).exit_code == 126
    assert bare.exec([]).exit_code == 126


def test_its_whole_tree_dies_at_the_deadline(bare: BlockingSandbox, engine: docker.APIClient):
    """E01, E02"""
    started = time.monotonic()
    result = bare.exec(TREE, timeout_s=1)
    assert time.monotonic() - started < 2.5
    assert result.timed_out and result.exit_code == 137 and result.stdout == "before\n" and not result.box_lost
    assert num_processes(engine, bare) == 1
    assert bare.exec("echo again").stdout == "again\n"


def test_its_output_is_bounded_and_counted(bare: BlockingSandbox):
    """E03, E04"""
    result = bare.exec("head -c 3000000 /dev/zero | tr '\\0' x; echo E")
    assert result.truncated and result.stdout_bytes == 3_000_002 and len(result.stdout) < 10_200
    assert result.stdout.endswith("xE\n") and result.stdout_file is None


def test_a_child_that_holds_its_stdout_delays_it_little(bare: BlockingSandbox):
    started = time.monotonic()
    assert bare.exec("sleep 20 & echo early").stdout == "early\n"
    assert time.monotonic() - started < 3


def test_its_orphans_are_reaped(bare: BlockingSandbox):
    """E08"""
    bare.exec("for i in $(seq 50); do (sleep 0.05 &) ; done")
    time.sleep(0.3)
    assert bare.exec("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z '").stdout == "0\n"


def test_its_files(bare: BlockingSandbox, tmp_path: Path):
    data = bytes(range(256)) * 6000
    bare.write_file("deep/er/file.bin", data, mode=0o640)
    assert bare.read_file("deep/er/file.bin", max_bytes=len(data)) == data
    bare.write_file("-dash", "naïve\r\n")
    assert bare.read_text("-dash") == "naïve\r\n"
    bare.exec("ln -s /etc/passwd deep/link; mkfifo deep/pipe; echo 12345 > five; echo x > shut; chmod 0 shut")
    with pytest.raises(FileNotFoundError, match="missing"):
        bare.read_file("missing")
    with pytest.raises(IsADirectoryError):
        bare.read_file("deep")
    with pytest.raises(IsADirectoryError):
        bare.write_file("deep", b"")
    with pytest.raises(NotADirectoryError):
        bare.write_file("five/x", b"")
    with pytest.raises(PermissionError):
        bare.read_file("shut")
    with pytest.raises(OSError, match="Read-only"):
        bare.write_file("/etc/new", b"x")
    with pytest.raises(OSError, match="not a regular file"):
        bare.read_file("deep/pipe")
    with pytest.raises(ValueError, match="max_bytes=5"):
        bare.read_file("five", max_bytes=5)
    listed = {entry.name: (entry.kind, entry.mode) for entry in bare.list_folder("deep")}
    assert listed["er"][0] == "folder" and listed["link"][0] == "link" and listed["pipe"][0] == "other"
    assert ("file", 0o640) in [(entry.kind, entry.mode) for entry in bare.list_folder("deep/er")]
    report = bare.copy_out("deep", tmp_path / "out")
    assert (tmp_path / "out" / "er" / "file.bin").read_bytes() == data
    assert sorted(report.skipped) == ["'link': a link", "'pipe': neither a file nor a folder"]


def test_a_session_there(bare: BlockingSandbox):
    session = bare.session()
    session.exec("mkdir -p a; cd a; export COLOUR=blue")
    assert session.exec('pwd; echo "$COLOUR"').stdout == "/work/a\nblue\n"


def test_it_is_never_used_twice(bare_pool: SandboxPool):
    with bare_pool.lease() as box:
        first = box.id
    with bare_pool.lease() as box:
        assert box.id != first


def test_a_job_that_writes_to_its_first_process_forges_nothing(bare: BlockingSandbox):
    flood = "yes > /proc/1/fd/1 & yes > /proc/1/fd/2 & sleep 1; exit 9"
    result = bare.exec(flood, timeout_s=5)
    assert (result.exit_code, result.stdout) == (9, "")
    assert bare.exec("kill -9 1; kill -STOP 1; sleep 20", timeout_s=0.5).timed_out
    assert bare.exec("echo ok").stdout == "ok\n"


def test_its_death_is_an_error_of_its_own(bare_pool: SandboxPool, engine: docker.APIClient):
    """E13"""
    with bare_pool.lease() as box:
        engine.kill(box.id)
        with pytest.raises(SandboxDied, match=box.id):
            box.exec("true")
        with pytest.raises(SandboxDied, match="gone"):
            box.exec("true")


def test_another_user_in_an_ordinary_box(make_pool, engine: docker.APIClient):
    pool: SandboxPool = make_pool("docker")
    with pool.lease() as box:
        first = box.id
        assert box.exec("id -u", user="root").stdout == "0\n"
        assert box.exec("id -u; id -g", user="1234:77").stdout == "1234\n77\n"
        assert box.exec("id -u").stdout == "1000\n"
        missing = box.exec("true", user="nobody-here")
        assert missing.exit_code == 126 and "nobody-here" in missing.stderr
        started = time.monotonic()
        result = box.exec(TREE, timeout_s=1, user="root")
        assert time.monotonic() - started < 2.5
        assert result.timed_out and result.stdout == "before\n" and not result.box_lost
        assert num_processes(engine, box) == 1
        box.exec("sleep 300 & exit", user="root")
    with pool.lease() as box:  # the root's job is ended at reset, so the same box is clean
        assert box.id == first and num_processes(engine, box) == 1


def test_a_box_that_cannot_be_cleaned_says_so_and_is_replaced(make_pool, engine: docker.APIClient):
    """A job of another user that was started behind our back: the agent may not end it."""
    pool: SandboxPool = make_pool("docker")
    with pool.lease() as box:
        first = box.id
        engine.exec_start(engine.exec_create(box.id, ["sleep", "300"], user="4321")["Id"], detach=True)
        time.sleep(0.3)
        started = time.monotonic()
        result = box.exec("echo before; sleep 30", timeout_s=1)
        assert time.monotonic() - started < 2
        assert result.timed_out and result.box_lost and result.stdout == "before\n"
        with pytest.raises(SandboxDied, match="can't be undone"):
            box.exec("true")
    with pool.lease() as box:
        assert box.id != first and box.exec("echo ok").stdout == "ok\n"
    assert pool.num_replaced == 1


def test_the_local_box_has_one_user(make_pool):
    with make_pool("local").lease() as box, pytest.raises(SandboxUnavailable, match="user='root'"):
        box.exec("true", user="root")


def test_an_empty_image_names_the_remedy(make_pool, engine: docker.APIClient, tmp_path: Path):
    archive = io.BytesIO()
    tarfile.open(fileobj=archive, mode="w").close()
    (tmp_path / "empty.tar").write_bytes(archive.getvalue())
    engine.import_image(str(tmp_path / "empty.tar"), repository="quintain-test-void", tag="1")
    try:
        with pytest.raises(SandboxUnavailable, match=r"no python3 and no /bin/sh"):
            make_pool("docker", image="quintain-test-void:1")
    finally:
        engine.remove_image("quintain-test-void:1", force=True)


def test_the_proxy_needs_an_image_with_python(make_pool, bare_image: str):
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.network=proxy needs .* use an image with python3"):
        make_pool("docker", image=bare_image, network="proxy", allowed_hosts=["a.org"])
