"""From an environment's rows to its tasks.

    rows(split)  ->  every row checked  ->  rows that `refuse` names a reason against left out  ->  first N  ->  Dataset

Invariants: ids are unique within a split; a data column comes back from `TaskTable.task` as it was given. Columns that
hold dicts are kept as JSON text inside the Dataset, because Arrow gives every dict of a column the keys of all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets

from quintain.envs.errors import EnvironmentDefinitionError, NoTasksError
from quintain.envs.message import Task

Refuse = Callable[[Mapping[str, Any]], str | None]
MAX_LISTED = 5  # bad rows that an error lists one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The tasks of one split."""

    dataset: datasets.Dataset
    """Columns `id`, `prompt` and the rows' own."""
    json_columns: tuple[str, ...]
    """Columns kept as JSON text."""
    refused: Mapping[str, int]
    """Rows left out, by reason."""

    def task(self, index: int) -> Task:
        """Raises IndexError."""
        row = dict(self.dataset[index])
        for column in self.json_columns:
            row[column] = json.loads(row[column])
        return Task(id=row.pop("id"), prompt=row.pop("prompt"), data=row)


def build_tasks(rows: Any, *, owner: str, split: str, refuse: Refuse | None, limit: int | None) -> TaskTable:
    """Check the rows and make the table.

    Raises EnvironmentDefinitionError where `rows` is no table or has bad rows, NoTasksError where none is left.
    """
    where = f"{owner}.rows({split!r})"
    if isinstance(rows, datasets.DatasetDict):
        raise EnvironmentDefinitionError(
            f"{where} returned a DatasetDict with the splits {', '.join(map(str, rows))}; return one of them"
        )
    dataset: datasets.Dataset
    json_columns: tuple[str, ...] = ()
    if isinstance(rows, datasets.Dataset):
        dataset = rows
    elif isinstance(rows, Iterable) and not isinstance(rows, (str, bytes, Mapping)):
        dataset, json_columns = _from_rows(list(rows), where)
    else:
        raise EnvironmentDefinitionError(
            f"{where} returned {type(rows).__name__}; return a list of dicts, each with a `prompt`"
        )
    total = len(dataset)
    if total:
        dataset = _with_checked_ids(dataset, where, split)
    kept, reasons = _sift(dataset, json_columns, refuse) if refuse else (list(range(total)), Counter())
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "rows() gave none"
        raise NoTasksError(f"0 of {total} rows left for split {split!r} of {owner}: {why}")
    kept = kept[:limit]
    dataset = dataset if len(kept) == total else dataset.select(kept)
    return TaskTable(dataset=dataset, json_columns=json_columns, refused=dict(reasons))


def _sift(dataset: datasets.Dataset, json_columns: tuple[str, ...], refuse: Refuse) -> tuple[list[int], Counter[str]]:
    """Indices kept, and how often each reason was given."""
    kept: list[int] = []
    reasons: Counter[str] = Counter()
    for index in range(len(dataset)):
        row = dict(dataset[index])
        row.update({column: json.loads(row[column]) for column in json_columns})
        reason = refuse(row)
        if reason is None:
            kept.append(index)
        else:
            reasons[str(reason)] += 1
    return kept, reasons


def _from_rows(rows: list[Any], where: str) -> tuple[datasets.Dataset, tuple[str, ...]]:
    """A Dataset from plain rows; the union of their keys, None where a row lacks one."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise EnvironmentDefinitionError(
                f"{where}: row {index} is {type(row).__name__}; a row is a dict with a `prompt`"
            )
    _check_prompts([row.get("prompt") for row in rows], where)
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns, json_columns = {}, []
    for name in names:
        values = [row.get(name) for row in rows]
        if any(_holds_dict(value) for value in values):
            json_columns.append(name)
            values = [json.dumps(value, ensure_ascii=False) for value in values]
        _check_one_type(name, values, where)
        columns[name] = values
    return datasets.Dataset.from_dict(columns), tuple(json_columns)


def _with_checked_ids(dataset: datasets.Dataset, where: str, split: str) -> datasets.Dataset:
    if "prompt" not in dataset.column_names:
        raise EnvironmentDefinitionError(f"{where} has no column `prompt`; it has: {', '.join(dataset.column_names)}")
    _check_prompts(list(dataset["prompt"]), where)
    if "id" not in dataset.column_names:
        return dataset.add_column("id", [f"{split}-{index}" for index in range(len(dataset))])  # type: ignore[call-arg]
    ids = [str(value) for value in dataset["id"]]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise EnvironmentDefinitionError(
            f"{where}: {len(twice)} ids occur more than once, for example {twice[:MAX_LISTED]}"
        )
    return dataset.remove_columns("id").add_column("id", ids)  # type: ignore[call-arg]


def _check_prompts(prompts: list[Any], where: str) -> None:
    bad = []
    for index, prompt in enumerate(prompts):
        if prompt is None:
            bad.append(f"row {index} has no `prompt`")
        elif not isinstance(prompt, str):
            bad.append(f"row {index}: `prompt` is {type(prompt).__name__}, not text")
        elif not prompt.strip():
            bad.append(f"row {index}: `prompt` is empty")
    if bad:
        more = f"; and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        raise EnvironmentDefinitionError(
            f"{where}: {len(bad)} of {len(prompts)} rows are bad: {'; '.join(bad[:MAX_LISTED])}{more}"
        )


def _check_one_type(name: str, values: list[Any], where: str) -> None:
    """Arrow columns have one type; say which rows differ before Arrow fails with less to go by."""
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if value is not None:
            kind = "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
            first.setdefault(kind, index)
    if len(first) > 1:
        seen = ", ".join(f"{kind} in row {index}" for kind, index in first.items())
        raise EnvironmentDefinitionError(f"{where}: column `{name}` mixes types ({seen}); use one, for example text")


def _holds_dict(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and any(_holds_dict(part) for part in value))
