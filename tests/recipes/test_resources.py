"""Whether a batch can be shared by the processes asked for: decided from the recipe, before anything starts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from quintain.recipes.loader import load_overrides
from quintain.recipes.resources import parallelism_problems

QUINTAIN = Path(sys.executable).with_name("quintain")
RECIPE = Path(__file__).parents[2] / "recipes" / "calculator.yaml"


def problems(num_processes: int, *overrides: str, strategy: str = "fsdp2") -> list[str]:
    processes = (f"parallelism.num_processes={num_processes}", f"parallelism.strategy={strategy}")
    return parallelism_problems(load_overrides((*processes, *overrides)))


def sizes(tasks: int, group: int, minibatches: int = 1) -> tuple[str, ...]:
    return (
        f"algorithm.tasks_per_step={tasks}",
        f"algorithm.group_size={group}",
        f"algorithm.minibatches_per_step={minibatches}",
    )


@pytest.mark.parametrize(
    ("num_processes", "tasks", "group", "minibatches", "nearest"),
    [
        (2, 32, 8, 4, None),  # H03: 64 trajectories a step are counted, not 8 task draws
        (4, 16, 8, 1, None),
        (3, 3, 5, 1, None),
        (64, 32, 8, 4, None),
        (4, 2, 1, 1, "algorithm.tasks_per_step = 4, or parallelism.num_processes = 2"),  # H04
        (4, 6, 1, 1, "algorithm.tasks_per_step = 8, or parallelism.num_processes = 3"),  # H05
        (3, 16, 8, 1, "algorithm.tasks_per_step = 15, or parallelism.num_processes = 2"),
        (4, 6, 3, 2, "algorithm.tasks_per_step = 8, or parallelism.num_processes = 3"),
    ],
)
def test_trajectories_of_an_optimizer_step_are_shared_equally_or_refused(
    num_processes: int, tasks: int, group: int, minibatches: int, nearest: str | None
):
    found = problems(num_processes, *sizes(tasks, group, minibatches))
    if nearest is None:
        assert found == []
        return
    (sentence,) = found
    assert sentence.endswith(f"the nearest that can: {nearest}")
    assert f"{tasks // minibatches * group} trajectories" in sentence
    nearest_tasks = int(nearest.split("= ")[1].split(",")[0])
    assert problems(num_processes, *sizes(nearest_tasks, group, minibatches)) == []
    assert problems(int(nearest.split("= ")[2]), *sizes(tasks, group, minibatches)) == []


@pytest.mark.parametrize(
    ("num_processes", "strategy", "overrides", "words"),
    [
        (2, "single", (), "set the strategy to fsdp2 or ddp"),
        (1, "fsdp2", (), "the nearest that works: 2"),
        (2, "fsdp2", ("parallelism.context_parallel=2",), "never run here"),
        (2, "fsdp2", ("parallelism.tensor_parallel=2",), "never run here"),
        (2, "ddp", ("parallelism.cpu_offload=true",), "belongs to strategy fsdp2"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(num_processes, strategy, overrides, words):
    (sentence,) = problems(num_processes, *overrides, strategy=strategy)
    assert words in sentence


def test_another_number_of_started_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    (sentence,) = problems(2)
    assert "the launcher started 3 processes" in sentence


def test_a_batch_that_ranks_cannot_share_ends_in_seconds_with_exit_code_2(tmp_path: Path):
    """H05"""
    started = time.monotonic()
    overrides = ("parallelism.num_processes=4", "parallelism.strategy=ddp", *sizes(6, 1))
    command = [str(QUINTAIN), "train", str(RECIPE), "--out", str(tmp_path / "run"), *overrides]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "algorithm.tasks_per_step = 8" in result.stderr
    assert time.monotonic() - started < 5
    assert not (tmp_path / "run").exists()
