"""`quintain eval`: success on held-out tasks, of a run's newest checkpoint or of a recipe's model before training."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from quintain.agents.evaluation import EvalResult
from quintain.recipes.assemble import Parts, assemble, starting_model
from quintain.recipes.loader import LoadedRecipe, RecipeError
from quintain.trainer.checkpoint import latest_good
from quintain.trainer.model_files import save_model
from quintain.trainer.progress import Progress


def evaluate_run(
    loaded: LoadedRecipe, *, run: Path | None, greedy: bool, num_tasks: int | None, progress: Progress
) -> EvalResult:
    """Evaluate the newest checkpoint of `run`, or (None) the recipe's model; nothing is written.

    Raises RecipeError where the run has no checkpoint yet.
    """
    with ExitStack() as stack:
        parts = parts_with_model(loaded, run=run, purpose="eval", stack=stack, progress=progress)
        return parts.evaluate(progress, greedy=greedy, num_tasks=num_tasks)


def parts_with_model(
    loaded: LoadedRecipe, *, run: Path | None, purpose: str, stack: ExitStack, progress: Progress
) -> Parts:
    """Ready parts with the newest checkpoint of `run`, or (None) with the recipe's model, warm-started if it says so.

    Raises RecipeError where the run has no checkpoint yet.
    """
    config = loaded.config
    checkpoint: Path | None = None
    if run is not None:
        found = latest_good(run / "checkpoints")
        if found is None:
            raise RecipeError(f"{run} has no complete checkpoint yet; it gets one every checkpoint.every_steps steps")
        checkpoint = found.model_path
        progress.message(f"checkpoint: {checkpoint}")
    load = partial(starting_model, config, progress=progress, folder=checkpoint)
    work_dir = Path(stack.enter_context(TemporaryDirectory(prefix=f"quintain-{purpose}-")))
    owner = f"{purpose}-{config.name}"
    parts = assemble(config, stack=stack, owner=owner, work_dir=work_dir, progress=progress, load=load)
    if checkpoint is None and config.warm_start.enabled:
        parts.warm_up(config, progress)
    parts.engine.start(partial(save_model, parts.model), version=0, progress=progress).deliver(0)
    return parts
