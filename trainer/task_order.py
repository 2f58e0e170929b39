"""Which task the n-th draw of a run is: a seeded permutation an epoch, computed from the draw number alone.

There is nothing to save but the next draw number, so a resumed run goes on exactly where the checkpoint stood.
"""

from __future__ import annotations

import numpy as np

from quintain.agents.seeds import derive_seed


class TaskOrder:
    """Maps draw numbers to task indices; each task is drawn once an epoch."""

    def __init__(self, num_tasks: int, *, seed: int) -> None:
        if num_tasks < 1:
            raise ValueError("there are no tasks to draw from")
        self.num_tasks = num_tasks
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def index(self, draw: int) -> int:
        """The task index of draw number `draw` (0-based, unbounded)."""
        epoch, position = divmod(draw, self.num_tasks)
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.Philox(derive_seed(self._seed, "task-order", epoch)))
            self._permutation, self._epoch = rng.permutation(self.num_tasks), epoch
        return int(self._permutation[position])
