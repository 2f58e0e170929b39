"""What may import what: layers, heavy libraries, config modules, and where broad `except` is allowed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("sandbox", "envs", "agents", "trainer", "recipes")
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))

MODELS = (
    "trainer/",
    "agents/local_policy.py",
    "agents/decoder",
    "recipes/build_model.py",
    "recipes/grpo_in_one_file.py",
)
HEAVY = {
    "torch": MODELS,
    "transformers": (*MODELS, "recipes/doctor.py", "agents/renderer.py", "agents/template.py"),
    "tokenizers": (*MODELS, "agents/renderer.py", "agents/token_text.py", "recipes/view"),  # decodes for the page
    "safetensors": MODELS,
    "accelerate": ("trainer/",),
    "peft": ("trainer/",),
    "deepspeed": ("trainer/",),
    "triton": ("trainer/",),
    "gymnasium": ("envs/", "recipes/cli_env.py"),  # `env check` runs Gymnasium's own checker
    "datasets": ("envs/",),
    "docker": ("sandbox/docker/",),
    "aim": ("trainer/tracking/",),
    "httpx": ("agents/", "envs/", "recipes/view"),  # engine clients, the judge, asking Aim's page whether it is up
    "sglang": ("agents/",),
    "vllm": ("agents/",),
    "ray": ("recipes/",),
    "rich": ("recipes/",),
    "click": ("recipes/",),
    "yaml": ("recipes/",),
}
"""Library -> files (by the start of their path) that may import it."""

BROAD_EXCEPT = {
    "agents/rollout.py": "rollout boundary: a bad rollout is data",
    "envs/calling.py": "worker boundary",
    "envs/child_main.py": "worker boundary: the process that called gets the error",
    "agents/env_threads.py": "worker boundary (whoever waits gets the error) and teardown",
    "agents/local_policy.py": "worker boundary",
    "sandbox/background.py": "worker boundary",
    "trainer/tracking/tracker.py": "teardown; a view must not stop the run",
    "trainer/loop.py": "teardown: a save that fails on the way out must not hide what ended the run",
    "trainer/weights.py": "worker boundary",
    "recipes/cli.py": "outermost boundary: error -> exit code",
    "recipes/cli_env.py": "someone else's environment is on the bench: whatever it raises is the finding",
}
"""Where an `except Exception` that does not raise again may stand, and why."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports at run time; `if TYPE_CHECKING` blocks import nothing."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "." * node.level
        waiting.extend(ast.iter_child_nodes(node))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(program), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / ".typing")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_go_down_only():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    seen = re.search(r"Analyzed (\d+) files", result.stdout)
    assert seen and int(seen[1]) >= len(FILES), "import-linter does not see the modules behind the package-dir mapping"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("envs/message.py", "from quintain.trainer.config import TrainerConfig"),
        ("sandbox/base.py", "import quintain.envs.message"),
        ("trainer/sample.py", "def late():\n    from quintain.recipes.config import RecipeConfig"),
    ],
)
def test_an_import_that_goes_up_is_found(tmp_path: Path, file: str, line: str):
    for part in (*LAYERS, ".typing"):
        shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a", encoding="utf-8") as text:
        text.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert file.removesuffix(".py").replace("/", ".") in result.stdout


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_stay_where_they_belong(library: str):
    users = {name(path) for path in FILES if any(item.split(".")[0] == library for item in imports(path))}
    assert {user for user in users if not user.startswith(HEAVY[library])} == set()


def test_config_modules_import_pydantic_and_each_other_only():
    for path in FILES:
        if path.name == "config.py":
            foreign = {
                item
                for item in imports(path)
                if item.split(".")[0] not in {"pydantic", "__future__", *sys.stdlib_module_names}
                and not (item.startswith("quintain.") and item.endswith(".config"))
            }
            assert foreign == set(), name(path)


def test_our_code_is_imported_by_its_full_name():
    bare = {name(p): item for p in [*FILES, *TEST_FILES] for item in imports(p) if item.split(".")[0] in LAYERS}
    assert bare == {}
    relative = {name(p): item for p in FILES for item in imports(p) if item.startswith(".")}
    assert relative == {}


def test_tests_use_no_mocks():
    mocks = {
        name(p): item for p in TEST_FILES for item in imports(p) if item.startswith(("unittest", "mock", "pytest_mock"))
    }
    assert mocks == {}


def test_broad_except_stands_only_at_the_listed_boundaries():
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
                continue
            caught = (
                {item.id for item in ast.walk(node.type) if isinstance(item, ast.Name)} if node.type else {"Exception"}
            )
            if caught & {"Exception", "BaseException"} and name(path) not in BROAD_EXCEPT:
                found[f"{name(path)}:{node.lineno}"] = ast.unparse(node.type) if node.type else "bare"
    assert found == {}
