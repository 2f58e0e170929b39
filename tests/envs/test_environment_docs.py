"""The example that docs/environments.md shows is the one that is tried here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from small_envs import call, say

from quintain.envs import ToolEnv, env_class, make_env
from quintain.envs.config import EnvironmentConfig

HERE = Path(__file__).parent / "example"
ROOT = Path(__file__).parents[2]
DOCS = [(ROOT / "docs" / "environments.md").read_text(), (ROOT / "README.md").read_text()]


def lockers(split: str = "train") -> ToolEnv:
    return make_env(EnvironmentConfig(id="lockers.py:Lockers"), split=split, pool=None, base_dir=HERE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "language"), [("lockers.py", "python"), ("lockers.yaml", "yaml")])
def test_the_docs_show_the_files_that_are_tested(name: str, language: str) -> None:
    assert all(f"```{language}\n{(HERE / name).read_text()}```" in page for page in DOCS)


def test_the_example_is_as_short_as_it_says() -> None:
    lines = [line for line in (HERE / "lockers.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 15 and max(map(len, lines)) <= 120


def test_the_example_keeps_the_rules() -> None:
    env = lockers()
    check_env(env, skip_render_check=True)
    assert (env.num_tasks, lockers("eval").num_tasks) == (8000, 256)
    assert not set(env.tasks["prompt"]) & set(lockers("eval").tasks["prompt"])
    env.reset(options={"task": env.task_at(99)})
    code = env.step(call(("look_up", json.dumps({"locker": env.task.data["n"]}))))[0][0].content
    assert env.step(say(f"The code is {code}."))[1] == 1.0


def test_the_example_demonstrates_right_and_wrong() -> None:
    env, rng = lockers(), np.random.default_rng(0)
    right = 0
    for index in range(40):
        task = env.task_at(index * 100)
        for clean in (True, False):
            env.reset(options={"task": task})
            messages = env.demonstrate(task, clean=clean, rng=rng) or ()
            for message in messages:
                if message.role == "assistant":
                    value = env.step(message)[1]
            right += value if not clean else 0
            assert not clean or value == 1.0
    assert right <= 2


BROKEN = {
    "no_rows": ("@reward\n    def r(self): return 1.0", "has no tasks; write `def rows"),
    "no_return": (
        "def rows(self, split): pass\n    @reward\n    def r(self): return 1.0",
        r"Mine.rows\('train'\) returned NoneType",
    ),
    "no_reward": ("def rows(self, split): return [{'prompt': 'a'}]", "Mine has no reward"),
    "no_type": (
        "@reward\n    def r(self): return 1.0\n    @tool\n    def t(self, x):\n        'Do.'",
        "argument `x` has no type; write for example `x: str`",
    ),
    "no_docstring": (
        "@reward\n    def r(self): return 1.0\n    @tool\n    def t(self, x: str): pass",
        "tool `Mine.t` has no docstring",
    ),
    "no_kwargs": (
        "def __init__(self, size=3): super().__init__()\n    @reward\n    def r(self): return 1.0",
        "passes the rest on",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_beginners_errors_say_what_to_write(name: str, tmp_path: Path) -> None:
    body, words = BROKEN[name]
    source = f"from quintain.envs import ToolEnv, reward, tool\nclass Mine(ToolEnv):\n    {body}\n"
    (tmp_path / f"{name}.py").write_text(source)
    config = EnvironmentConfig(id=f"{name}.py:Mine")
    assert issubclass(env_class(config.id, base_dir=tmp_path), ToolEnv)
    with pytest.raises((TypeError, NotImplementedError), match=words):
        _ = make_env(config, split="train", pool=None, base_dir=tmp_path).tasks


def test_a_demonstration_that_needs_a_box_or_is_refused_says_so() -> None:
    env = lockers()
    with pytest.raises(ValueError, match=r'was refused: .* unknown argument "lock"'):
        env.dialogue(("look_up", {"lock": 5}), "x")
    calculator = make_env(EnvironmentConfig(id="quintain/Calculator-v0"), split="train", pool=None)
    with pytest.raises(ValueError, match="needs a box; give the result"):
        calculator.dialogue(("calculator", {"expression": "1+1"}))
