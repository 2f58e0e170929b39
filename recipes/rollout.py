"""`quintain rollout`: the recipe's model on a few training tasks; trains and writes nothing."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from quintain.agents.scheduler import Draw
from quintain.agents.trajectory import Group
from quintain.recipes.assemble import assemble, starting_model
from quintain.recipes.loader import LoadedRecipe
from quintain.trainer.progress import Progress
from quintain.trainer.task_order import TaskOrder


def rollout_recipe(loaded: LoadedRecipe, *, num_tasks: int, progress: Progress) -> list[Group]:
    """The groups that the recipe's first `num_tasks` task draws give, before any training."""
    config = loaded.config
    with ExitStack() as stack:
        load = partial(starting_model, config, progress=progress, folder=None)
        parts = assemble(config, stack=stack, owner=f"rollout-{config.name}", progress=progress, load=load)
        if config.warm_start.enabled:
            parts.warm_up(config, progress)
        order = TaskOrder(parts.train_env.num_tasks, seed=config.seed)
        draws = [Draw(number=n, task=parts.train_env.task_at(order.index(n))) for n in range(num_tasks)]
        with progress.phase("rollouts", total=num_tasks * config.algorithm.group_size) as bar:
            return parts.runner.collect(
                draws, group_size=config.algorithm.group_size, on_trajectory=lambda _: bar.advance(1)
            )
