"""The main job learns: the calculator recipe, as the README runs it, with a real Docker engine and with local boxes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintain.agents.store import read_step
from quintain.trainer.tracking import read_metrics

QUINTAIN = Path(sys.executable).with_name("quintain")
RECIPE = Path(__file__).parents[2] / "recipes" / "calculator.yaml"
SEEDS = [int(seed) for seed in os.environ.get("QUINTAIN_LEARNING_SEEDS", "1").split(",")]
"""One in the usual run; `QUINTAIN_LEARNING_SEEDS=1,2,3` for all that the README speaks of."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sandbox", [pytest.param("docker", marks=pytest.mark.docker), "local"])
def test_a_tiny_model_learns_to_use_the_calculator(
    sandbox: str, seed: int, warm_start_cache: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    if sandbox == "docker":
        request.getfixturevalue("engine_url")
    run = tmp_path / "run"
    settings = (f"seed={seed}", f"sandbox.type={sandbox}", f"warm_start.cache_dir={warm_start_cache}")
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [QUINTAIN, "train", RECIPE, *settings, "--out", run],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    summary = json.loads((run / "summary.json").read_text())
    print(summary)
    assert 0.25 <= summary["success_before"] <= 0.5
    assert summary["success_after"] >= 0.9
    assert summary["sandbox"] == sandbox
    assert summary["max_staleness_seen"] == 0
    assert_first_step_is_on_policy(run)
    assert_tools_were_really_run(run)


SHORT = ("trainer.steps=12", "evaluation.every_steps=0", "evaluation.greedy=false")
"""Enough to see it improve; `QUINTAIN_SGLANG_LEARNING=full` for the whole recipe."""


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_the_main_job_learns_on_an_sglang_server_that_gets_the_weights_after_every_step(
    sglang_python: Path, lent_sglang_url: str, warm_start_cache: Path, tmp_path: Path
):
    run, full = tmp_path / "run", os.environ.get("QUINTAIN_SGLANG_LEARNING") == "full"
    settings = ("sandbox.type=local", f"warm_start.cache_dir={warm_start_cache}", *(() if full else SHORT))
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    recipe = RECIPE.with_name("calculator_sglang.yaml")
    command = [QUINTAIN, "train", recipe, f"engine.launch.python={sglang_python}", *settings, "--out", run]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    summary = json.loads((run / "summary.json").read_text())
    print(summary)
    assert 0.25 <= summary["success_before"] <= 0.5
    assert summary["success_after"] >= (0.9 if full else summary["success_before"] + 0.2)
    assert (summary["engine"], summary["max_staleness_seen"]) == ("sglang", 0)
    batches = [row for row in read_metrics(run) if "train/loss" in row]
    assert [row["policy/version"] for row in batches] == list(range(1, summary["steps"] + 1))
    assert max(row["mismatch/logprob_gap_max"] for row in batches) <= 1e-4
    assert max(row["mismatch/logprob_gap_mean"] for row in batches) <= 1e-5
    assert batches[0]["train/ratio_max"] == 1.0
    assert_tools_were_really_run(run)
    assert not (run / "weights").exists()

    # The trained model on a server that runs already.
    command = [QUINTAIN, "eval", run, "--num-tasks", "128", "engine.launch=null", f'engine.urls=["{lent_sglang_url}"]']
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    success = float(result.stdout.split()[1].rstrip(","))
    assert success == pytest.approx(summary["success_after"], abs=0.15)


def assert_first_step_is_on_policy(run: Path) -> None:
    """The ratio against the recomputed log-probs is exactly 1; the sampler's are the trainer's but for rounding."""
    first = next(row for row in read_metrics(run) if row["step"] == 1)
    assert first["train/ratio_max"] == first["train/ratio_mean"] == 1.0
    assert first["mismatch/logprob_gap_max"] <= 5e-5
    assert first["mismatch/k3"] < 1e-8


def assert_tools_were_really_run(run: Path) -> None:
    """In the last step, calls got the calculator's answers, and nothing broke."""
    last = max((run / "trajectories").glob("step_*.jsonl"))
    trajectories = [t for group in read_step(last).groups for t in group.trajectories]
    answered = [m for t in trajectories for m in t.messages if m.role == "tool"]
    assert len(trajectories) == 128
    assert len(answered) >= 100
    assert not any(t.outcome.is_failure for t in trajectories)
