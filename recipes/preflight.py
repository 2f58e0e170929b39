"""Checks between settings of different sections, and of the run folder, before anything heavy is imported.

A setting's own range is the config's affair (`recipes/config.py`); here are those that need two sections, or the disk.
"""

from __future__ import annotations

from pathlib import Path

from quintain.recipes.config import RecipeConfig
from quintain.recipes.engine_check import engine_problems
from quintain.recipes.loader import LoadedRecipe, RecipeError
from quintain.recipes.resources import parallelism_problems


def preflight(loaded: LoadedRecipe, *, out: Path | None = None, resume: bool = False) -> list[str]:
    """What the user should know before the start. Raises RecipeError with everything that can't work."""
    config = loaded.config
    problems = [*_size_problems(config), *parallelism_problems(config), *_path_problems(config)]
    if out is not None:
        problems += _out_problems(out, resume=resume)
    problems += engine_problems(config.engine)
    if problems:
        raise RecipeError(problems, where=str(loaded.path))
    return _notices(config)


def check_engine(loaded: LoadedRecipe) -> None:
    """For commands that only sample. Raises RecipeError where the engine can't be there."""
    if problems := engine_problems(loaded.config.engine):
        raise RecipeError(problems, where=str(loaded.path))


def _size_problems(config: RecipeConfig) -> list[str]:
    rollout, scratch = config.rollout, config.model.scratch
    problems = []
    if rollout.max_new_tokens >= rollout.max_trajectory_tokens:
        problems.append(
            f"rollout.max_new_tokens ({rollout.max_new_tokens} tokens a turn) leaves no room for a prompt in "
            f"rollout.max_trajectory_tokens ({rollout.max_trajectory_tokens} tokens in all); raise the latter"
        )
    if config.model.path is None:
        if rollout.max_trajectory_tokens > scratch.max_positions:
            problems.append(
                f"rollout.max_trajectory_tokens ({rollout.max_trajectory_tokens}) exceeds the context of the model, "
                f"model.scratch.max_positions ({scratch.max_positions} tokens); raise the latter or lower the former"
            )
        if scratch.num_heads % scratch.num_kv_heads:
            problems.append(
                f"model.scratch.num_heads ({scratch.num_heads} heads) is not divisible by model.scratch.num_kv_heads "
                f"({scratch.num_kv_heads})"
            )
    return problems


def _path_problems(config: RecipeConfig) -> list[str]:
    problems = []
    path = config.model.path
    if path is not None and Path(path).is_absolute() and not (Path(path) / "config.json").is_file():
        problems.append(
            f"model.path: {path} holds no model (no config.json); relative paths start at the recipe's folder"
        )
    file, colon, _ = config.environment.id.rpartition(":")
    if colon and file.endswith(".py") and not Path(file).is_file():
        problems.append(f"environment.id: there is no file {file}; relative paths start at the recipe's folder")
    return problems


def _out_problems(out: Path, *, resume: bool) -> list[str]:
    if out.exists() and not out.is_dir():
        return [f"--out {out} is a file; name a folder"]
    if not resume and (out / "metrics.jsonl").exists():  # written once the warm start is over
        return [f"--out {out} holds a run already; add --resume to go on with it, or name another folder"]
    if resume and not (out / "config.yaml").is_file():  # without metrics it starts again, from its own settings
        return [f"--resume: {out} holds no run; leave --resume out to start one there"]
    return []


def _notices(config: RecipeConfig) -> list[str]:
    notices = []
    if config.algorithm.group_size < config.algorithm.min_valid_members:
        notices.append("algorithm.group_size = 1: every advantage is 0, so nothing will be learned")
    optimizer_steps = config.trainer.steps * config.algorithm.minibatches_per_step
    if config.algorithm.warmup_steps >= optimizer_steps:
        notices.append(
            f"algorithm.warmup_steps ({config.algorithm.warmup_steps}) takes all {optimizer_steps} optimizer steps "
            "(trainer.steps x algorithm.minibatches_per_step): the learning rate never reaches its peak"
        )
    if config.model.path is None and not config.warm_start.enabled:
        notices.append(
            "the model starts from random weights without a warm start (warm_start.enabled = false): it will hardly "
            "ever earn a reward"
        )
    return notices
