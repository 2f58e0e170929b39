"""From a recipe file and `key.path=value` overrides to one checked, frozen `RecipeConfig`.

    file text -> YAML (`recipe_yaml`) -> overrides laid over -> relative paths resolved -> unknown keys -> pydantic

Rules:
- What is given explicitly wins, whatever its value: `false`, `0`, `""` and `null` count. The later override wins.
- A relative path is relative to the recipe's folder, on the command line too; never to the working directory. Only the
  warm start's *default* cache folder, which no recipe wrote, is taken from the working directory.
- Everything wrong is reported at once, one line a problem, before anything heavy is imported.

Imports yaml and pydantic only, so that a typo costs no more than those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from quintain.recipes.config import RecipeConfig
from quintain.recipes.recipe_keys import is_free_mapping, key_problems, section_of, unknown_key, value_problems
from quintain.recipes.recipe_yaml import RecipeYamlError, dump_yaml, parse_yaml

RECIPES_DIR = Path(__file__).parent
"""The recipes that come with the package."""


class RecipeError(Exception):
    """The recipe or an override is wrong: exit code 2. `problems` has one sentence for each thing to put right."""

    def __init__(self, problems: str | Sequence[str], *, where: str = "", advice: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        lines = "\n  ".join([*self.problems, advice] if advice else self.problems)
        several = where if len(self.problems) == 1 else f"{where or 'recipe'}: {len(self.problems)} problems"
        super().__init__(f"{several}:\n  {lines}" if several else lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A recipe that passed every check, with what it was made from."""

    config: RecipeConfig
    path: Path
    """The recipe file, absolute."""
    text: str
    """The file as it was read."""
    overrides: tuple[str, ...]
    """As given on the command line, in order."""
    resolved: Mapping[str, Any]
    """Every setting, defaults included, as plain data; paths absolute."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check a recipe file (or the `config.yaml` of a run folder). Raises RecipeError."""
    file = find_recipe(Path(path))
    try:
        text = file.read_text(encoding="utf-8")
        data = parse_yaml(text, origin=str(path))
    except (RecipeYamlError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(str(error), where="" if isinstance(error, RecipeYamlError) else str(path)) from error
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise RecipeError(f"a recipe is a mapping of keys to values, this is {type(data).__name__}", where=str(path))
    data = _without_empty_sections(data, RecipeConfig)
    problems = key_problems(data, RecipeConfig, RecipeConfig)
    for override in overrides:
        problems += _apply_override(data, override)
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)), where=str(path))
    _resolve_paths(data, file.parent)
    try:
        config = RecipeConfig.model_validate(data)
    except ValidationError as error:
        raise RecipeError(value_problems(error, RecipeConfig), where=str(path)) from error
    return LoadedRecipe(
        config=config, path=file, text=text, overrides=tuple(overrides), resolved=config.model_dump(mode="json")
    )


def load_overrides(overrides: Sequence[str]) -> RecipeConfig:
    """The defaults with overrides, for a command that needs settings but trains nothing. Raises RecipeError."""
    data: dict[Any, Any] = {"name": "settings", "environment": {"id": "quintain/Calculator-v0"}}
    problems = [problem for override in overrides for problem in _apply_override(data, override)]
    if problems:
        raise RecipeError(problems)
    try:
        return RecipeConfig.model_validate(data)
    except ValidationError as error:
        raise RecipeError(value_problems(error, RecipeConfig)) from error


def dump_config(config: BaseModel) -> str:
    """YAML with every setting; `load_recipe` reads it back as an equal config."""
    return dump_yaml(config.model_dump(mode="json"))


def find_recipe(path: Path) -> Path:
    """The recipe file, absolute. Raises RecipeError naming recipes, or runs, with a similar name."""
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.is_file():
        return path.resolve()
    import difflib

    runs = [file.parent for file in sorted(path.parent.glob("*/config.yaml"))]
    if not path.exists() and path.suffix not in (".yaml", ".yml") and (runs or path.parent.name == "runs"):
        near = difflib.get_close_matches(path.name, [run.name for run in runs], n=3, cutoff=0.5)
        names = ", ".join(str(path.parent / name) for name in near or [run.name for run in runs[-8:]])
        raise RecipeError(f"{path}: there is no such run" + (f"; there is {names}" if names else ", nor any other"))
    folders = dict.fromkeys(
        folder.resolve() for folder in (path.parent, Path("recipes"), RECIPES_DIR) if folder.is_dir()
    )
    found = {file.name: file for folder in reversed(folders) for file in sorted(folder.glob("*.y*ml"))}
    near = difflib.get_close_matches(path.name, found, n=3, cutoff=0.5) or list(found)[:8]
    names = ", ".join(_from_here(found[name]) for name in near)
    what = "is a folder without config.yaml" if path.is_dir() else "there is no such recipe"
    raise RecipeError(f"{path}: {what}" + (f"; there is {names}" if names else ""))


