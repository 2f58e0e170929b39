"""Whether a batch can be cut over the processes asked for: arithmetic, before anything is started.

Units: a *task draw* is a group; it has `group_size` trajectories; an *optimizer step* trains on
`tasks_per_step / minibatches_per_step x group_size` trajectories, which the ranks share equally.
"""

from __future__ import annotations

import math
import os

from quintain.recipes.config import RecipeConfig


def parallelism_problems(config: RecipeConfig) -> list[str]:
    """One sentence for each setting of `parallelism` that can't work, with the nearest one that can."""
    parallelism = config.parallelism
    problems = [*_process_problems(config), *_share_problems(config)]
    for name in ("context_parallel", "tensor_parallel"):
        if getattr(parallelism, name) > 1:
            problems.append(
                f"parallelism.{name} = {getattr(parallelism, name)}: Accelerate raises on it without GPUs, and it was "
                "never run here with any, so it is refused; set it to 1 and use fsdp2"
            )
    if parallelism.cpu_offload and parallelism.strategy != "fsdp2":
        problems.append(
            f"parallelism.cpu_offload = true belongs to strategy fsdp2, not {parallelism.strategy}: set it to false"
        )
    whole = config.model.lora is None and parallelism.strategy in ("single", "ddp")
    if config.algorithm.kl_in == "reward" and not whole:
        problems.append(
            "algorithm.kl_in = reward needs the reference model whole on rank 0, which it is not with adapters or with "
            f"parallelism.strategy = {parallelism.strategy}: set algorithm.kl_in = loss"
        )
    return problems


def _process_problems(config: RecipeConfig) -> list[str]:
    strategy, asked = config.parallelism.strategy, config.parallelism.num_processes
    problems = []
    if strategy == "single" and asked > 1:
        problems.append(
            f"parallelism.num_processes = {asked} with parallelism.strategy = single; set the strategy to fsdp2 or "
            "ddp, or num_processes to 1"
        )
    if strategy != "single" and asked < 2:
        problems.append(
            f"parallelism.strategy = {strategy} spreads over processes, and parallelism.num_processes is {asked}; the "
            "nearest that works: 2"
        )
    started = os.environ.get("WORLD_SIZE")
    if "RANK" in os.environ and started and int(started) != asked:
        problems.append(
            f"parallelism.num_processes = {asked}, but the launcher started {started} processes (WORLD_SIZE); the "
            f"nearest that works: {started}"
        )
    return problems


def _share_problems(config: RecipeConfig) -> list[str]:
    algorithm, num_ranks = config.algorithm, config.parallelism.num_processes
    draws = algorithm.tasks_per_step // algorithm.minibatches_per_step
    trajectories = draws * algorithm.group_size
    if trajectories % num_ranks == 0:
        return []
    # Draws per optimizer step must be a multiple of this for its trajectories to be one of the ranks.
    unit = num_ranks // math.gcd(num_ranks, algorithm.group_size)
    nearest = max(unit, round(draws / unit) * unit) * algorithm.minibatches_per_step
    ranks = next((n for n in range(num_ranks, 0, -1) if trajectories % n == 0), 1)
    return [
        f"an optimizer step has {trajectories} trajectories (algorithm.tasks_per_step {algorithm.tasks_per_step} task "
        f"draws / minibatches_per_step {algorithm.minibatches_per_step} x group_size {algorithm.group_size}), which "
        f"can't be shared by parallelism.num_processes = {num_ranks} ranks; the nearest that can: "
        f"algorithm.tasks_per_step = {nearest}, or parallelism.num_processes = {ranks}"
    ]
