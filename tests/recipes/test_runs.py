"""Whole runs through the command line: same seed same run, kill and resume, Ctrl-C, refusals.

The environment rewards by a checksum of what was said, so that a model that has only learned to stop gets rewards of
every size. Learning is `test_learning.py`'s; here counts what a run leaves behind.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from quintain.trainer.checkpoint import Checkpoints
from quintain.trainer.tracking import read_aim_record, read_metrics

QUINTAIN = Path(sys.executable).with_name("quintain")
ENVIRONMENT = """
from quintain.envs import ToolEnv, reward, tool
from quintain.sandbox import BlockingSandbox


class Checksum(ToolEnv):
    needs_isolation = False
    sandbox_scope = "call"

    def rows(self, split):
        return [{"prompt": f"Say {word}"} for word in (f"{split} {n}" for n in range(40))]

    @tool
    def shout(self, text: str, sandbox: BlockingSandbox) -> str:
        \"\"\"Say it loudly.\"\"\"
        return sandbox.exec(["echo", text]).stdout

    @reward
    def checksum(self):
        return sum(map(ord, self.answer)) % 5 / 4

    def is_success(self, reward):
        return True

    def demonstrate(self, task, *, clean, rng):
        return self.dialogue(task.prompt[4 : 4 + rng.integers(2, 8)])
"""
RECIPE = {
    "name": "small",
    "seed": 3,
    "environment": {"id": "checksum.py:Checksum", "num_eval_tasks": 8},
    "warm_start": {
        "enabled": True,
        "target_success": 0.01,
        "max_steps": 80,
        "first_check_step": 40,
        "check_every_steps": 10,
        "cooldown_steps": 5,
        "num_check_tasks": 20,
        "num_demonstrations": 2000,
        "cache_dir": "cache",
    },
    "model": {"scratch": {"vocab_size": 320, "hidden_size": 32, "num_layers": 1, "intermediate_size": 64}},
    "sandbox": {"type": "local", "pool_size": 2},
    "rollout": {"max_new_tokens": 16, "max_trajectory_tokens": 128},
    "algorithm": {"tasks_per_step": 2, "group_size": 2, "learning_rate": 1e-3, "truncated": "penalise"},
    "trainer": {"steps": 4, "num_threads": 1},
    "checkpoint": {"every_steps": 2},
    "evaluation": {"every_steps": 0, "greedy": False},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    (tmp_path / "checksum.py").write_text(ENVIRONMENT, encoding="utf-8")
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return path


def train(recipe: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(recipe, out, *arguments), capture_output=True, text=True, timeout=200, check=False)


def command(recipe: Path, out: Path, *arguments: str) -> list[str]:
    return [str(QUINTAIN), "train", str(recipe), "--out", str(out), *arguments]


def learned(run: Path) -> list[dict[str, float]]:
    """The run's metrics without what the clock decides."""
    rows = read_metrics(run)
    timed = ("time", "perf/", "rollout/event_loop_lag")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


