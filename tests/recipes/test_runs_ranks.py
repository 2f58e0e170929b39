"""Whole runs in several processes through the command line: equal results, Ctrl-C, a dying rank, resuming with one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_runs import ENVIRONMENT, RECIPE, command, train, wait_for

from quintain.trainer.checkpoint import Checkpoints
from quintain.trainer.tracking import read_metrics

RANKS = ("parallelism.strategy=fsdp2", "parallelism.num_processes=2", "tracking.aim=false")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small recipe of `test_runs.py`; its runs share a warm start."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "checksum.py").write_text(ENVIRONMENT, encoding="utf-8")
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return path


def start(recipe: Path, run: Path, *overrides: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(recipe, run, *RANKS, *overrides), stderr=subprocess.PIPE)


def ranks_of(run: Path) -> list[int]:
    """Process ids of those that train in the run folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if process.name.isdigit() and str(run).encode() in words and b"\0WORLD_SIZE=2" in environment:
            found.append(int(process.name))
    return sorted(found)


def rank_number(pid: int) -> int:
    words = dict(word.split(b"=", 1) for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in word)
    return int(words[b"RANK"])


def assert_all_ended(run: Path) -> None:
    deadline = time.monotonic() + 20
    while ranks_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(run) == []


def test_two_processes_learn_what_one_does_and_ctrl_c_saves_and_ends_both(recipe: Path, tmp_path: Path):
    """The run goes on in one process from what two have saved."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    process = start(recipe, run, "trainer.steps=400", "checkpoint.every_steps=0")
    wait_for(run, 2, process)
    assert len(ranks_of(run)) == 2
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert_all_ended(run)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["learner"], status["num_processes"]) == ("interrupted", "fsdp2", 2)
    found = Checkpoints(run / "checkpoints", keep=2).latest_good()
    assert found is not None and found.step >= 2 and (found.path / "optimizer").is_dir()

    steps = f"trainer.steps={found.step + 1}"
    resumed = train(recipe, run, "--resume", "tracking.aim=false", steps)
    assert resumed.returncode == 0, resumed.stderr
    assert train(recipe, alone, "tracking.aim=false", "trainer.steps=2").returncode == 0
    several, one = (read_metrics(folder) for folder in (run, alone))
    losses = [[row["train/loss"] for row in rows if "train/loss" in row] for rows in (several, one)]
    assert len(losses[0]) == found.step + 1
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)


@pytest.mark.parametrize("dead", [0, 1])
def test_the_death_of_a_rank_ends_the_run_at_once_and_leaves_no_process(recipe: Path, tmp_path: Path, dead: int):
    run = tmp_path / "run"
    process = start(recipe, run, "trainer.steps=4000")
    wait_for(run, 1, process)
    (victim,) = [pid for pid in ranks_of(run) if rank_number(pid) == dead]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, stderr = process.communicate(timeout=90)
    assert time.monotonic() - killed < 60
    assert process.returncode != 0
    assert f"rank {dead} was killed by signal 9".encode() in stderr, stderr
    assert_all_ended(run)


def test_ranks_started_by_torchrun_train_without_a_second_launch(recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2", "--no-python"]
    arguments = command(recipe, run, *RANKS, "trainer.steps=1")
    result = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads((run / "status.json").read_text())["num_processes"] == 2
