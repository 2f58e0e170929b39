"""Trajectories on disk: one JSONL file a step, the source of truth for everything that shows or replays a run.

One line a trajectory: `schema`, `step`, `advantage`, and the fields of `Trajectory` by their names. Text is UTF-8,
unescaped; "no log-prob" and "no reward" (NaN) are `null`. A file appears whole or not at all. Reading gives back
objects equal to those written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintain.agents.completion import Completion, VersionSpan
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.trajectory import Group, TokenRow, Trajectory, Turn
from quintain.envs import Message, ToolCall

SCHEMA_VERSION = 1
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step's file holds."""

    step: int
    groups: tuple[Group, ...]
    advantages: tuple[tuple[float, ...], ...] | None  # P_G; NaN for members outside of the baseline; None = not given


class TrajectoryStore:
    """Writes `FOLDER/step_000012.jsonl`; the folder is made when it is needed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.jsonl"

    def write_step(self, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]] | None) -> Path:
        """Write a step's groups, replacing an earlier file of that step. Raises OSError; no half file is left then."""
        lines = []
        for index, group in enumerate(groups):
            for member, trajectory in enumerate(group.trajectories):
                advantage = None if advantages is None else advantages[index][member]
                head = {"schema": SCHEMA_VERSION, "step": step, "advantage": _number(advantage)}
                head["has_advantage"] = advantages is not None
                lines.append(_line(head | _trajectory_to_json(trajectory)))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path_of(step)
        beside = path.with_suffix(".partial")
        with beside.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        return path


def read_step(path: str | Path) -> StepRecord:
    """Read one step's file. Raises ValueError naming file and line for another schema version or a broken line."""
    groups: dict[int, list[Trajectory]] = {}
    advantages: dict[int, list[float]] = {}
    step, has_advantages = 0, False
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                raw = json.loads(line)
                if raw["schema"] != SCHEMA_VERSION:
                    raise ValueError(f"schema {raw['schema']}, but this version reads {SCHEMA_VERSION}")
                trajectory = _trajectory_from_json(raw)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
            step, has_advantages = raw["step"], raw["has_advantage"]
            groups.setdefault(trajectory.draw, []).append(trajectory)
            advantages.setdefault(trajectory.draw, []).append(_float(raw["advantage"]))
    return StepRecord(
        step=step,
        groups=tuple(
            Group(task_id=members[0].task_id, draw=draw, trajectories=tuple(members))
            for draw, members in groups.items()
        ),
        advantages=tuple(tuple(values) for values in advantages.values()) if has_advantages else None,
    )


def _line(raw: dict[str, Any]) -> bytes:
    text = _ENCODER.encode(raw) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which a model can write as a JSON escape, has no UTF-8 form
        return (json.dumps(raw, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    raw = _fields(trajectory)
    raw["messages"] = [_message_to_json(message) for message in trajectory.messages]
    raw["turns"] = [_turn_to_json(turn) for turn in trajectory.turns]
    raw["rows"] = [
        _fields(row) | {"sampled": [int(flag) for flag in row.sampled], "logprobs": _numbers(row.logprobs)}
        for row in trajectory.rows
    ]
    raw["reward"] = _number(trajectory.reward)
    raw["reward_terms"] = {name: _number(value) for name, value in trajectory.reward_terms.items()}
    raw["metrics"] = {name: _number(value) for name, value in trajectory.metrics.items()}
    raw["events"] = dict(trajectory.events)
    return raw


def _trajectory_from_json(raw: Mapping[str, Any]) -> Trajectory:
    names = {field.name for field in dataclasses.fields(Trajectory)}
    known = {name: value for name, value in raw.items() if name in names}
    known["messages"] = tuple(_message_from_json(message) for message in raw["messages"])
    known["turns"] = tuple(_turn_from_json(turn) for turn in raw["turns"])
    known["rows"] = tuple(
        TokenRow(
            token_ids=tuple(row["token_ids"]),
            sampled=tuple(map(bool, row["sampled"])),
            logprobs=_floats(row["logprobs"]),
            policy_versions=tuple(row["policy_versions"]),
        )
        for row in raw["rows"]
    )
    known["reward"] = _float(raw["reward"])
    known["reward_terms"] = {name: _float(value) for name, value in raw["reward_terms"].items()}
    known["metrics"] = {name: _float(value) for name, value in raw.get("metrics", {}).items()}
    known["outcome"] = Outcome(raw["outcome"])
    known["stop_reason"] = StopReason(raw["stop_reason"])
    return Trajectory(**known)


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    raw = _fields(turn)
    raw["completion"] = _fields(turn.completion) | {
        "logprobs": _numbers(turn.completion.logprobs),
        "version_spans": [_fields(span) for span in turn.completion.version_spans],
    }
    raw["message"] = _message_to_json(turn.message)
    raw["observation"] = [_message_to_json(message) for message in turn.observation]
    raw["reward"] = _number(turn.reward)
    return raw


def _turn_from_json(raw: Mapping[str, Any]) -> Turn:
    completion = raw["completion"]
    known = dict(raw)
    known["prompt_token_ids"] = tuple(raw["prompt_token_ids"])
    known["completion"] = Completion(
        token_ids=tuple(completion["token_ids"]),
        logprobs=_floats(completion["logprobs"]),
        finish_reason=completion["finish_reason"],
        version_spans=tuple(VersionSpan(**span) for span in completion["version_spans"]),
    )
    known["message"] = _message_from_json(raw["message"])
    known["observation"] = tuple(_message_from_json(message) for message in raw["observation"])
    known["reward"] = _float(raw["reward"])
    return Turn(**known)


def _message_to_json(message: Message) -> dict[str, Any]:
    """Absent fields are left out, so that a line reads like a chat log."""
    raw: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        raw["tool_calls"] = [_fields(call) for call in message.tool_calls]
    optional = {"reasoning": message.reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    return raw | {name: value for name, value in optional.items() if value is not None}


def _message_from_json(raw: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in raw.get("tool_calls", ()))
    return Message(**{**raw, "tool_calls": calls})


def _fields(record: Any) -> dict[str, Any]:
    """One level of a data class; `dataclasses.asdict` would copy every token list over and over."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _float(value: float | None) -> float:
    """The one NaN object, so that tuples which hold it compare equal."""
    return math.nan if value is None else value


def _floats(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)