def wait_for(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be interrupted"
        status = run / "status.json"
        if status.exists() and json.loads(status.read_text())["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in time")


def weights(run: Path) -> bytes:
    found = Checkpoints(run / "checkpoints", keep=2).latest_good()
    assert found is not None
    return (found.model_path / "model.safetensors").read_bytes()


def test_equal_seeds_give_equal_runs_and_another_seed_another(recipe: Path, tmp_path: Path):
    a, b, c = (tmp_path / name for name in "abc")
    for run, extra in ((a, ()), (b, ("rollout.env_threads=3", "sandbox.pool_size=1")), (c, ("seed=4",))):
        result = train(recipe, run, "tracking.aim=false", "trainer.steps=2", *extra)
        assert result.returncode == 0, result.stderr
    assert learned(a) == learned(b)
    assert weights(a) == weights(b)
    assert weights(a) != weights(c)


def test_a_killed_run_goes_on_from_its_last_checkpoint_as_the_unbroken_run_would(recipe: Path, tmp_path: Path):
    """F01, D01 (in sync mode): equal metrics and weights, the same Aim run, no step twice."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(recipe, whole).returncode == 0
    process = subprocess.Popen(
        command(recipe, broken, "trainer.steps=400"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(broken, 3, process)
    before = read_aim_record(broken)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = train(recipe, broken, "--resume")
    assert result.returncode == 0, result.stderr
    after = read_aim_record(broken)
    assert before is not None
    assert after is not None
    assert before.run_hash == after.run_hash
    steps = [row["step"] for row in read_metrics(broken) if "train/loss" in row]
    assert steps == sorted(set(steps))
    assert steps[:4] == [1, 2, 3, 4]
    assert learned(broken)[: len(learned(whole)) - 1] == learned(whole)[:-1]
    if steps[-1] == 4:
        assert weights(broken) == weights(whole)


def test_ctrl_c_keeps_the_finished_batches_and_exits_130(recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(recipe, run, "trainer.steps=400", "checkpoint.every_steps=0"), stderr=subprocess.PIPE, text=False
    )
    wait_for(run, 2, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    found = Checkpoints(run / "checkpoints", keep=2).latest_good()
    assert found is not None
    assert found.step >= 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == found.step
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"


def test_resuming_with_another_recipe_names_the_setting(recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(recipe, run, "tracking.aim=false", "trainer.steps=1").returncode == 0
    result = train(recipe, run, "tracking.aim=false", "--resume", "algorithm.learning_rate=0.5")
    assert result.returncode == 2
    assert "algorithm.learning_rate" in result.stderr
    result = train(recipe, run, "tracking.aim=false", "--resume", "trainer.steps=2")
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in read_metrics(run) if "train/loss" in row] == [1, 2]


def test_a_finished_run_is_resumed_to_its_own_step_and_its_model_can_be_read(recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(recipe, run, "tracking.aim=false", "trainer.steps=1").returncode == 0
    again = subprocess.run([QUINTAIN, "train", run, "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"run folder: {run}" in again.stderr
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 1)
    for held_out in ((), ("--eval",)):
        told = subprocess.run(
            [QUINTAIN, "rollout", run, "--num-tasks", "2", *held_out], capture_output=True, text=True, check=False
        )
        assert told.returncode == 0, told.stderr
        assert "step_000001" in told.stderr and "warm" not in told.stderr
        assert told.stdout.count("Say eval" if held_out else "Say train") >= 4


def test_the_line_that_ctrl_c_in_the_warm_start_prints_goes_on_with_that_run(recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    overrides = (
        "tracking.aim=false",
        "trainer.steps=1",
        "warm_start.first_check_step=2000",
        "warm_start.max_steps=3000",
    )
    process = subprocess.Popen(command(recipe, run, *overrides), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = run / "status.json"
        if status.exists() and json.loads(status.read_text())["phase"] == "warm start":
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    hint = stderr.strip().splitlines()[-1].removeprefix("go on with: ")
    assert not (run / "metrics.jsonl").exists()
    again = subprocess.Popen([*shlex.split(hint)], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert again.stderr is not None
    told = [again.stderr.readline() for _ in range(2)]
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert f"run folder: {run}" in told[0]
    assert "starts again" in told[1]


def test_a_summary_has_what_runs_are_compared_by(recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    result = train(recipe, run, "tracking.aim=false", "trainer.steps=1")
    assert result.returncode == 0
    assert "quintain view" in result.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == {
        "success_before",
        "success_after",
        "reward_first",
        "reward_last",
        "steps",
        "seconds",
        "tokens_per_second",
        "max_staleness_seen",
        "sandbox",
        "engine",
        "seed",
    }
    assert (summary["sandbox"], summary["engine"], summary["seed"]) == ("local", "local", 3)
    log = (run / "logs" / "run.log").read_text()
    assert f"run folder: {run}" in log and "Traceback" not in log
    assert "isolates nothing" in json.loads((run / "status.json").read_text())["sandbox_notice"]


@pytest.mark.docker
def test_no_box_is_left_after_a_kill_and_the_next_start(recipe: Path, tmp_path: Path, engine_url: str):
    import docker

    client = docker.APIClient(engine_url, version="auto")
    run = tmp_path / "run"
    labelled = {"label": f"quintain.run={run.name}"}
    arguments = ("tracking.aim=false", "sandbox.type=docker", "trainer.steps=400")
    process = subprocess.Popen(command(recipe, run, *arguments), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_for(run, 1, process)
    assert client.containers(all=True, filters=labelled)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = train(recipe, run, *arguments[:2], "trainer.steps=2", "--resume")
    assert result.returncode == 0, result.stderr
    assert not client.containers(all=True, filters=labelled)


def test_a_run_that_is_going_on_is_not_touched_by_a_second_start(recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(recipe, run, "tracking.aim=false", "trainer.steps=5000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(run, 2, process)
    for extra in ((), ("--resume",)):
        result = train(recipe, run, "tracking.aim=false", "trainer.steps=5000", *extra)
        assert result.returncode == 2, result.stderr
    assert f"process {process.pid} is training in it" in result.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    steps = [row["step"] for row in read_metrics(run) if "train/loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert not (run / "superseded").exists()
