"""Settings of the agent layer (pydantic only)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """What samples tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["local"] = "local"
    """`local`: in-process, shares the trainer's weights."""


class RolloutConfig(BaseModel):
    """How trajectories are made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer applies the same (C09)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1 in training: anything else renormalises and biases the ratio (C10)."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Most tokens of one generation (one turn)."""
    max_trajectory_tokens: int = Field(default=1024, ge=8)
    """Most tokens of a whole row: prompt, replies and tool results together. Checked before sending."""
    max_tool_tokens: int = Field(default=256, ge=8)
    """Most tokens of one tool result; head and tail are kept around a marker."""
    max_format_errors: int = Field(default=3, ge=1)
    """A trajectory ends (stop reason `format`) at this many malformed calls."""
    unjudged_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward of a trajectory that was ended before the environment judged it (stop reasons `length`, `max_tokens`,
    `format`, `deadline`). It should be at most the environment's worst reward: where answers can score below it, the
    policy is rewarded for never finishing."""
    deadline_s: float = Field(default=120.0, gt=0)
    """One absolute deadline a trajectory: generation, tools and reward together."""
    max_concurrent: int = Field(default=128, ge=1)
    """Most trajectories in flight."""
    env_threads: int = Field(default=16, ge=1)
    """Threads in which the (blocking) environments run."""
    num_retries: int = Field(default=2, ge=0)
    """How often a task is tried again after an environment, infrastructure or verifier failure."""
    max_failure_frac: float = Field(default=0.5, ge=0, le=1)
    """The breaker: a step in which a larger share of attempts failed stops the run."""
    history: Literal["append", "fork", "refuse"] = "refuse"
    """Where a template rewrites earlier turns: `append` keeps the sampled tokens as they are (delta rendering), `fork`
    makes one row a turn, `refuse` is an error at start. Append-only templates are not affected."""
