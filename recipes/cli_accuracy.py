"""The commands `quintain accuracy` and `quintain replay-batch`: arguments only, work is in `recipes/accuracy.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command(short_help="How exact a recipe's log-probs and gradients are.")
@click.argument("target", metavar="RUN|RECIPE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp32", "fp8"]),
    default="bf16",
    show_default=True,
    help="Compared with fp32, on one batch. fp8 needs a GPU.",
)
@click.option("--max-gap", type=float, default=0.05, show_default=True, help="Most mean log-prob gap, nats.")
@click.option("--max-k3", type=float, default=0.01, show_default=True, help="Most k3 estimate of the KL divergence.")
@click.option("--min-ess", type=float, default=0.9, show_default=True, help="Least effective sample size, 0 to 1.")
@click.option("--min-cosine", type=float, default=0.98, show_default=True, help="Least cosine of the two gradients.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def accuracy(target: str, overrides: tuple[str, ...], precision: Any, as_json: bool, **limits: float) -> None:
    """Roll out one batch, then compare the trainer's log-probs with the sampler's, and two precisions of the trainer.

    The exit code is 1 where a number is beyond its limit. Nothing is trained or written.

    \b
    Examples:
      quintain accuracy recipes/calculator.yaml
      quintain accuracy runs/seed7 algorithm.tasks_per_step=4 --max-gap 0.01 --json
    """
    from quintain.recipes.loader import load_recipe
    from quintain.recipes.progress import make_progress

    loaded = load_recipe(target, overrides)
    with make_progress() as progress:
        from quintain.recipes.accuracy import failures, measure, print_accuracy

        run = Path(target) if Path(target).is_dir() else None
        result = measure(loaded, run=run, precision=precision, progress=progress)
    problems = failures(result, **limits)
    print_accuracy(result, precision, problems, as_json=as_json)
    if problems:
        raise click.exceptions.Exit(1)


@click.command(name="replay-batch", short_help="Loss and gradient norm of a saved or refused batch.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Weights.  [default: its run's newest]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay_batch(file: Path, model: Path | None, as_json: bool) -> None:
    """Compute loss and gradient norm of the batch in FILE again, on the CPU.

    FILE is RUN/refused/step_*.jsonl, or RUN/batches/step_*.jsonl of a run with trainer.save_batches = true. The exit
    code is 1 where the batch breaks a rule of the ledger.

    \b
    Examples:
      quintain replay-batch runs/seed7/refused/step_000012.jsonl
      quintain replay-batch runs/seed7/batches/step_000012.jsonl --model runs/seed7/checkpoints/step_000010/model
    """
    from quintain.recipes.accuracy import replay_file

    if not replay_file(file, model_folder=model, as_json=as_json):
        raise click.exceptions.Exit(1)
