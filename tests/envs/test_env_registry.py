"""Finding environments by id, file and module, and what a wrong name is answered with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from small_envs import Desk

from quintain.envs import UnknownEnvironmentError, env_class, make_env, registered_environments
from quintain.envs.calculator import CalculatorEnv
from quintain.envs.config import EnvironmentConfig
from quintain.envs.errors import EnvironmentDefinitionError, EnvironmentImportError

SOURCE = """
from sibling_of_env import WORD
from quintain.envs import ToolEnv, reward
class Mine(ToolEnv):
    def rows(self, split): return [{"prompt": WORD}]
    @reward
    def right(self): return 1.0
class Other: pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "sibling_of_env.py").write_text("WORD = 'hello'")
    return tmp_path


def test_ours_are_listed_with_a_summary() -> None:
    infos = {info.id: info for info in registered_environments()}
    assert infos["quintain/Calculator-v0"].summary == "Number and word problems to be solved with a calculator."
    assert infos["quintain/Calculator-v0"].needs_isolation is False
    assert infos["quintain/Shell-v0"].needs_isolation is True
    assert all(info.error is None for info in infos.values())


def test_gymnasium_makes_ours_once_this_package_is_imported() -> None:
    env = gymnasium.make("quintain/Calculator-v0", split="eval")
    assert isinstance(env.unwrapped, CalculatorEnv) and env.unwrapped.split == "eval"


@pytest.mark.parametrize(
    "code",
    [
        "import gymnasium, quintain.envs; print(gymnasium.spec('quintain/Shell-v0').entry_point)",
        "from quintain.envs import ToolEnv; import gymnasium; print(gymnasium.spec('quintain/Shell-v0').entry_point)",
        "import gymnasium; print(gymnasium.make('quintain.envs:quintain/Shell-v0').spec.entry_point)",
    ],
)
def test_registration_in_a_fresh_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "quintain.envs.shell:ShellEnv", done.stderr


def test_environments_of_other_distributions_are_found_by_entry_point(folder: Path) -> None:
    metadata = folder / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    entries = "[quintain.environments]\nmine/Mine-v0 = mine:Mine\nmine/Gone-v0 = gone:Gone\n"
    (metadata / "entry_points.txt").write_text(entries)
    code = (
        "import gymnasium\nfrom quintain.envs import registered_environments\n"
        "print(*[(info.id, info.error) for info in registered_environments()], sep='\\n')\n"
        "print(gymnasium.make('mine/Mine-v0').unwrapped.task_at(0).prompt)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert "('mine/Mine-v0', None)" in done.stdout, done.stderr
    assert "('mine/Gone-v0', \"no module 'gone'" in done.stdout and done.stdout.endswith("hello\n")


def test_the_config_tree_loads_no_heavy_library() -> None:
    code = "import sys, quintain.envs.config; print(sorted({'gymnasium', 'datasets', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_file_is_found_from_the_base_folder_and_may_import_its_siblings(folder: Path) -> None:
    cls = env_class("mine.py:Mine", base_dir=folder)
    assert cls().task_at(0).prompt == "hello"
    assert env_class(f"{folder}/mine.py:Mine") is cls
    config = EnvironmentConfig(id="mine.py:Mine")
    assert type(make_env(config, split="eval", pool=None, base_dir=folder)) is cls
    assert env_class("small_envs:Desk") is Desk


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quintain/Calculater-v0", "nearest: quintain/Calculator-v0"),
        ("nothing-like-it", "known: quintain/Calculator-v0, quintain/Shell-v0"),
        ("CartPole-v1", "is not a ToolEnv"),
        ("mine.py:Mien", "no class 'Mien' in .*mine.py:Mine$"),
        ("mine.py", "names no class; write .*mine.py:ClassName; environments there: .*mine.py:Mine$"),
        ("mine.py:Other", "Other is not a ToolEnv"),
        ("mien.py:Mine", "did you mean mine.py"),
        ("no_such_module:Mine", "no module 'no_such_module'"),
        ("small_envs:Dekc", "no class 'Dekc'"),
        ("", "known"),
    ],
)
def test_wrong_names_are_answered_with_near_ones(folder: Path, name: str, words: str) -> None:
    with pytest.raises(UnknownEnvironmentError, match=words):
        env_class(name, base_dir=folder)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\nimport no_such_library_of_mine", "line 2: ModuleNotFoundError: .*no_such_library_of_mine"),
        ("def f(:\n", "line 1: SyntaxError: "),
        ("import sys\nsys.exit(0)", "line 2: SystemExit: 0 .*ends the program"),
        ("1 / 0", "line 1: ZeroDivisionError"),
        ("\0", "broken.py: SyntaxError: "),
    ],
)
def test_a_file_that_fails_to_load_says_why_and_where_and_can_be_tried_again(
    folder: Path, source: str, words: str
) -> None:
    (folder / "broken.py").write_text(source)
    for _ in range(2):
        with pytest.raises(EnvironmentImportError, match=f"broken.py.*{words}"):
            env_class("broken.py:Mine", base_dir=folder)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [{'prompt': 'a', 'n': 1 // 0}]", r"rows\('train'\) failed: .*bad_rows.py, line 4: ZeroDivisionError"),
        ("raise SystemExit(0)", "line 4: SystemExit"),
        ("return 5", "returned int"),
    ],
)
def test_rows_that_fail_are_a_fault_of_the_environment_s_definition(folder: Path, body: str, words: str) -> None:
    source = f"from quintain.envs import ToolEnv, reward\nclass Mine(ToolEnv):\n  def rows(self, split):\n    {body}\n"
    name = f"{len(body)}_bad_rows.py"
    (folder / name).write_text(f"{source}  @reward\n  def right(self): return 1.0\n")
    env = make_env(EnvironmentConfig(id=f"{name}:Mine"), split="train", pool=None, base_dir=folder)
    with pytest.raises(EnvironmentDefinitionError, match=words):
        _ = env.tasks


def test_settings_that_the_class_does_not_take_are_named() -> None:
    config = EnvironmentConfig(id="quintain/Calculator-v0", kwargs={"num_trian": 5})
    with pytest.raises(TypeError, match=r"num_trian"):
        make_env(config, split="train", pool=None)
    good = EnvironmentConfig(id="quintain/Calculator-v0", kwargs={"num_train": 5})
    assert make_env(good, split="train", pool=None).num_tasks == 5
