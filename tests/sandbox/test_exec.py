"""Running commands: the same behaviour in both kinds of box."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quintain.sandbox import BackgroundLoopError, BlockingSandbox, SandboxError, SandboxPool
from quintain.sandbox.agent_frames import pack, receive
from quintain.sandbox.agent_sandbox import agent_command
from quintain.sandbox.background import background_loop

# cat goes on past processes that end while it reads; awk would stop at the first.
COUNT_ZOMBIES = (
    """cat /proc/[0-9]*/stat 2>/dev/null | awk -v agent="$PPID" '$3 == "Z" && $4 == agent {n++} END {print n + 0}'"""
)


def test_a_command_gives_exit_code_and_both_streams(box: BlockingSandbox):
    result = box.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.timed_out and not result.truncated
    assert (result.stdout_bytes, result.stderr_bytes) == (4, 4)


def test_an_argv_is_not_seen_by_a_shell(box: BlockingSandbox):
    assert box.exec(["echo", "$HOME; true", "a b"]).stdout == "$HOME; true a b\n"


def test_stdin_cwd_and_env_reach_the_command(box: BlockingSandbox):
    box.exec("mkdir sub")
    result = box.exec('wc -c; basename "$PWD"; echo "$COLOUR"', stdin=b"x" * 300_000, cwd="sub", env={"COLOUR": "blue"})
    assert result.stdout.split() == ["300000", "sub", "blue"]


def test_stdin_that_nobody_reads_does_not_hang(box: BlockingSandbox):
    assert box.exec("exit 4", stdin=b"x" * 1_000_000).exit_code == 4


def test_a_mebibyte_of_arguments_arrives(box: BlockingSandbox):
    arguments = [f"{number:04}" + "x" * 65_000 for number in range(16)]
    result = box.exec(["python3", "-c", "import sys; print(sum(map(len, sys.argv)), sys.argv[-1][:4])", *arguments])
    assert result.stdout == f"{16 * 65_004 + 2} 0015\n"
    line = "printf %s " + "y" * 1_000_000 + " | wc -c; exit 6"  # longer than the kernel takes as one argument
    result = box.exec(line)
    assert (result.exit_code, result.stdout.strip(), result.stderr) == (6, "1000000", "")
    assert box.exec("cat; " + "#" * 300_000, stdin=b"input").stdout == "input"


def test_a_large_stdin_is_never_in_the_box_whole(pool: SandboxPool, make_pool):
    small = {"memory_bytes": 48 * 2**20, "work_bytes": 2**21} if pool.kind == "docker" else {}
    with make_pool(pool.kind, **small).lease() as box:
        data = bytes(100 * 2**20)
        result = box.exec("wc -c", stdin=data, timeout_s=60)
        assert (result.stdout.strip(), result.oom_killed) == (str(len(data)), False)
        assert box.exec("head -c 5 | wc -c; exit 3", stdin=data, timeout_s=60).exit_code == 3
        assert box.exec("sleep 30", stdin=data, timeout_s=0.5).timed_out
        assert box.exec("echo ok").stdout == "ok\n"


def test_what_cannot_be_started_is_a_result_not_an_error(box: BlockingSandbox):
    assert box.exec(["no-such-program"]).exit_code == 127
    assert box.exec("no-such-program").exit_code == 127
    box.write_file("plain.txt", b"text")
    assert box.exec(["./plain.txt"]).exit_code == 126
    assert box.exec("true", cwd="no-such-folder").exit_code == 126
    assert box.exec(["true", "nul\0byte"]).exit_code == 126
    assert box.exec([]).exit_code == 126
    assert box.exec(["true", "x" * 300_000]).exit_code == 126
    assert box.exec("kill -9 $$").exit_code == 137
    assert box.exec("exit 255").exit_code == 255


def test_a_command_past_its_deadline_is_killed_and_keeps_its_output(box: BlockingSandbox):
    """E01"""
    started = time.monotonic()
    result = box.exec("echo before; sleep 30", timeout_s=1)
    assert time.monotonic() - started < 3
    assert result.timed_out and result.exit_code == 137 and result.stdout == "before\n"
    assert box.exec("echo again").stdout == "again\n"


def test_nothing_of_a_timed_out_command_goes_on(box: BlockingSandbox):
    """E02: neither its background jobs, nor those that ignore TERM and left its session."""
    tick = "while :; do echo tick >> {file}; sleep 0.02; done"
    script = f"""trap '' TERM HUP
        setsid sh -c 'trap "" TERM HUP; {tick.format(file="a")}' &
        (setsid sh -c '{tick.format(file="b")}' &)
        {tick.format(file="c")}"""
    assert box.exec(script, timeout_s=1).timed_out
    before = [box.read_file(name) for name in "abc"]
    time.sleep(0.3)
    assert all(before) and [box.read_file(name) for name in "abc"] == before
    assert box.exec(COUNT_ZOMBIES).stdout == "0\n"


def test_a_flood_of_output_is_bounded_while_it_runs(box: BlockingSandbox):
    """E03"""
    result = box.exec("yes", timeout_s=1)
    assert result.timed_out and result.truncated
    assert result.stdout_bytes > 5_000_000
    assert len(result.stdout) < 10_200


@pytest.mark.parametrize(("size", "cut"), [(9_999, False), (10_000, False), (10_001, True), (200_000, True)])
def test_cut_output_says_so_and_complete_output_does_not(box: BlockingSandbox, size: int, cut: bool):
    """E04"""
    result = box.exec(f"head -c {size - 1} /dev/zero | tr '\\0' x; printf E")
    assert result.truncated is cut and result.stdout_bytes == size
    assert result.stdout[0] == "x" and result.stdout[-1] == "E"
    if cut:
        assert f"[... {size - 10_000} bytes cut ...]" in result.stdout
    else:
        assert result.stdout == "x" * (size - 1) + "E"


def test_bytes_that_are_no_text_are_replaced_and_the_rest_is_kept(box: BlockingSandbox):
    """E05"""
    assert box.exec("printf '\\377\\376ok'; exit 5").stdout == "\ufffd\ufffdok"
    assert box.exec("printf 'a\\000b'").stdout == "a\0b"
    halves = box.exec("printf '\\360\\237'; sleep 0.1; printf '\\230\\200'; exit 5")
    assert (halves.stdout, halves.exit_code) == ("\U0001f600", 5)


def test_a_cut_never_splits_a_character(box: BlockingSandbox):
    """E05"""
    for shift in range(4):
        box.write_file("text", b"." * shift + "\U0001f600é".encode() * 5_000)
        result = box.exec("cat text")
        assert result.truncated and "\ufffd" not in result.stdout


def test_a_background_child_that_holds_stdout_does_not_delay_the_result(box: BlockingSandbox):
    started = time.monotonic()
    assert box.exec("(sleep 0.3; echo late; echo yes > late) & echo early").stdout == "early\n"
    assert time.monotonic() - started < 0.25
    time.sleep(0.5)
    assert box.read_file("late") == b"yes\n"  # its writing to a stream that nobody keeps did not end it


def test_orphans_are_reaped(box: BlockingSandbox):
    """E08"""
    box.exec("for i in $(seq 50); do (sleep 0.05 &) ; done")
    time.sleep(0.3)
    assert box.exec(COUNT_ZOMBIES).stdout == "0\n"


def test_the_host_environment_stays_out(pool: SandboxPool, make_pool, monkeypatch: pytest.MonkeyPatch):
    """E12"""
    monkeypatch.setenv("CANARY", "xyz123")
    monkeypatch.setenv("HTTP_PROXY", "http://xyz123@proxy.example")
    with make_pool(pool.kind).lease() as box:
        names = {line.partition("=")[0] for line in box.exec("env").stdout.splitlines()}
        assert "xyz123" not in box.exec("env; cat /proc/$PPID/environ 2>/dev/null").stdout or pool.kind == "local"
        assert names <= {"PATH", "LANG", "HOME", "TMPDIR", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}


def test_a_blocking_call_on_the_background_loop_is_refused(pool: SandboxPool, box: BlockingSandbox):
    async def misuse(call) -> None:
        call()

    for call in (lambda: box.exec("true"), pool.acquire):
        with pytest.raises(BackgroundLoopError, match="background loop"):
            background_loop().run(misuse(call))


def test_a_box_that_was_given_back_is_void(pool: SandboxPool):
    with pool.lease() as box:
        pass
    with pytest.raises(SandboxError, match="given back"):
        box.exec("true")


WRONG = {
    "an endless deadline": ({"timeout_s": math.inf}, "timeout_s=inf"),
    "a deadline of 30 years": ({"timeout_s": 1e9}, "timeout_s=1000000000.0"),
    "no number": ({"timeout_s": math.nan}, "timeout_s=nan"),
    "a deadline of the past": ({"timeout_s": -1}, "timeout_s=-1"),
    "a text as deadline": ({"timeout_s": "5"}, "timeout_s='5'"),
    "a number in an argv": ({"command": ["echo", 3]}, "command[1]=3"),
    "bytes in an argv": ({"command": [b"ls"]}, "command[0]=b'ls'"),
    "bytes as command": ({"command": b"ls"}, "command=b'ls'"),
    "a number as command": ({"command": 3}, "command=3"),
    "a command of 8 MiB": ({"command": "#" * 2**23}, f"command='{'#' * 79}... with cwd and env takes"),
    "a number in the environment": ({"env": {"A": 3}}, "env['A']=3"),
    "a number as a variable's name": ({"env": {3: "x"}}, "name 3"),
    "an equals sign in a variable's name": ({"env": {"A=B": "x"}}, "name 'A=B'"),
    "a NUL in the environment": ({"env": {"A": "x\0"}}, "env['A']='x\\x00'"),
    "a number as folder": ({"cwd": 3}, "cwd=3"),
    "a text as stdin": ({"stdin": "x"}, "stdin='x'"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_what_no_box_can_be_asked_is_the_callers_error(box: BlockingSandbox, arguments: dict[str, Any], said: str):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        box.exec(**{"command": "true", **arguments})
    assert box.exec("echo ok").stdout == "ok\n"


def test_a_wrong_argument_of_a_file_operation_is_the_callers_error(box: BlockingSandbox):
    wrong: Any = 3
    for call in (
        lambda: box.read_file(wrong),
        lambda: box.write_file(wrong, b""),
        lambda: box.list_folder(wrong),
        lambda: box.write_file("x", wrong),
        lambda: box.write_file("x", b"", mode=2**40),
        lambda: box.read_file("x" * 2**23),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert box.exec("ls -A; echo ok").stdout == "ok\n"


def test_the_agent_answers_whatever_it_is_asked(tmp_path: Path):
    """Past the caller's checks: an error or a result, and the next request is served."""
    folders = [tmp_path / name for name in ("work", "tmp")]
    for folder in folders:
        folder.mkdir()
    options = {"private": False, "work": str(folders[0]), "folders": [*map(str, folders)], "env": {}}
    argv = agent_command(sys.executable, json.dumps({**options, "lease_s": 60}))
    plain = {"op": "exec", "command": "echo ok", "timeout_s": 5, "cwd": None, "env": {}, "max_output_bytes": 1000}
    requests = [{"timeout_s": value} for value in (1e9, math.inf, math.nan, "5", None)]
    requests += [{"command": ["echo", 3]}, {"command": 3}, {"command": None}, {"env": {"A": 3}}, {"env": 3}, {"cwd": 3}]
    requests += [{"op": "read", "path": 3}, {"op": "no such"}, {"op": 3}, {"max_output_bytes": None}]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        for number, request in enumerate(requests):
            for asked in ({**plain, **request}, plain):
                agent.stdin.write(pack({**asked, "id": number}))
                answer = receive(agent.stdout.fileno())
                assert answer is not None, request
                assert answer[0]["id"] == number
                body = answer[1].all()
            assert body == b"ok\n", request
        agent.stdin.close()
