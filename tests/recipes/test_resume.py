"""Which run `--resume` means, and how the user is told what to paste."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quintain.recipes.hints import command_line
from quintain.recipes.loader import RecipeError, dump_config, load_recipe
from quintain.recipes.resume import checkpoint_to_resume, find_run

RECIPE = Path(__file__).parents[2] / "recipes" / "calculator.yaml"


def a_run(folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(load_recipe(RECIPE, overrides).config))
    (folder / "status.json").write_text(json.dumps({"state": "interrupted", "step": 0}))
    return folder


def test_a_run_s_own_config_or_folder_resumes_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = a_run(Path("runs/calculator-20260101-000000")).resolve()
    newer = a_run(Path("runs/calculator-20260102-000000")).resolve()
    for recipe in (run, run / "config.yaml"):
        loaded = load_recipe(recipe)
        assert find_run(loaded, None) == run
        assert checkpoint_to_resume(run, loaded) is None
    assert find_run(load_recipe(run), newer) == newer  # said explicitly
    assert find_run(load_recipe(RECIPE), None) == newer


def test_no_other_run_is_resumed_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    a_run(Path("runs/calculator-big-20260101-000000"), "name=calculator-big")
    with pytest.raises(RecipeError, match="name the run folder with --out"):
        find_run(load_recipe(RECIPE), None)
    a_run(Path("runs/calculator-20260101-000000"))
    copied = tmp_path / "config.yaml"
    copied.write_text(RECIPE.read_text())
    with pytest.raises(RecipeError, match="is in no run folder"):
        find_run(load_recipe(copied), None)


def test_one_differing_setting_is_one_problem_and_an_advice(tmp_path: Path):
    run = a_run(tmp_path / "run")
    with pytest.raises(RecipeError) as caught:
        checkpoint_to_resume(run, load_recipe(RECIPE, ["algorithm.learning_rate=0.5"]))
    assert len(caught.value.problems) == 1
    assert "2 problems" not in str(caught.value)
    assert str(caught.value).endswith("another --out")


def test_a_hint_names_the_program_as_it_can_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "bin" / "quintain"
    program.parent.mkdir()
    program.write_text("#!/bin/sh")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line("view", Path("runs/a b")) == f"{program} view 'runs/a b'"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command_line("view") == "quintain view"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert command_line("view") == "quintain view"
