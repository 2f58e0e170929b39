"""The command line from outside: exit codes, messages, and what is (not) imported on the way to them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quintain.recipes.cli import ENVIRONMENT_DEFAULTS
from quintain.recipes.cli_errors import INPUT_ERRORS, Terminated, report
from quintain.recipes.loader import RecipeError

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "gymnasium",
    "datasets",
    "docker",
    "aim",
    "accelerate",
    "httpx",
    "rich",
    "asyncio",
)
COMMANDS = (
    ("train",),
    ("eval",),
    ("rollout",),
    ("show",),
    ("view",),
    ("env",),
    ("env", "list"),
    ("env", "check"),
)


def quintain(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    program = "from quintain.recipes.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def imported_by(*arguments: str) -> set[str]:
    """Top-level names of everything that a command imported."""
    result = quintain(*arguments, env={"PYTHONPROFILEIMPORTTIME": "1"})
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines}


def test_a_typo_ends_with_code_2_and_the_nearest_key():
    """H01"""
    result = quintain("train", "recipes/calculator.yaml", "algorithm.lerning_rate=1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.strip().splitlines() == [
        "error: recipes/calculator.yaml:",
        "  algorithm.lerning_rate: unknown key; did you mean algorithm.learning_rate?",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "recipes/calculator.yaml", "algorithm.lerning_rate=1"),
        ("train", "recipes/calculator.yaml", "algorithm.clip_low=2"),
        ("train", "nowhere.yaml"),
        ("train", "recipes/calculator.yaml", "rollout.max_new_tokens=5000"),
        ("eval", "nowhere.yaml"),
        ("rollout", "recipes/calculator.yaml", "seed=-1"),
        ("--help",),
        ("train", "--help"),
    ],
)
def test_nothing_heavy_is_imported_before_the_input_is_known_to_be_good(arguments: tuple[str, ...]):
    """H01"""
    imported = imported_by(*arguments)
    assert "click" in imported
    assert imported & set(HEAVY) == set()


def cpu_s(*command: str) -> float:
    """The least CPU time of five runs, in seconds; wall clock would measure the neighbours."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", *command], cwd=ROOT, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


def test_a_typo_is_found_about_as_quickly_as_pydantic_and_yaml_are_imported():
    """H01"""
    program = "from quintain.recipes.cli import main; main()"
    typo_s = cpu_s(program, "train", "recipes/calculator.yaml", "algorithm.lerning_rate=1")
    assert typo_s < 4 * cpu_s("import pydantic, yaml")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "recipes/calculater.yaml"), "there is recipes/calculator.yaml"),
        (("train", "recipes/calculator.yaml", "seed"), "key.path=value"),
        (("train", "recipes/calculator.yaml", "rollout.max_new_tokens=5000"), "rollout.max_trajectory_tokens"),
        (("train", "recipes/calculator.yaml", "environment.id=my_env.py:Mine"), "there is no file"),
        (("train", "recipes/calculator.yaml", "model.path=./nowhere"), "holds no model"),
        (("train", "recipes/calculator.yaml", "--out", "Makefile"), "is a file"),
        (("train", "recipes/calculator.yaml", "--out", "recipes", "--resume"), "holds no run"),
        (("eval", "runs/nope"), "runs/nope: there is no such run"),
        (("train",), "Missing argument 'RECIPE'"),
        (("trian",), "No such command 'trian'"),
        (("train", "recipes/calculator.yaml", "--sede", "1"), "No such option"),
        (("show", "recipes"), "is no run folder"),
        (("env", "check", "quintain/Calclator-v0"), "quintain/Calculator-v0"),
    ],
)
def test_bad_input_ends_with_code_2_and_a_message_without_traceback(arguments: tuple[str, ...], told: str):
    result = quintain(*arguments)
    assert result.returncode == 2, result.stderr
    assert told in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("")
    result = quintain("train", "recipes/calculator.yaml", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "add --resume" in result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]):
    result = quintain(*command, "--help")
    assert result.returncode == 0
    assert "quintain " + " ".join(command) in result.stdout
    assert command == ("env",) or "Example" in result.stdout


def test_no_command_s_description_is_cut_short():
    for group in ((), ("env",)):
        assert "..." not in quintain(*group, "--help", env={"COLUMNS": "80"}).stdout.partition("Commands:")[2]


def test_a_refused_run_leaves_no_folder_and_what_was_there_before(tmp_path: Path):
    arguments = ("train", str(ROOT / "recipes/calculator.yaml"), "sandbox.type=docker", "--out")
    env = {"DOCKER_HOST": "tcp://127.0.0.1:1"}
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    for out in (tmp_path / "runs" / "new", mine):
        result = quintain(*arguments, str(out), env=env)
        assert result.returncode == 2, result.stderr
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["mine", "mine/notes.txt"]


def test_every_command_is_in_the_manual():
    manual = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"quintain {' '.join(command)}" in manual


def test_the_version_is_printed():
    result = quintain("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("quintain 0.")


def test_native_libraries_are_told_their_defaults_unless_the_user_chose():
    program = (
        "import os; from quintain.recipes.cli import main\ntry: main(['--version'])\nfinally: print(dict(os.environ))"
    )
    env = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT_DEFAULTS}
    env |= {"PYTHONSAFEPATH": "1", "GOMP_SPINCOUNT": "7"}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    seen = eval(result.stdout.splitlines()[-1])
    assert {key: seen[key] for key in ENVIRONMENT_DEFAULTS} == {**ENVIRONMENT_DEFAULTS, "GOMP_SPINCOUNT": "7"}


def test_the_registered_environments_are_listed():
    result = quintain("env", "list", "--json")
    assert result.returncode == 0
    assert '"quintain/Calculator-v0"' in result.stdout and '"quintain/Shell-v0"' in result.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("seed = -1: must be a whole number"), 2),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
        (ValueError("something broke"), 1),
        (SystemExit(3), 3),
    ],
)
def test_each_kind_of_end_has_its_exit_code(error: BaseException, code: int):
    assert report(error) == code


def test_an_unexpected_error_is_one_line_and_the_place_of_its_log(capsys: pytest.CaptureFixture[str]):
    error = ValueError("first line\nsecond line")
    report(error)
    first, log = capsys.readouterr().err.strip().splitlines()
    assert first == "error: ValueError: first line"
    path = Path(log.removeprefix("log: "))
    assert "second line" in path.read_text()
    path.unlink()
    error.add_note("log: runs/x/logs/run.log")
    report(error)
    assert capsys.readouterr().err.strip().splitlines() == [first, "log: runs/x/logs/run.log"]


@pytest.mark.parametrize("place", INPUT_ERRORS)
def test_every_listed_input_error_exists(place: str):
    import importlib

    module, _, name = place.partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), Exception)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_cleanly_with_its_code(tmp_path: Path, signum: signal.Signals, code: int):
    program = (
        "import sys, time\nfrom quintain.recipes import cli\n"
        "@cli.cli.command()\ndef wait():\n"
        "    try:\n        print('waiting', flush=True); time.sleep(60)\n"
        "    finally:\n        print('cleaned up', flush=True)\n"
        "cli.main(['wait'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "waiting"
    time.sleep(0.05)
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.strip()) == (code, "cleaned up")
    assert "Traceback" not in err
