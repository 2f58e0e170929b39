"""`quintain rollout`: conversations of a run's newest checkpoint or of a recipe's model; trains and writes nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from quintain.agents.scheduler import Draw
from quintain.agents.trajectory import Group
from quintain.recipes.evaluate import parts_with_model
from quintain.recipes.loader import LoadedRecipe
from quintain.trainer.progress import Progress
from quintain.trainer.task_order import TaskOrder


def rollout_recipe(
    loaded: LoadedRecipe, *, run: Path | None, num_tasks: int, held_out: bool, progress: Progress
) -> list[Group]:
    """The groups that the first `num_tasks` training task draws give, or (`held_out`) the first held-out tasks.

    Raises RecipeError where `run` has no checkpoint yet.
    """
    config = loaded.config
    with ExitStack() as stack:
        parts = parts_with_model(loaded, run=run, purpose="rollout", stack=stack, progress=progress)
        if held_out:
            tasks = parts.eval_tasks[:num_tasks]
        else:
            order = TaskOrder(parts.train_env.num_tasks, seed=config.seed)
            tasks = [parts.train_env.task_at(order.index(n)) for n in range(num_tasks)]
        draws = [Draw(number=number, task=task) for number, task in enumerate(tasks)]
        with progress.phase("rollouts", total=len(draws) * config.algorithm.group_size) as bar:
            return (parts.eval_runner if held_out else parts.runner).collect(
                draws,
                group_size=config.algorithm.group_size,
                purpose="rollout-eval" if held_out else "train",
                on_trajectory=lambda _: bar.advance(1),
            )