def _from_here(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _without_empty_sections(data: dict[Any, Any], model: type[BaseModel]) -> dict[Any, Any]:
    """A copy in which a section whose keys are all commented out (YAML reads null) says nothing."""
    kept: dict[Any, Any] = {}
    for key, value in data.items():
        field = model.model_fields.get(key) if isinstance(key, str) else None
        section = section_of(field) if field else None
        if section is not None and value is None:
            continue
        kept[key] = _without_empty_sections(value, section) if section and isinstance(value, dict) else value
    return kept


def _apply_override(data: dict[Any, Any], override: str) -> list[str]:
    """Lay one `key.path=value` over `data`; what is wrong with it, if anything."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        return [f"'{override}' is not an override; write key.path=value, such as trainer.steps=10"]
    try:
        value = parse_yaml(text, origin=f"override {path}")
    except RecipeYamlError as error:
        return [str(error)]
    if value is None and not text.strip():
        return [f"{path}: nothing after '='; write {path}=null for null or {path}='\"\"' for an empty text"]
    names = path.split(".")
    section: type[BaseModel] | None = RecipeConfig
    for index, name in enumerate(names):
        if section is None:  # below a free mapping
            break
        field = section.model_fields.get(name)
        if field is None:
            return [unknown_key(path, RecipeConfig)]
        below = section_of(field)
        if below is None and index < len(names) - 1 and not is_free_mapping(field):
            return [f"{path}: {'.'.join(names[: index + 1])} is a value, it has no keys below it"]
        section = below
    target = data
    for name in names[:-1]:
        below = target.get(name)
        target[name] = dict(below) if isinstance(below, dict) else {}  # a copy: a YAML alias may share it
        target = target[name]
    target[names[-1]] = value
    return key_problems(_nest(names, value), RecipeConfig, RecipeConfig)


def _nest(names: Sequence[str], value: Any) -> dict[str, Any]:
    """`{a: {b: value}}` for the names a, b."""
    for name in reversed(names):
        value = {name: value}
    return value


def _resolve_paths(data: dict[Any, Any], folder: Path) -> None:
    """Make the paths that a recipe may name absolute, in place; hub names and Gymnasium ids stay as they are."""
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        path = Path(model["path"]).expanduser()
        if model["path"].startswith((".", "/", "~")) or (folder / path).exists():
            model["path"] = str((folder / path).resolve())
    environment = data.get("environment")
    if isinstance(environment, dict) and isinstance(environment.get("id"), str):
        file, colon, name = environment["id"].rpartition(":")
        if colon and file.endswith(".py"):
            environment["id"] = f"{(folder / Path(file).expanduser()).resolve()}:{name}"
        elif name.endswith(".py") and not colon:  # the class is missing: the registry says which there are
            environment["id"] = str((folder / Path(name).expanduser()).resolve())
    engine = data.get("engine")
    launch = engine.get("launch") if isinstance(engine, dict) else None
    if isinstance(launch, dict) and isinstance(launch.get("python"), str):
        python = Path(launch["python"]).expanduser()
        if "/" in launch["python"]:  # not resolved: the interpreter of an environment is a link out of it
            launch["python"] = os.path.normpath(folder / python)
    warm_start = data.setdefault("warm_start", {})
    if isinstance(warm_start, dict):
        given = warm_start.get("cache_dir")
        if given is None and "cache_dir" not in warm_start:
            default = RecipeConfig.model_fields["warm_start"].default.cache_dir
            warm_start["cache_dir"] = str(Path(default).resolve())
        elif isinstance(given, str):
            warm_start["cache_dir"] = str((folder / Path(given).expanduser()).resolve())
