"""How many tasks the generated environments make at most.

Problems and jobs are drawn at random until there are enough different ones, which takes ever longer as they run out.
The limits stay so far below what there is that the drawing always ends soon.
"""

from __future__ import annotations

from quintain.envs.errors import EnvironmentArgumentsError

MAX_TASKS = {"train": 500_000, "eval": 50_000}
"""Most tasks a split; one in eight of all there are is for `eval`."""


def check_task_counts(*, num_train: int, num_eval: int, task_seed: int) -> None:
    """Raises EnvironmentArgumentsError naming the argument, its value and the most that there are."""
    for split, name, value in (("train", "num_train", num_train), ("eval", "num_eval", num_eval)):
        most = MAX_TASKS[split]
        if not _is_whole(value) or not 1 <= value <= most:
            raise EnvironmentArgumentsError(
                f"{name} = {value!r}: the {split} split has at most {most} tasks; give a whole number from 1 to {most}"
            )
    if not _is_whole(task_seed) or task_seed < 0:
        raise EnvironmentArgumentsError(f"task_seed = {task_seed!r}: give a whole number that is not negative")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
