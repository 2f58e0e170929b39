"""`quintain accuracy` and `quintain replay-batch`: how exact the numbers are that a run trains on."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from quintain.agents.scheduler import Draw
from quintain.recipes.evaluate import parts_with_model
from quintain.recipes.loader import LoadedRecipe, RecipeError
from quintain.trainer.accuracy import Accuracy, Precision, compare, refuse_unavailable
from quintain.trainer.advantages import group_advantages
from quintain.trainer.batch import samples_from_groups
from quintain.trainer.checkpoint import latest_good
from quintain.trainer.ledger import read_batch
from quintain.trainer.progress import Progress
from quintain.trainer.replay import replay
from quintain.trainer.task_order import TaskOrder


def measure(loaded: LoadedRecipe, *, run: Path | None, precision: Precision, progress: Progress) -> Accuracy:
    """Roll out one batch of the recipe and compare; nothing is trained or written."""
    config = loaded.config
    refuse_unavailable(precision, "cpu" if precision == "fp8" else "any")
    with ExitStack() as stack:
        parts = parts_with_model(loaded, run=run, purpose="accuracy", stack=stack, progress=progress)
        order = TaskOrder(parts.train_env.num_tasks, seed=config.seed)
        numbers = range(config.algorithm.tasks_per_step)
        draws = [Draw(number=n, task=parts.train_env.task_at(order.index(n))) for n in numbers]
        with progress.phase("rollouts", total=len(draws) * config.algorithm.group_size) as bar:
            groups = parts.runner.collect(
                draws, group_size=config.algorithm.group_size, on_trajectory=lambda _: bar.advance(1)
            )
        # Which advantages the tokens get does not matter here; one number a trajectory needs no critic.
        algorithm = config.algorithm.model_copy(update={"advantage": "grpo"})
        samples = samples_from_groups(groups, group_advantages(groups, algorithm), algorithm)
        return compare(
            parts.model,
            samples,
            precision=precision,
            temperature=config.rollout.temperature,
            max_tokens=config.trainer.micro_batch_tokens,
        )


def failures(result: Accuracy, *, max_gap: float, max_k3: float, min_ess: float, min_cosine: float) -> list[str]:
    """What is beyond its limit, in words."""
    found = []
    for name, part in (("engine", result.engine), ("precision", result.precision)):
        checks = (
            ("gap_mean", part.gap_mean, part.gap_mean <= max_gap, max_gap),
            ("k3", part.k3, part.k3 <= max_k3, max_k3),
            ("ess_frac", part.ess_frac, part.ess_frac >= min_ess, min_ess),
        )
        found += [f"{name}: {what} is {value:.3g}, the limit {limit:g}" for what, value, ok, limit in checks if not ok]
    if not result.gradient_cosine >= min_cosine:
        found.append(f"gradient_cosine is {result.gradient_cosine:.6f}, the limit {min_cosine:g}")
    return found


def print_accuracy(result: Accuracy, precision: str, problems: list[str], *, as_json: bool) -> None:
    """A table, or one JSON object."""
    if as_json:
        click.echo(json.dumps(asdict(result) | {"problems": problems, "compared_precision": precision}))
        return
    click.echo(f"{'':<34}{'tokens':>8}{'gap mean':>11}{'gap max':>11}{'k3':>11}{'ESS':>8}{'prob error':>12}")
    rows = (("trainer fp32 against sampler", result.engine), (f"trainer {precision} against fp32", result.precision))
    for name, m in rows:
        numbers = f"{m.num_tokens:>8}{m.gap_mean:>11.2e}{m.gap_max:>11.2e}{m.k3:>11.2e}"
        click.echo(f"{name:<34}{numbers}{m.ess_frac:>8.4f}{m.prob_error:>12.6f}")
    click.echo(f"gradient, {precision} against fp32: cosine {result.gradient_cosine:.6f}, ", nl=False)
    click.echo(f"norm x {result.grad_norm_ratio:.4f}")
    if not result.used_own_advantages:
        click.echo("every advantage of the batch was 0: the gradients are those of advantages of 1")
    for problem in problems:
        click.echo(f"beyond its limit: {problem}")


def replay_file(path: Path, *, model_folder: Path | None, as_json: bool) -> bool:
    """Print loss and gradient norm of a batch file; False where the batch breaks a rule.

    Raises RecipeError where there is no model to compute with, BatchFileError where the file is no batch.
    """
    from quintain.recipes.build_model import load_model

    saved = read_batch(path)
    if model_folder is None:
        found = latest_good(path.resolve().parent.parent / "checkpoints")
        if found is None:
            raise RecipeError(f"{path} lies in no run with a checkpoint; name the weights with --model FOLDER")
        model_folder = found.model_path
    if saved.violation is not None:
        click.echo(f"refused: {saved.violation}", err=True)
    model, _ = load_model(str(model_folder))
    try:
        results = replay(model, saved)
    except ValueError as error:
        if saved.violation is None:
            raise
        click.echo(f"so nothing can be computed: {error}", err=True)
        return False
    if as_json:
        click.echo(json.dumps({"model": str(model_folder), "minibatches": [asdict(r) for r in results]}))
    else:
        click.echo(f"batch of policy version {saved.policy_version}, weights from {model_folder}")
        for index, r in enumerate(results):
            click.echo(
                f"minibatch {index}: loss {r.loss:.9g}, gradient norm {r.grad_norm:.9g} "
                f"({r.num_samples} samples, {r.num_trained_tokens} trained tokens)"
            )
    return saved.violation is None
