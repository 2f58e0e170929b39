"""Runs with a critic and with dynamic sampling: what they leave behind, and that a resumed one goes on unbroken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from test_runs import ENVIRONMENT, RECIPE, learned, train, weights

from quintain.agents.store import read_step
from quintain.trainer.checkpoint import latest_good
from quintain.trainer.tracking import read_metrics

PPO = ("algorithm.advantage=gae", "algorithm.gae_lambda=0.9", "algorithm.critic.learning_rate=1e-3")
DAPO = ("algorithm.dynamic_sampling=true", "algorithm.max_draws_factor=3", "algorithm.tasks_per_step=3")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("algorithms")
    (folder / "checksum.py").write_text(ENVIRONMENT, encoding="utf-8")
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return folder / "small.yaml"


def run_of(recipe: Path, name: str, *settings: str) -> Path:
    out = recipe.parent / name
    result = train(recipe, out, "tracking.aim=false", *settings)
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PPO, DAPO], ids=["critic", "dynamic sampling"])
def test_a_resumed_run_goes_on_as_the_unbroken_one(recipe: Path, settings: tuple[str, ...]) -> None:
    name = "ppo" if settings is PPO else "dapo"
    whole = run_of(recipe, name, *settings)
    part = recipe.parent / f"{name}-part"
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step_000004")
    run_of(recipe, part.name, *settings, "--resume")
    assert learned(part)[-1] == learned(whole)[-1] and weights(part) == weights(whole)
    rows = [row for row in read_metrics(whole) if "train/loss" in row]
    if settings is PPO:
        assert all(row["critic/value_loss"] > 0 for row in rows)
        assert rows[-1]["policy/version"] == 4  # the critic's steps are not the policy's
        return
    draws: list[int] = []
    for row in rows:
        groups = read_step(whole / "trajectories" / f"step_{row['step']:06d}.jsonl").groups
        draws += [group.draw for group in groups]
        num_informative = len(groups) - row["reward/num_filtered_groups"]
        assert num_informative + row["reward/num_missing_groups"] == 3
        assert num_informative == 3 or len(groups) == 9
    assert draws == list(range(len(draws)))
    assert any(row["reward/num_filtered_groups"] for row in rows)
    checkpoint = latest_good(whole / "checkpoints")
    assert checkpoint is not None and checkpoint.state["next_draw"] == len(draws)
    assert json.loads((checkpoint.path / "loop.json").read_text())["next_draw"] == len(draws)
