"""What is kept of output: head and tail, counts, the bytes themselves, and a file in the box with more."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintain.sandbox import BlockingSandbox, ExecResult, SandboxPool
from quintain.sandbox.agent_output import Kept
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.attach import Attachment

MIB = 2**20
NUMBERS = "".join(f"{number}\n" for number in range(1, 20_001))


@given(st.integers(1, 12), st.lists(st.binary(max_size=30)))
def test_head_and_tail_are_kept_whatever_the_pieces(limit: int, pieces: list[bytes]):
    """E03, E04: in memory there are never more than `limit` bytes."""
    kept, whole = Kept(limit), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
        assert len(kept.data) <= limit
    head, tail = whole[: limit // 2], whole[limit // 2 :]
    assert kept.whole() == head + tail[-(limit - limit // 2) :]
    assert kept.whole() == head + tail[-(limit - limit // 2) :] and kept.total == len(whole)


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=20))), st.lists(st.integers(1, 9), min_size=1))
def test_frames_of_an_engine_arrive_whole_in_whatever_pieces(frames: list[tuple[int, bytes]], sizes: list[int]):
    sent = b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\n"
    sent += b"".join(struct.pack(">BxxxI", stream, len(payload)) + payload for stream, payload in frames)

    async def receive() -> tuple[bytes, str]:
        attachment, at, turn = Attachment(), 0, 0
        while at < len(sent):
            attachment.data_received(sent[at : at + sizes[turn % len(sizes)]])
            at, turn = at + sizes[turn % len(sizes)], turn + 1
        attachment.reader.feed_eof()
        return await attachment.reader.read(), attachment.last_words()

    stdout, stderr = asyncio.run(receive())
    assert stdout == b"".join(payload for stream, payload in frames if stream == 1)
    assert stderr == b"".join(payload for stream, payload in frames if stream == 2).decode("utf-8", "replace")


def test_a_cut_stream_is_whole_in_a_file_that_the_notice_names(box: BlockingSandbox):
    """E04"""
    result = box.exec("seq 20000; seq 20000 >&2; exit 3")
    assert result.truncated and result.exit_code == 3 and not result.files_cut
    assert (result.stdout_bytes, result.stderr_bytes) == (len(NUMBERS), len(NUMBERS))
    for text, file in ((result.stdout, result.stdout_file), (result.stderr, result.stderr_file)):
        assert file is not None and f"bytes cut ...]\n[all of it is in {file}]\n" in text
        assert box.read_text(file) == NUMBERS
        assert text.startswith("1\n2\n") and text.endswith("19999\n20000\n")
    assert result.stdout_file is not None
    assert box.exec(["grep", "-c", "77", result.stdout_file]).stdout == "560\n"


def test_output_that_fits_makes_no_file(box: BlockingSandbox):
    result = box.exec("seq 100")
    assert (result.stdout_file, result.stderr_file, result.files_cut) == (None, None, False)
    assert result.raw_stdout.decode() == result.stdout


@pytest.mark.parametrize("kind", [pytest.param("docker", marks=pytest.mark.docker), "local"])
def test_a_file_ends_at_the_limit_and_says_so(make_pool, kind: str):
    pool: SandboxPool = make_pool(kind, max_output_bytes=10_000, max_spill_bytes=50_000)
    with pool.lease() as box:
        result = box.exec("seq 20000")
        assert result.files_cut and result.stdout_file is not None
        assert f"[its first 50000 bytes are in {result.stdout_file}]" in result.stdout
        assert box.read_text(result.stdout_file) == NUMBERS[:50_000]
        assert result.stdout_bytes == len(NUMBERS)
    pool = make_pool(kind, max_output_bytes=10_000, max_spill_bytes=0)
    with pool.lease() as box:
        result = box.exec("seq 20000")
        assert result.truncated and result.stdout_file is None and "bytes cut" in result.stdout


def test_the_files_are_few_and_start_anew_after_a_reset(pool: SandboxPool):
    with pool.lease() as box:
        files = [box.exec("seq 20000").stdout_file for _ in range(9)]
        assert len(set(files)) == 9 and files[-1] is not None
        left = box.list_folder(files[-1].rpartition("/")[0])
        assert [entry.name for entry in left] == ["6.stdout", "7.stdout", "8.stdout", "9.stdout"]
    with pool.lease() as box:
        again = box.exec("seq 20000").stdout_file
        assert again is not None and again.endswith("/1.stdout")
    assert pool.num_replaced == 0


def test_a_job_that_spoils_the_files_spoils_nothing_else(box: BlockingSandbox):
    folder = '"${TMPDIR:-/tmp}/.output"'
    spoils = [f"ln -s /etc {folder}", f"touch {folder}"]
    if box.kind == "docker":  # the local box of a privileged test run may write everywhere
        spoils.append(f"mkdir {folder}; chmod 0 {folder}")
    for spoil in spoils:
        box.exec(f"chmod 700 {folder}; rm -rf {folder}; {spoil}")
        result = box.exec("seq 20000")
        assert result.truncated and result.stdout_file is None and result.stdout.endswith("20000\n")
    box.exec(f"chmod 700 {folder}")


def test_the_bytes_themselves_are_there_too(box: BlockingSandbox):
    """E05"""
    result = box.exec("printf '\\377\\000ok'; printf '\\376' >&2")
    assert (result.raw_stdout, result.raw_stderr) == (b"\xff\x00ok", b"\xfe")
    cut = box.exec("head -c 30000 /dev/zero | tr '\\0' '\\377'")
    assert cut.raw_stdout == b"\xff" * 10_000 and cut.stdout_bytes == 30_000


def test_a_result_can_be_made_of_text():
    result = ExecResult.of_text(exit_code=3, stdout="ä\n", stderr="no")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "ä\n", "no")
    assert (result.raw_stdout, result.stdout_bytes, result.truncated) == ("ä\n".encode(), 3, False)


@pytest.mark.docker
def test_a_kill_for_memory_is_told_apart_from_any_other(make_pool):
    with make_pool("docker", memory_bytes=96 * MIB, work_bytes=16 * MIB).lease() as box:
        eaten = box.exec(["python3", "-c", "x = []\nwhile True: x.append(bytearray(2**20))"], timeout_s=20)
        assert eaten.oom_killed and eaten.exit_code == 137 and not eaten.timed_out
        inside = box.exec("python3 -c 'bytearray(2**28)'; echo went on", timeout_s=20)
        assert inside.oom_killed and (inside.exit_code, inside.stdout) == (0, "went on\n")
        killed = box.exec("kill -9 $$")
        assert not killed.oom_killed and killed.exit_code == 137
        assert box.exec("cat /proc/self/oom_score_adj").stdout == "1000\n"
        assert not box.exec("sleep 5", timeout_s=0.2).oom_killed


def test_folders_that_would_eat_the_memory_limit_are_refused():
    with pytest.raises(ValueError, match="too small for work_bytes"):
        SandboxConfig(memory_bytes=96 * MIB, work_bytes=64 * MIB)
