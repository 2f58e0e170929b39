"""Trajectories on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from toy_chat import call_text, roll

from quintain.agents.policy import PolicyError
from quintain.agents.store import SCHEMA_VERSION, TrajectoryStore, read_step
from quintain.agents.trajectory import Group, Trajectory
from quintain.envs import Message


def group_of(*members: Trajectory, draw: int = 0) -> Group:
    members = tuple(replace(t, draw=draw, member=index) for index, t in enumerate(members))
    return Group(task_id="t", draw=draw, trajectories=members)


def example() -> list[Group]:
    solved = roll([f"<think>é 北京</think>{call_text()}", call_text("serch"), "done"])
    failed = roll([call_text(), PolicyError("down")])
    return [group_of(solved, failed, draw=4), group_of(failed, solved, draw=2)]


def test_what_is_read_equals_what_was_written(tmp_path: Path):
    groups, advantages = example(), [[0.5, math.nan], [math.nan, -0.5]]
    path = TrajectoryStore(tmp_path / "trajectories").write_step(12, groups, advantages)
    assert path == tmp_path / "trajectories" / "step_000012.jsonl"
    record = read_step(path)
    assert record.step == 12 and record.groups == tuple(groups)
    assert record.advantages == ((0.5, math.nan), (math.nan, -0.5))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_without_advantages_none_are_read(tmp_path: Path):
    path = TrajectoryStore(tmp_path).write_step(0, example(), None)
    assert read_step(path).advantages is None


def test_every_line_is_strict_json_with_nulls_for_what_does_not_exist_and_readable_text(tmp_path: Path):
    """B09"""
    path = TrajectoryStore(tmp_path).write_step(1, example(), [[0.5, math.nan], [math.nan, -0.5]])
    text = path.read_text(encoding="utf-8")
    assert "北京" in text and "NaN" not in text
    first, second, *_ = [json.loads(line) for line in text.splitlines()]
    assert first["schema"] == SCHEMA_VERSION and first["advantage"] == 0.5 and second["advantage"] is None
    assert second["reward"] is None and second["outcome"] == "infrastructure"
    row = first["rows"][0]
    assert [p is None for p in row["logprobs"]] == [not flag for flag in row["sampled"]]


def test_text_that_has_no_utf8_form_is_written_and_read_all_the_same(tmp_path: Path):
    (group, _) = example()
    odd = replace(group.trajectories[0], messages=(Message(role="user", content="a\ud800b"),))
    path = TrajectoryStore(tmp_path).write_step(1, [group_of(odd)], None)
    assert read_step(path).groups == (group_of(odd),)


def test_writing_a_step_again_replaces_it(tmp_path: Path):
    store = TrajectoryStore(tmp_path)
    store.write_step(1, example(), None)
    store.write_step(1, example()[:1], None)
    assert len(read_step(store.path_of(1)).groups) == 1


@pytest.mark.parametrize("line", ['{"schema": 99}', '{"schema": 1, "step": 0}', "{broken", "[]"])
def test_a_file_of_another_version_or_a_broken_line_is_refused_with_its_place(tmp_path: Path, line: str):
    path = TrajectoryStore(tmp_path).write_step(1, example(), None)
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"step_000001.jsonl, line 5"):
        read_step(path)


def test_a_write_that_fails_leaves_the_earlier_file_whole(tmp_path: Path):
    store, groups = TrajectoryStore(tmp_path), example()
    store.write_step(1, groups, None)
    broken = replace(groups[0].trajectories[0], error={1, 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.write_step(1, [group_of(broken)], None)
    assert read_step(store.path_of(1)).groups == tuple(groups)
