"""`quintain eval`: success on held-out tasks, of a run's newest checkpoint or of a recipe's model before training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from quintain.agents.evaluation import EvalResult
from quintain.recipes.assemble import assemble, starting_model
from quintain.recipes.loader import RecipeError, load_recipe
from quintain.trainer.checkpoint import latest_good
from quintain.trainer.progress import Progress


def evaluate_run(
    target: str, overrides: Sequence[str], *, greedy: bool, num_tasks: int | None, progress: Progress
) -> EvalResult:
    """Evaluate `target`, a run folder or a recipe; nothing is written.

    Raises RecipeError where the run has no checkpoint yet.
    """
    folder = Path(target)
    is_run = folder.is_dir()
    config = load_recipe(folder / "config.yaml" if is_run else folder, overrides).config
    checkpoint: Path | None = None
    if is_run:
        found = latest_good(folder / "checkpoints")
        if found is None:
            raise RecipeError(
                f"{folder} has no complete checkpoint yet; it gets one every checkpoint.every_steps steps"
            )
        checkpoint = found.model_path
        progress.message(f"checkpoint: {found.model_path}")
    with ExitStack() as stack:
        load = partial(starting_model, config, progress=progress, folder=checkpoint)
        parts = assemble(config, stack=stack, owner=f"eval-{config.name}", progress=progress, load=load)
        if checkpoint is None and config.warm_start.enabled:
            parts.warm_up(config, progress)
        return parts.evaluate(progress, greedy=greedy, num_tasks=num_tasks)
