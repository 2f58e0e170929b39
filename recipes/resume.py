"""What `--resume` finds: the run folder, its newest good checkpoint, and whether the recipe is still the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from quintain.recipes.loader import LoadedRecipe, RecipeError, load_recipe
from quintain.trainer.checkpoint import GoodCheckpoint, latest_good

FREE_TO_CHANGE = (
    "trainer.steps",
    "trainer.num_threads",
    "trainer.micro_batch_tokens",
    "parallelism",
    "sandbox",
    "tracking",
    "checkpoint",
    "evaluation",
    "warm_start.cache_dir",
    "rollout.max_concurrent",
    "rollout.env_threads",
    "rollout.num_retries",
    "rollout.max_failure_frac",
    "engine.urls",
    "engine.router",
    "engine.max_in_flight",
    "engine.stream",
    "engine.request_timeout_s",
    "engine.retry_s",
    "engine.sync_timeout_s",
    "engine.launch.python",
    "engine.launch.num_servers",
    "engine.launch.device",
    "engine.launch.extra_args",
    "engine.launch.env",
    "engine.launch.start_timeout_s",
    "engine.launch.stop_timeout_s",
    "engine.launch.max_restarts",
)
"""Settings that a resumed run may change: none alters what was learned. `trainer.steps` stretches a schedule that is
not constant, and concurrency, threads, processes and micro-batches change what comes by rounding only."""


def run_of(recipe: Path) -> Path | None:
    """The run that a recipe file is part of (`RUN/config.yaml`, with a run's files beside it); None for any other."""
    folder = recipe.resolve().parent
    is_run = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "status.json"))
    return folder if recipe.name == "config.yaml" and is_run else None


def find_run(loaded: LoadedRecipe, out: Path | None) -> Path:
    """`out`; else the run whose `config.yaml` was given; else the newest `runs/<name>-<time>`.

    Raises RecipeError where there is none.
    """
    run = out or run_of(loaded.path)
    if run is not None:
        return run.resolve()
    if loaded.path.name == "config.yaml":
        raise RecipeError(f"--resume: {loaded.path} is in no run folder; name the run folder with --out")
    name = loaded.config.name
    runs = [p.parent for p in Path("runs").glob(f"{escape(name)}-????????-??????*/config.yaml")]
    if not runs:
        raise RecipeError(f"--resume: there is no runs/{name}-<time> here; name the run folder with --out")
    return max(runs, key=lambda run: run.stat().st_mtime).resolve()


def checkpoint_to_resume(run_dir: Path, loaded: LoadedRecipe) -> GoodCheckpoint | None:
    """The checkpoint to go on from; None where the run died before its first one (it then starts again).

    Raises RecipeError naming the settings that differ from those the run was started with.
    """
    saved = load_recipe(run_dir / "config.yaml").resolved
    changed = [f"{key}: the run has {old!r}, now {new!r}" for key, old, new in _differences(saved, loaded.resolved)]
    if changed:
        raise RecipeError(
            changed,
            where=f"--resume of {run_dir}",
            advice="resume with the run's own settings, or start a new run with another --out",
        )
    return latest_good(run_dir / "checkpoints")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*old, *new}):
        path = f"{prefix}{key}"
        if path in FREE_TO_CHANGE:
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{path}.")
        elif before != after:
            yield path, before, after
