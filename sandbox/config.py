"""Settings of the sandbox layer (pydantic only: `quintain --help` must not import docker)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SandboxConfig(BaseModel):
    """Which boxes model-written commands run in, how many there are, and what they may use."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: Literal["auto", "docker", "local"] = "auto"
    """`auto`: Docker where an engine answers, else local *only* for environments with `needs_isolation = False`."""
    image: str | None = None
    """Docker image; None = quintain's own small image, built or pulled at first use. It needs `python3`."""
    pool_size: int = Field(default=8, ge=1, le=1024)
    """Most boxes alive at once."""
    memory_bytes: int = Field(default=256 * 2**20, ge=32 * 2**20)
    """Memory limit of a box; its tmpfs folders count towards it."""
    work_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Size of the writable work folder (a tmpfs)."""
    pids: int = Field(default=64, ge=8)
    """Most processes and threads in a box."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU share of a box, in cores."""
    exec_timeout_s: float = Field(default=10.0, gt=0, le=86400)
    """Default deadline of one command."""
    max_output_bytes: int = Field(default=64 * 1024, ge=1024)
    """Most bytes kept of stdout and of stderr, each; head and tail are kept, the middle is cut."""
    acquire_timeout_s: float = Field(default=120.0, gt=0)
    """How long a trajectory waits for a free box before it ends as an infrastructure outcome."""
