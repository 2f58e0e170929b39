"""Whole runs on servers of their own: a server that dies, the end of a run, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from test_runs import ENVIRONMENT, RECIPE, command

from quintain.agents.store import read_step
from quintain.trainer.tracking import read_metrics

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def recipe(tmp_path: Path, sglang_python: Path) -> Path:
    path = tmp_path / "small.yaml"
    (tmp_path / "checksum.py").write_text(ENVIRONMENT, encoding="utf-8")
    launch = {"python": str(sglang_python), "device": "cpu", "dtype": "float32"}
    settings = {"engine": {"type": "sglang", "launch": launch}, "tracking": {"aim": False}}
    path.write_text(yaml.safe_dump(RECIPE | settings), encoding="utf-8")
    return path


def pids_in(sessions: set[int]) -> list[int]:
    """Processes of these sessions that live."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError, FileNotFoundError):
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z" if entry.name.isdigit() else False
            if alive and os.getsid(int(entry.name)) in sessions:
                found.append(int(entry.name))
    return found


def servers_of(run: Path) -> list[int]:
    """The main processes of the SGLang servers that the run started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            # The watcher in front of it is a Python with `-c`.
            if (
                b"-m" in arguments[1:2]
                and b"sglang.launch_server" in arguments
                and str(run).encode() in b"".join(arguments)
            ):
                found.append(int(entry.name))
    return found


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[bytes], *, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert process.poll() is None, "the run ended before that"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def status(run: Path) -> dict[str, object]:
    path = run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {"step": 0, "phase": ""}


def step(run: Path) -> int:
    return int(str(status(run)["step"]))


def test_a_killed_server_comes_back_with_the_newest_weights_and_no_process_outlives_the_run(
    recipe: Path, tmp_path: Path
):
    """D12 with real servers, which are also re-synced in mid-run."""
    run = tmp_path / "run"
    arguments = command(recipe, run, "checkpoint.every_steps=0")
    process = subprocess.Popen([*arguments, "trainer.steps=4000"], stderr=subprocess.PIPE)
    wait_until(lambda: step(run) >= 3, process)
    (server,) = servers_of(run)
    sessions = {os.getsid(server)}
    assert len(pids_in(sessions)) >= 3
    os.kill(server, signal.SIGKILL)
    killed_at = step(run)
    wait_until(lambda: step(run) >= killed_at + 3, process)
    (again,) = servers_of(run)
    sessions.add(os.getsid(again))
    assert len(sessions) == 2

    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert pids_in(sessions) == []
    assert not (run / "weights").exists()
    ended_at = step(run)
    assert "sglang 0." in str(status(run)["engine"])

    resumed = subprocess.run(
        [*arguments, f"trainer.steps={ended_at + 1}", "--resume"], capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    batches = [row for row in read_metrics(run) if "train/loss" in row]
    assert [row["step"] for row in batches] == list(range(1, ended_at + 2))
    assert max(row["mismatch/logprob_gap_max"] for row in batches) <= 1e-4  # stale weights would show here
    assert {row["policy/staleness_max"] for row in batches} == {0}
    last = read_step(run / "trajectories" / f"step_{ended_at + 1:06d}.jsonl")
    versions = {v for group in last.groups for t in group.trajectories for row in t.rows for v in row.policy_versions}
    assert versions - {-1} == {int(batches[-2]["policy/version"])}
    assert servers_of(run) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_ends_while_its_server_starts_leaves_no_process(
    recipe: Path, tmp_path: Path, number: signal.Signals, code: int
):
    run = tmp_path / "run"
    arguments = command(recipe, run, "warm_start.enabled=false")
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_until(lambda: servers_of(run), process)
    sessions = {os.getsid(pid) for pid in servers_of(run)}
    time.sleep(1)
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    deadline = time.monotonic() + 20
    while pids_in(sessions) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pids_in(sessions) == []
