"""How many threads torch uses."""

from __future__ import annotations

import os

import torch


def set_threads(num_threads: int | None) -> int:
    """Set torch's thread count (None: the cores this process may use) and return it."""
    chosen = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen
