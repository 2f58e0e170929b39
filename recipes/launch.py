"""Several learner processes for one `quintain train`: it starts itself again, once a rank, and waits for them.

    quintain train ... (reads, checks, launches)
        ├── quintain train ...   RANK=0: the run
        └── quintain train ...   RANK=1, ...: followers (`trainer/follower.py`)

Where RANK and WORLD_SIZE are set already (torchrun or a batch system on several machines), nothing is launched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from quintain.recipes.config import RecipeConfig

_ENTRY = "from quintain.recipes.cli import main; main()"


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_follower() -> bool:
    """Whether this is a rank other than 0."""
    return is_launched() and int(os.environ["RANK"]) > 0


def needs_launch(config: RecipeConfig) -> bool:
    """Whether the recipe asks for several processes and this is not yet one of them."""
    return config.parallelism.num_processes > 1 and not is_launched()


def relaunch(config: RecipeConfig, arguments: Sequence[str]) -> int:
    """Run `quintain` with these arguments in as many processes as the recipe says; returns the exit code."""
    from quintain.trainer.launch import launch

    num_processes = config.parallelism.num_processes
    share = max(1, len(os.sched_getaffinity(0)) // num_processes)
    environment = {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(config.trainer.num_threads or share)),
    }
    return launch([sys.executable, "-c", _ENTRY, *arguments], num_processes=num_processes, environment=environment)
