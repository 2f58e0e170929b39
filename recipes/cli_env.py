"""`quintain env list` and `quintain env check`: what there is, and whether an environment keeps its promises.

The check makes the environment as a run would (real tools, a real sandbox) and looks at it from outside; each line of
the report stands alone, so that one broken part does not hide the others. It needs no policy and trains nothing.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quintain.envs.config import EnvironmentConfig
from quintain.sandbox.config import SandboxConfig

if TYPE_CHECKING:
    from quintain.envs import Message, Task, ToolEnv
    from quintain.sandbox import SandboxPool

Status = Literal["ok", "note", "failed"]
_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "failed": "bold red"}
NUM_REPLAYED = 16
"""Demonstrations of each quality that are played against the real tools."""
MAX_DESCRIPTION = 1000
"""Characters of a tool's description above which the check remarks on it: the model reads it in every prompt."""


class CheckFailed(Exception):
    """What a check found; the message is the report's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of the report.

    Example: ``CheckResult(name="tool schemas", status="ok", detail="1 tool: calculator")``
    """

    name: str
    status: Status
    detail: str


def list_environments(*, as_json: bool) -> None:
    """Print the registered environments."""
    from quintain.envs import registered_environments

    infos = registered_environments()
    if as_json:
        fields = ("id", "summary", "needs_isolation", "error")
        print(json.dumps([{name: getattr(info, name) for name in fields} for info in infos], indent=2))
        return
    table = Table()
    for column in ("id", "needs isolation", "what it is"):
        table.add_column(column, no_wrap=column == "id")
    for info in infos:
        what = Text(f"can't be loaded: {info.error}", style="red") if info.error else Text(info.summary)
        table.add_row(Text(info.id), "yes" if info.needs_isolation else "no", what)
    Console().print(table)


def check_environment(env_id: str, *, sandbox_type: str) -> bool:
    """Run every check, print the report, and say whether all passed.

    Raises UnknownEnvironmentError, EnvironmentImportError, and SandboxUnavailable where its tools need a box in vain.
    """
    from quintain.envs import env_class
    from quintain.sandbox import open_pool

    cls = env_class(env_id)
    pool = None
    if cls.sandbox_scope != "none":
        config = SandboxConfig.model_validate({"type": sandbox_type, "pool_size": 2})
        pool = open_pool(config, needs_isolation=cls.needs_isolation, owner=f"env check {cls.__name__}")
    try:
        results = [*check(env_id, pool)]
    finally:
        if pool is not None:
            pool.close()
    _print_report(f"{env_id}, sandbox: {pool.kind}" if pool is not None else env_id, results)
    return all(result.status != "failed" for result in results)


