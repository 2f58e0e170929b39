"""How many threads torch uses."""

from __future__ import annotations

import os

import torch


def set_threads(num_threads: int | None) -> int:
    """Set torch's thread count (None: this process' share of the cores it may use) and return it.

    Processes that a launcher started beside it on the machine take an equal share each.
    """
    num_beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = num_threads or max(1, len(os.sched_getaffinity(0)) // num_beside)
    torch.set_num_threads(chosen)
    return chosen
