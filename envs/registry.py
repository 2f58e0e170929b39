"""Finding environments: by Gymnasium id, by file, by module, and those other distributions bring along.

    quintain/Calculator-v0     registered with Gymnasium: ours, or by an entry point of another distribution in the
                               group `quintain.environments` (name = the id, value = `module:Class`)
    path/to/file.py:Class      relative to `base_dir` (the recipe's folder)
    module:Class               importable

Loading a file runs it once a process; its folder is added at the *end* of `sys.path`, so that it can import its
siblings and shadows nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from gymnasium.envs.registration import register, registry

from quintain.envs.config import EnvironmentConfig
from quintain.envs.errors import (
    EnvironmentArgumentsError,
    EnvironmentDefinitionError,
    EnvironmentImportError,
    UnknownEnvironmentError,
    place_in,
)

if TYPE_CHECKING:
    from quintain.envs.tool_env import ToolEnv
    from quintain.sandbox import SandboxPool

ENTRY_POINT_GROUP = "quintain.environments"
_OURS = {
    "quintain/Calculator-v0": "quintain.envs.calculator:CalculatorEnv",
    "quintain/Shell-v0": "quintain.envs.shell:ShellEnv",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """A registered environment, for listing.

    Example: ``EnvironmentInfo(id="quintain/Calculator-v0", summary="Arithmetic with a calculator.",
    needs_isolation=False, error=None)``
    """

    id: str
    summary: str
    """First line of the class's docstring."""
    needs_isolation: bool
    error: str | None
    """Why it cannot be loaded, or None."""


def register_environments() -> None:
    """Tell Gymnasium of our environments and of those of other distributions, without importing any. Idempotent."""
    for name, place in _all_places().items():
        if name not in registry:
            register(id=name, entry_point=place)


def registered_environments() -> tuple[EnvironmentInfo, ...]:
    """Ours first, then those of other distributions by name; one that cannot be loaded says why."""
    infos = []
    for name in _all_places():
        try:
            cls = env_class(name)
        except (ImportError, AttributeError, EnvironmentImportError, UnknownEnvironmentError) as error:
            infos.append(EnvironmentInfo(id=name, summary="", needs_isolation=True, error=str(error)))
            continue
        summary = (inspect.getdoc(cls) or "").partition("\n")[0]
        infos.append(EnvironmentInfo(id=name, summary=summary, needs_isolation=cls.needs_isolation, error=None))
    return tuple(infos)


def env_class(id: str, *, base_dir: Path | str | None = None) -> type[ToolEnv]:
    """The class behind an id. Raises UnknownEnvironmentError naming the nearest, and EnvironmentImportError."""
    place, _, name = id.rpartition(":")
    if place.endswith(".py") or id.endswith(".py"):
        path = Path(base_dir or ".", place if name and place else id)
        return _class_in(_load_file(path), name if place else "", where=str(path))
    if place and "/" not in place:
        return _class_in(_import(place), name, where=place)
    register_environments()
    entry = registry[id].entry_point if id in registry else None
    if not isinstance(entry, str):
        known = list(_all_places())
        near = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
        raise UnknownEnvironmentError(
            f"no environment {id!r}; {'nearest' if near else 'known'}: {', '.join(near or known)} "
            "(your own: path/to/file.py:ClassName, relative to the recipe)"
        )
    module, _, cls_name = entry.partition(":")
    return _class_in(_import(module), cls_name, where=module)


def make_env(
    config: EnvironmentConfig,
    *,
    split: Literal["train", "eval"],
    pool: SandboxPool | None,
    base_dir: Path | str | None = None,
) -> ToolEnv:
    """One instance.

    Raises UnknownEnvironmentError, EnvironmentImportError, EnvironmentDefinitionError, and EnvironmentArgumentsError
    for kwargs that it does not take.
    """
    cls = env_class(config.id, base_dir=base_dir)
    try:
        inspect.signature(cls).bind(split=split, pool=pool, **config.kwargs)
    except TypeError as error:
        raise EnvironmentArgumentsError(
            f"{cls.__name__} cannot be made from environment.kwargs ({error}); its own `__init__` takes its settings "
            "and passes the rest on: `def __init__(self, *, size=3, **kwargs): super().__init__(**kwargs)`"
        ) from error
    try:
        env = cls(split=split, pool=pool, **config.kwargs)
    except SystemExit as error:
        raise EnvironmentDefinitionError(f"{cls.__name__}(…) ends the program: {place_in(error, None)}") from error
    env.task_limit = config.num_train_tasks if split == "train" else config.num_eval_tasks
    env.max_turns = config.max_turns or env.max_turns
    env.max_calls_per_turn = config.max_calls_per_turn or env.max_calls_per_turn
    return env


def _all_places() -> dict[str, str]:
    """Every known id and its `module:Class`."""
    found: list[EntryPoint] = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return {**{point.name: point.value for point in found}, **_OURS} if found else dict(_OURS)


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UnknownEnvironmentError(f"no module {module!r}: {error}") from error
        raise _import_error(module, None, error) from error
    except (Exception, SystemExit) as error:  # someone else's code: it may raise anything, or exit
        raise _import_error(module, None, error) from error


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"quintain_environment_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")])
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownEnvironmentError(f"no file {path}{hint} (paths are relative to the recipe)")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownEnvironmentError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loaded = False
    try:
        spec.loader.exec_module(module)
        loaded = True
    except (Exception, SystemExit) as error:  # someone else's code: it may raise anything, or exit
        raise _import_error(str(path), str(path), error) from error
    finally:
        if not loaded:
            del sys.modules[name]
    return module


def _import_error(what: str, file: str | None, error: BaseException) -> EnvironmentImportError:
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    told = f"{type(error).__name__}: {text}".removesuffix(": ")
    if isinstance(error, SystemExit):
        told += ' (it ends the program while it is imported; put that below `if __name__ == "__main__":`)'
    return EnvironmentImportError(f"{what} cannot be imported: {place_in(error, file)}: {told}")


def _class_in(module: ModuleType, name: str, *, where: str) -> type[ToolEnv]:
    from quintain.envs.tool_env import ToolEnv  # imports this layer's heavy libraries, which listing files need not

    def is_env(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, ToolEnv) and value is not ToolEnv

    value = getattr(module, name, None) if name else None
    if is_env(value):
        return value  # type: ignore[return-value]
    choices = [key for key, item in vars(module).items() if is_env(item) and item.__module__ == module.__name__]
    listed = ", ".join(f"{where}:{key}" for key in choices) or "none: a class must derive from ToolEnv"
    if value is not None:
        raise UnknownEnvironmentError(f"{where}:{name} is not a ToolEnv; environments there: {listed}")
    problem = f"no class {name!r} in {where}" if name else f"{where} names no class; write {where}:ClassName"
    raise UnknownEnvironmentError(f"{problem}; environments there: {listed}")
