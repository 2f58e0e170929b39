"""Settings of the agent layer (pydantic only)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class LaunchConfig(BaseModel):
    """SGLang servers that a run starts, watches, restarts and stops."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    python: str
    """Interpreter of the environment that SGLang is installed in, never the trainer's own. With a slash in it a path,
    relative to the recipe; else looked for on PATH."""
    num_servers: int = Field(default=1, ge=1)
    """Servers on this machine, each with a port of its own."""
    device: str | None = None
    """`cpu`, `cuda`, …; null = SGLang finds out. `cpu` also brings the settings that SGLang needs there."""
    dtype: str = "auto"
    """Numbers the server computes with: `auto` (as the model's files say), `float32`, `bfloat16`, …"""
    extra_args: tuple[str, ...] = ()
    """More arguments of `sglang.launch_server`, one list entry each: `[--tp-size, 2]`."""
    env: dict[str, str] = {}
    """Environment variables of the server, on top of the run's own: `CUDA_VISIBLE_DEVICES`, say."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Until a server that was started must answer a generation."""
    stop_timeout_s: float = Field(default=15.0, gt=0)
    """From the request to stop until the server's processes are killed."""
    max_restarts: int = Field(default=3, ge=0)
    """How often in a run one server is started again after it died."""


class EngineConfig(BaseModel):
    """What samples tokens. Everything but `type` belongs to `type: sglang`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: Literal["local", "sglang"] = "local"
    """`local`: in-process, shares the trainer's weights. `sglang`: SGLang servers, started (`launch`) or given
    (`urls`)."""
    urls: tuple[str, ...] = ()
    """Servers that run already, such as `http://127.0.0.1:30000`; empty where `launch` is given."""
    launch: LaunchConfig | None = None
    """Servers that the run starts itself; null where `urls` are given."""
    router: str | None = None
    """URL of an `sglang-router` that generations go through; its workers are still named by `urls` (or launched), since
    weights, pauses and aborts go to each of them. Members of a group then land where the router wants them."""
    max_in_flight: int = Field(default=64, ge=1)
    """Most generations that one server is asked for at once; more wait on our side."""
    stream: bool = False
    """Ask for tokens as they come. A request whose client dies is then ended at once instead of within seconds; long
    replies cost more, since every part repeats all before it."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one generation."""
    retry_s: float = Field(default=30.0, ge=0)
    """How long a generation is tried again where nothing was sampled: no connection, or a server that is still
    starting. Past it the trajectory ends as an infrastructure failure."""
    sync_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of each stage of a weight delivery: save, pause, transfer, verify, continue."""

    @field_validator("urls", "router")
    @classmethod
    def _check_urls(cls, value: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        for url in (value,) if isinstance(value, str) else value or ():
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no address of a server; write it as http://HOST:PORT")
        return value

    @model_validator(mode="after")
    def _check_servers(self) -> EngineConfig:
        named = [name for name in ("urls", "launch", "router") if getattr(self, name)]
        if self.type == "local" and named:
            raise ValueError(
                f"engine.{named[0]} is for engine.type = sglang, and engine.type is local; change the type, or set "
                f"engine.{named[0]}={'[]' if named[0] == 'urls' else 'null'}"
            )
        if self.type == "sglang" and bool(self.urls) == (self.launch is not None):
            found = "both are given" if self.urls else "neither is given"
            raise ValueError(
                f"engine.type = sglang needs engine.urls (running servers) or engine.launch (servers to start); {found}"
            )
        return self


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
    env_threads: int | None = Field(default=None, ge=1)
    """Threads in which the (blocking) environments run; null = one for each box of the sandbox pool that can be in use,
    and 16 where no box is needed. Fewer leave boxes idle, more wait for boxes."""
    num_retries: int = Field(default=2, ge=0)
    """How often a task is tried again after an environment, infrastructure or verifier failure."""
    max_failure_frac: float = Field(default=0.5, ge=0, le=1)
    """The breaker: a step in which a larger share of attempts failed stops the run."""
    history: Literal["append", "fork", "refuse"] = "refuse"
    """Where a template rewrites earlier turns: `append` keeps the sampled tokens as they are (delta rendering), `fork`
    makes one row a turn, `refuse` is an error at start. Append-only templates are not affected."""
