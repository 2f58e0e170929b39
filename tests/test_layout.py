"""The shape of the tree: packages, sizes, names. What may import what is in test_layout_imports.py."""

from __future__ import annotations

import ast
import os
import statistics
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("sandbox", "envs", "agents", "trainer", "recipes")
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
FILE_CAP, FILE_MEDIAN, FUNCTION_CAP = 400, 150, 60
LONG_FUNCTIONS = {("trainer/loop.py", "run"): 100}
"""The main loop may be longer."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_pyproject_lists_every_package_of_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"quintain." + name(path.parent).replace("/", ".") for path in FILES}
    assert sorted(listed) == sorted(found)


def test_every_package_folder_has_an_init_file():
    folders = {path.parent for path in FILES}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_typing_links_point_at_the_layers_by_relative_paths():
    links = ROOT / ".typing" / "quintain"
    assert sorted(path.name for path in links.iterdir()) == sorted(LAYERS)
    for layer in LAYERS:
        assert (links / layer).is_symlink()
        assert os.readlink(links / layer) == f"../../{layer}"


def test_no_file_is_longer_than_the_cap():
    assert {name(p): num_lines(p) for p in [*FILES, *TEST_FILES] if num_lines(p) > FILE_CAP} == {}


def test_half_of_the_files_are_short():
    lengths = [num_lines(path) for path in FILES if path.name != "__init__.py"]
    assert statistics.median(lengths) <= FILE_MEDIAN


def test_no_function_is_longer_than_the_cap():
    long = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONG_FUNCTIONS.get((name(path), node.name), FUNCTION_CAP):
                    long[f"{name(path)}:{node.name}"] = length
    assert long == {}


def test_no_module_is_a_box_for_everything():
    forbidden = {"utils", "util", "helpers", "helper", "common", "misc", "types", "shared"}
    found = [name(path) for path in FILES if forbidden & {path.stem, path.parent.name}]
    assert found == []


@pytest.mark.parametrize("layer", LAYERS)
def test_every_module_says_what_it_is(layer: str):
    silent = [
        name(path)
        for path in FILES
        if name(path).startswith(f"{layer}/") and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_the_files_that_a_project_needs_are_there():
    for file in ("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "docs/cli.md"):
        assert (ROOT / file).is_file(), file
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_make_test_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]