def _print_report(title: str, results: Sequence[CheckResult]) -> None:
    table = Table(title=Text(title), title_justify="left")
    for column in ("check", "", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for result in results:
        table.add_row(result.name, Text(result.status, style=_STYLES[result.status]), Text(result.detail))
    Console().print(table)


def check(env_id: str, pool: SandboxPool | None) -> Iterator[CheckResult]:
    """The lines of the report, in order."""
    config = EnvironmentConfig(id=env_id, num_eval_tasks=sys.maxsize)
    try:
        with _made(config, "train", pool) as env:
            env.reset(seed=0)
    except Exception as error:  # noqa: BLE001 (someone else's code: whatever it raises is the finding)
        yield CheckResult(name="starts", status="failed", detail=_words(error))
        return
    parts: tuple[tuple[str, Callable[[EnvironmentConfig, SandboxPool | None], CheckResult]], ...] = (
        ("Gymnasium's check_env", _gymnasium),
        ("tool schemas", _tool_schemas),
        ("tasks", _tasks),
        ("clean demonstrations", _clean_demonstrations),
        ("mixed demonstrations", _mixed_demonstrations),
    )
    for name, part in parts:
        try:
            yield replace(part(config, pool), name=name)
        except Exception as error:  # noqa: BLE001 (as above)
            yield CheckResult(name=name, status="failed", detail=_words(error))


@contextmanager
def _made(config: EnvironmentConfig, split: Literal["train", "eval"], pool: SandboxPool | None) -> Iterator[ToolEnv]:
    from quintain.envs import make_env

    env = make_env(config, split=split, pool=pool)
    try:
        yield env
    finally:
        env.close()


def _gymnasium(config: EnvironmentConfig, pool: SandboxPool | None) -> CheckResult:
    from gymnasium.utils.env_checker import check_env

    with _made(config, "train", pool) as env, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
    told = list(dict.fromkeys(str(warning.message).strip() for warning in caught))
    return CheckResult(name="", status="note" if told else "ok", detail="; ".join(told) or "passes")


def _tool_schemas(config: EnvironmentConfig, pool: SandboxPool | None) -> CheckResult:
    with _made(config, "train", pool) as env:
        specs = env.tool_specs
    remarks = []
    for spec in specs:
        if len(spec.description) > MAX_DESCRIPTION:
            remarks.append(f"{spec.name}: the description has {len(spec.description)} characters")
        for argument, schema in dict(spec.parameters).get("properties", {}).items():
            if not schema.get("description"):
                remarks.append(f"{spec.name}: the argument {argument} has no description (write one under `Args:`)")
    names = ", ".join(spec.name for spec in specs) or "none"
    return CheckResult(
        name="", status="note" if remarks else "ok", detail="; ".join(remarks) or f"{len(specs)}: {names}"
    )


def _tasks(config: EnvironmentConfig, pool: SandboxPool | None) -> CheckResult:
    prompts: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for split in ("train", "eval"):
        with _made(config, split, pool) as env:
            prompts[split], counts[split] = set(env.tasks["prompt"]), env.num_tasks
    shared = len(prompts["train"] & prompts["eval"])
    detail = f"{counts['train']} train, {counts['eval']} eval"
    if shared:
        return CheckResult(name="", status="note", detail=f"{detail}; {shared} prompts are in both")
    return CheckResult(name="", status="ok", detail=detail)


def _clean_demonstrations(config: EnvironmentConfig, pool: SandboxPool | None) -> CheckResult:
    """Clean ones must be answered by the real tools as they say, and must succeed."""
    played, failures = _replay(config, pool, clean=True)
    if not played:
        return CheckResult(name="", status="note", detail="none offered: a random model cannot be warm-started here")
    if failures:
        raise CheckFailed(f"{len(failures)} of {played} do not succeed; the first is {failures[0]}")
    return CheckResult(name="", status="ok", detail=f"{played} replayed, all succeed")


def _mixed_demonstrations(config: EnvironmentConfig, pool: SandboxPool | None) -> CheckResult:
    """Those of mixed quality must be answered as they say; how many succeed is reported."""
    played, failures = _replay(config, pool, clean=False)
    detail = f"{played} replayed, {played - len(failures)} succeed" if played else "none offered"
    return CheckResult(name="", status="ok" if played else "note", detail=detail)


def _replay(config: EnvironmentConfig, pool: SandboxPool | None, *, clean: bool) -> tuple[int, list[str]]:
    """Demonstrations played, and what each that did not succeed came to.

    Raises CheckFailed where a real tool answers otherwise.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    played, failures = 0, []
    with _made(config, "train", pool) as env:
        for index in range(min(NUM_REPLAYED, env.num_tasks)):
            task = env.task_at(index)
            demonstration = env.demonstrate(task, clean=clean, rng=rng)
            if demonstration is None:
                continue
            played += 1
            terms = _play(env, task, demonstration)
            if terms is not None:
                earned = ", ".join(f"{name} = {value:.4g}" for name, value in terms.items())
                failures.append(f"task {task.id}: the answer {env.answer[:200]!r} earns {earned}")
    return played, failures


def _play(env: ToolEnv, task: Task, demonstration: tuple[Message, ...]) -> Mapping[str, float] | None:
    """None where it succeeds, else the reward terms. Raises CheckFailed where the environment answers otherwise."""
    env.reset(seed=0, options={"task": task})
    answers: list[Message] = []
    info: Mapping[str, Any] = {}
    over = False
    for message in demonstration:
        if message.role == "assistant":
            if answers:
                raise CheckFailed(
                    f"task {task.id}: the environment answered more than the demonstration says: {answers[0].content!r}"
                )
            if over:
                raise CheckFailed(f"task {task.id}: the demonstration goes on after the trajectory's end")
            observation, _, terminated, truncated, info = env.step(message)
            answers, over = list(observation), terminated or truncated
        else:
            real = answers.pop(0) if answers else None
            if real is None or (real.role, real.content) != (message.role, message.content):
                said = real.content if real else "nothing"
                raise CheckFailed(f"task {task.id}: the demonstration says {message.content!r}, the tool says {said!r}")
    if not over:
        raise CheckFailed(f"task {task.id}: the demonstration stops before the trajectory ends")
    return None if info["success"] else info["reward_terms"]


def _words(error: Exception) -> str:
    """The finding; for what the environment's own code raised, with the place."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, CheckFailed) else f"{type(error).__name__}: {text}{_place(error)}"


def _place(error: BaseException) -> str:
    """`, in method (file.py:line)`: the last call in code that is neither ours nor a library's; empty if none is."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    ours = [Path(sys.modules[f"quintain.{layer}"].__file__ or "").parent for layer in ("envs", "recipes", "sandbox")]
    libraries = [*map(str, ours), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib")), "<"]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(tuple(libraries)):
            return f", in {frame.name} ({frame.filename}:{frame.lineno})"
    return ""
