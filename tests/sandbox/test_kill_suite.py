"""What a model may do to its box, the whole list: each case is contained, typed, leaves the box usable or replaced, and
costs this machine's memory less than twice the cap on output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from quintain.sandbox import BlockingSandbox, ExecResult, SandboxDied, SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

pytestmark = pytest.mark.docker

CAP_BYTES = 8 * 2**20
MEASURE = """
import json, os, sys
from quintain.sandbox import open_pool
from quintain.sandbox.config import SandboxConfig

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

config = SandboxConfig(type="docker", pool_size=1, max_output_bytes=int(sys.argv[1]), memory_bytes=2**29,
                       image=sys.argv[4] or None)
with open_pool(config, needs_isolation=True, owner="tests") as pool, pool.lease() as box:
    user = sys.argv[5] or None
    box.exec("true", user=user)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = rss()
    result = box.exec(sys.argv[2], timeout_s=float(sys.argv[3]), user=user)
    print(json.dumps({"grown": peak() - before, "timed_out": result.timed_out, "exit_code": result.exit_code,
                      "stdout_bytes": result.stdout_bytes, "duration_s": result.duration_s}))
"""


def python(source: str) -> list[str]:
    return ["python3", "-c", source]


def ended(result: ExecResult) -> bool:
    return result.timed_out and result.exit_code == 137


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attack and what its result must be."""

    command: str | list[str]
    expect: Callable[[ExecResult], bool]
    timeout_s: float = 1.0


TICK = "while :; do echo tick >> ticks; sleep 0.02; done"
FORK_BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
CASES = {
    "plain": Case(command="echo kept; sleep 60", expect=lambda r: ended(r) and r.stdout == "kept\n"),
    "children": Case(command=f"({TICK}) & ({TICK}) & wait", expect=ended),
    "setsid": Case(command=f"setsid sh -c 'trap \"\" TERM HUP INT; {TICK}' & sleep 60", expect=ended),
    "double fork": Case(command=f"( (setsid sh -c '{TICK}' &) & ) ; sleep 60", expect=ended),
    "stdout holder": Case(
        command="(sleep 60 &) ; echo early", expect=lambda r: r.exit_code == 0 and r.duration_s < 0.5, timeout_s=10
    ),
    "shell fork bomb": Case(command="b() { b | b & b; }; b", expect=lambda r: r.timed_out or r.exit_code != 0),
    "python fork bomb": Case(command=python(FORK_BOMB), expect=ended),
    "prlimit on PID 1": Case(
        command="prlimit --pid 1 --nproc=1:1 --nofile=9:9 --as=1000000:1000000; echo done",
        expect=lambda r: r.exit_code == 0 and r.box_lost,
        timeout_s=10,
    ),
    "disk fill": Case(
        command="for d in /work /tmp /dev/shm; do head -c 1G /dev/zero > $d/big; done",
        expect=lambda r: r.exit_code != 0 and "No space left" in r.stderr and not r.oom_killed,
        timeout_s=20,
    ),
    "100k small files": Case(
        command=python("for n in range(100_000): open(f'f{n}', 'w').write('x')"),
        expect=lambda r: r.exit_code == 1 and "No space left" in r.stderr,
        timeout_s=20,
    ),
    "non-UTF-8": Case(
        command="printf '\\377\\376ok'; exit 4", expect=lambda r: (r.exit_code, r.stdout) == (4, "\ufffd\ufffdok")
    ),
    "NUL": Case(command="printf 'a\\000b'", expect=lambda r: r.stdout == "a\0b" and r.raw_stdout == b"a\0b"),
    "NUL argument": Case(command=["echo", "a\0b"], expect=lambda r: r.exit_code == 126),
    "kill 1": Case(
        command="kill 1; kill -9 1; kill -INT 1; kill -STOP 1; kill -SEGV 1; echo there",
        expect=lambda r: "there" in r.stdout,
    ),
    "kill everything": Case(command="kill -9 -1; echo there", expect=lambda r: r.exit_code in (0, 137)),
    "rm -rf /": Case(
        command="rm -rf --no-preserve-root / 2>/dev/null", expect=lambda r: r.exit_code != 0, timeout_s=20
    ),
    "stopped process": Case(command="kill -STOP $$; echo never", expect=lambda r: ended(r) and r.stdout == ""),
    "stopped child": Case(command="sleep 60 & kill -STOP $!; wait", expect=ended),
    "50 orphans": Case(
        command="for i in $(seq 50); do (sleep 0.2 &) ; done", expect=lambda r: r.exit_code == 0, timeout_s=10
    ),
    "deep folders": Case(
        command=python("import os\nfor n in range(2000): os.mkdir('d' * 99); os.chdir('d' * 99)"),
        expect=lambda r: r.exit_code in (0, 1),
        timeout_s=20,
    ),
    "closed streams": Case(command="exec >&- 2>&- <&-; sleep 60", expect=ended),
    "memory": Case(
        command=python("x = []\nwhile True: x.append(bytearray(2**20))"),
        expect=lambda r: r.oom_killed and r.exit_code == 137,
        timeout_s=20,
    ),
}


