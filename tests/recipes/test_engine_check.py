"""An engine that can't be there is refused before any work, with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintain.recipes.loader import RecipeError, load_recipe
from quintain.recipes.preflight import preflight

RECIPE = Path(__file__).parents[2] / "recipes" / "calculator_sglang.yaml"
QUINTAIN = Path(sys.executable).with_name("quintain")


def fake_environment(folder: Path, body: str) -> Path:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    return python


def refusal(python: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        preflight(load_recipe(RECIPE, [f"engine.launch.python={python}"]))
    return str(caught.value)


def test_a_missing_interpreter_is_named_with_what_makes_one(tmp_path: Path):
    told = refusal(tmp_path / "nowhere" / "python")
    assert f"there is no interpreter {tmp_path}/nowhere/python" in told
    assert "make sglang" in told and "pip install 'sglang>=0.5.23'" in told


def test_an_interpreter_without_sglang_is_refused():
    assert "SGLang is not installed where" in refusal(Path(sys.executable))


def test_what_is_no_interpreter_is_refused(tmp_path: Path):
    (tmp_path / "python").write_text("no program")
    assert "can't be run" in refusal(tmp_path / "python")


@pytest.mark.parametrize(
    ("version", "told"), [("0.5.20", "updating weights from disk"), ("0.4.9", "begin/end bracket")]
)
def test_a_version_that_is_known_not_to_work_is_refused(version: str, told: str, tmp_path: Path):
    assert told in refusal(fake_environment(tmp_path, f"echo {version}"))


@pytest.mark.sglang
def test_the_environment_of_make_sglang_is_accepted(sglang_python: Path):
    assert preflight(load_recipe(RECIPE, [f"engine.launch.python={sglang_python}"])) == []


def test_a_server_that_does_not_answer_is_named():
    settings = ["engine.launch=null", 'engine.urls=["http://127.0.0.1:9"]']
    with pytest.raises(RecipeError, match=r"engine.urls: http://127.0.0.1:9: .*start the server first"):
        preflight(load_recipe(RECIPE, settings))


@pytest.mark.parametrize("command", ["train", "eval", "rollout"])
def test_every_command_that_samples_asks_first_and_exits_2(command: str, tmp_path: Path):
    result = subprocess.run(
        [QUINTAIN, command, RECIPE, f"engine.launch.python={tmp_path}/none/python"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        check=False,
    )
    assert result.returncode == 2
    assert "make sglang" in result.stderr
    assert "warm start" not in result.stderr
    assert not (tmp_path / "runs").exists()
