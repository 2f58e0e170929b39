"""Settings of the environment layer (pydantic only)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class EnvironmentConfig(BaseModel):
    """Which environment, and which of its tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: str
    """A Gymnasium id (`quintain/Calculator-v0`), or `path/to/file.py:ClassName` or `module:ClassName`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    num_train_tasks: int | None = Field(default=None, ge=1)
    """Use the first N tasks of the `train` split; None = all."""
    num_eval_tasks: int = Field(default=256, ge=1)
    """Use the first N tasks of the `eval` split (held out)."""
    max_turns: int | None = Field(default=None, ge=1)
    """Overrides the environment's own limit of turns a trajectory."""
    max_calls_per_turn: int | None = Field(default=None, ge=1)
    """Overrides the environment's own limit of tool calls a turn; the model is told which further ones were not run."""
