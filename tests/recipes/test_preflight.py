"""Settings that can't work together are refused, with both numbers, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintain.recipes.loader import RecipeError, load_recipe
from quintain.recipes.preflight import preflight

RECIPE = Path(__file__).parents[2] / "recipes" / "calculator.yaml"


def test_the_shipped_recipe_passes_without_a_notice():
    assert preflight(load_recipe(RECIPE)) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.max_new_tokens=192"], "rollout.max_new_tokens (192 tokens a turn)"),
        (["rollout.max_trajectory_tokens=2048"], "model.scratch.max_positions (1024 tokens)"),
        (["model.scratch.num_kv_heads=3"], "model.scratch.num_heads (4 heads) is not divisible"),
        (["model.path=./nowhere"], "holds no model"),
        (["environment.id=nowhere.py:Env"], "there is no file"),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(overrides: list[str], told: str):
    with pytest.raises(RecipeError) as caught:
        preflight(load_recipe(RECIPE, overrides))
    assert told in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        preflight(load_recipe(RECIPE, ["rollout.max_new_tokens=192", "model.scratch.num_kv_heads=3"]))
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.group_size=1"], "every advantage is 0"),
        (["warm_start.enabled=false"], "random weights"),
        (["trainer.steps=3"], "algorithm.warmup_steps (5) takes all 3 optimizer steps"),
    ],
)
def test_what_will_hardly_learn_is_said(overrides: list[str], told: str):
    (notice,) = preflight(load_recipe(RECIPE, overrides))
    assert told in notice


def test_a_run_that_was_stopped_in_its_warm_start_can_be_resumed_or_started_anew(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(RECIPE.read_text())
    for resume in (True, False):
        assert preflight(load_recipe(RECIPE), out=tmp_path, resume=resume) == []
    (tmp_path / "metrics.jsonl").write_text("")
    assert preflight(load_recipe(RECIPE), out=tmp_path, resume=True) == []
    with pytest.raises(RecipeError, match="add --resume"):
        preflight(load_recipe(RECIPE), out=tmp_path)
