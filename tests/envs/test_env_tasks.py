"""From rows to tasks: what is kept, what is refused, and what the refusal says."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from small_envs import Desk

from quintain.envs import NoTasksError, ToolEnv, make_env
from quintain.envs.config import EnvironmentConfig


def with_rows(rows: Any, **kwargs: Any) -> ToolEnv:
    class Rows(Desk):
        def rows(self, split: str) -> Any:
            return rows

    return Rows(**kwargs)


def test_rows_become_tasks_with_ids_and_their_own_columns() -> None:
    env = Desk(split="eval")
    assert isinstance(env.tasks, datasets.Dataset) and env.num_tasks == 20
    task = env.task_at(2)
    assert (task.id, task.prompt, task.data) == ("eval-2", "eval question 2", {"answer": "2"})


def test_a_dataset_and_given_ids_are_taken_as_they_are() -> None:
    env = with_rows(datasets.Dataset.from_dict({"prompt": ["a", "b"], "id": [10, 11], "n": [1, 2]}))
    assert (env.task_at(1).id, env.task_at(1).data) == ("11", {"n": 2})
    assert with_rows({"id": str(i), "prompt": "p"} for i in range(3)).num_tasks == 3


def test_nested_values_come_back_as_given() -> None:
    """Arrow would give each dict the keys of all of them."""
    rows = [{"prompt": "a", "files": {"x": "1"}}, {"prompt": "b", "files": {"y": None}}, {"prompt": "c"}]
    env = with_rows(rows)
    assert [env.task_at(i).data["files"] for i in range(3)] == [{"x": "1"}, {"y": None}, None]
    assert isinstance(env.tasks[0]["files"], str)


@pytest.mark.parametrize("rows", [[], (), datasets.Dataset.from_dict({"prompt": []})])
def test_an_empty_split_says_0_of_n_left(rows: Any) -> None:
    """I02"""
    with pytest.raises(NoTasksError, match=r"0 of 0 rows left for split 'eval' of Rows: rows\(\) gave none"):
        _ = with_rows(rows, split="eval").tasks


def test_a_filtered_out_split_counts_the_reasons() -> None:
    """I02"""

    class Picky(Desk):
        def refuse(self, row: Any) -> str | None:
            return "too long" if int(row["answer"]) % 2 else "too short"

    with pytest.raises(NoTasksError, match="0 of 20 rows left for split 'train' of Picky: 10 too short, 10 too long"):
        Picky().reset(seed=0)


def test_refused_rows_are_left_out_before_the_first_n_are_taken() -> None:
    class Odd(Desk):
        def refuse(self, row: Any) -> str | None:
            return None if int(row["answer"]) % 2 else "even"

    env = Odd(num_tasks=3)
    assert [env.task_at(i).data["answer"] for i in range(env.num_tasks)] == ["1", "3", "5"]


def test_a_wrong_split_is_named_with_the_right_ones() -> None:
    """I02"""
    with pytest.raises(ValueError, match="'evla': choose from train, eval"):
        Desk(split="evla")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="DatasetDict with the splits train, test"):
        split = datasets.Dataset.from_dict({"prompt": ["a"]})
        _ = with_rows(datasets.DatasetDict({"train": split, "test": split})).tasks


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "returned NoneType"),
        ("abc", "returned str"),
        ({"prompt": "a"}, "returned dict"),
        (["a"], "row 0 is str"),
        ([{"prompt": "a"}, {"promt": "b"}], "1 of 2 rows are bad: row 1 has no `prompt`"),
        ([{"prompt": 5}], "`prompt` is int, not text"),
        ([{"prompt": " "}], "`prompt` is empty"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b", "x": "1"}], "column `x` mixes types .number in row 0, str in row 1"),
        ([{"prompt": "a", "id": "1"}, {"prompt": "b", "id": "1"}], "ids occur more than once"),
        (datasets.Dataset.from_dict({"question": ["a"]}), "no column `prompt`; it has: question"),
    ],
)
def test_bad_rows_are_named(rows: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        _ = with_rows(rows).tasks


def test_a_recipe_limits_tasks_turns_and_calls() -> None:
    config = EnvironmentConfig(
        id="small_envs:Desk", num_train_tasks=3, num_eval_tasks=2, max_turns=1, max_calls_per_turn=1
    )
    train, held_out = (make_env(config, split=split, pool=None) for split in ("train", "eval"))
    assert (train.num_tasks, held_out.num_tasks, train.max_turns, train.max_calls_per_turn) == (3, 2, 1, 1)
    assert Desk().max_turns == 8