@pytest.fixture(scope="module")
def suite_pool(engine_url: str) -> Iterator[SandboxPool]:
    config = SandboxConfig(type="docker", pool_size=1, max_output_bytes=10_000)
    with open_pool(config, needs_isolation=True, owner="tests") as pool:
        yield pool


@pytest.mark.parametrize("name", CASES)
def test_it_is_contained_and_the_next_trajectory_gets_a_clean_box(engine_url: str, suite_pool: SandboxPool, name: str):
    """E01, E02, E05, E08, E13"""
    case = CASES[name]
    with suite_pool.lease() as box:
        started = time.monotonic()
        result = box.exec(case.command, timeout_s=case.timeout_s)
        assert (
            time.monotonic() - started < case.timeout_s + 1.5
        )  # the deadline, a second, and our own way there and back
        assert case.expect(result), result
        if result.box_lost:  # the caller is told, and the box is replaced
            with pytest.raises(SandboxDied, match="can't be undone"):
                box.exec("true")
        else:
            assert box.exec("echo ok").stdout == "ok\n"
        if result.timed_out:
            assert only_ours_left(box)
    with suite_pool.lease() as box:
        assert only_ours_left(box)
        assert box.exec("ls -A /work /tmp /dev/shm").stdout.split() == ["/dev/shm:", "/tmp:", "/work:"]
        assert box.exec("ulimit -n; cat /proc/1/limits | grep -c ' 9 '").stdout.split()[1] == "0"


def only_ours_left(box: BlockingSandbox) -> bool:
    """No process but the agent, the shell that counts, and what it counts with."""
    return box.exec("ps -e -o pid=,stat=,comm= | grep -vc -e ' ps$' -e ' grep$' -e ' sh$' ").stdout == "1\n"


ONE_GB = "head -c 1000000000 /dev/zero | tr '\\0' 'y'"


@pytest.mark.parametrize(
    ("command", "timeout_s", "way"),
    [
        (ONE_GB, 60.0, "agent"),
        (ONE_GB, 60.0, "another user"),
        ("yes", 2.0, "agent"),
        ("yes >&2 & yes", 2.0, "agent"),
        ("yes >&2 & yes", 2.0, "another user"),
        ("yes >&2 & yes", 2.0, "no python3"),
    ],
)
def test_a_flood_costs_this_machine_less_than_twice_the_cap(bare_image: str, command: str, timeout_s: float, way: str):
    """E03: the memory of a process of its own that does nothing else, at its peak."""
    image, user = bare_image if way == "no python3" else "", "1234" if way == "another user" else ""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(CAP_BYTES), command, str(timeout_s), image, user],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["stdout_bytes"] > 5 * CAP_BYTES and seen["duration_s"] < timeout_s + 1, seen
    num_streams = 2 if ">&2" in command else 1  # each has a cap of its own
    assert seen["grown"] < 2 * num_streams * CAP_BYTES, seen
    assert (seen["stdout_bytes"] == 10**9 and not seen["timed_out"]) or command.startswith("yes")
