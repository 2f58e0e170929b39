"""Settings of the sandbox layer (pydantic only: `quintain --help` must not import docker)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

HOST_ENTRY = re.compile(r"((\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)
HEADROOM_BYTES = 24 * 2**20
"""Memory that a box keeps beside its full writable folders: the agent and a small command."""


class HostConfig(BaseModel):
    """One Docker engine of several."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """`unix:///path`, `tcp://name:port` (with `tls`: encrypted and both sides known), or `ssh://[user@]name[:port]`."""
    weight: float = Field(default=1.0, gt=0)
    """Boxes go where the number of boxes divided by the weight is smallest."""
    tls: str | None = None
    """Folder with `ca.pem`, `cert.pem` and `key.pem`, as the docker command has them; for tcp only."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("unix://", "tcp://", "ssh://")):
            raise ValueError(f"{url!r} is no address of a Docker engine: use unix://, tcp:// or ssh://")
        return url


class SandboxConfig(BaseModel):
    """Which boxes model-written commands run in, how many there are, and what they may use."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: Literal["auto", "docker", "local"] = "auto"
    """`auto`: Docker where an engine answers, else local *only* for environments with `needs_isolation = False`."""
    image: str | None = None
    """Docker image; None = quintain's own small image, built or pulled at first use. It needs `python3`."""
    hosts: tuple[HostConfig, ...] = ()
    """Docker engines that boxes are spread over; empty = the one of DOCKER_HOST or of the usual socket."""
    runtime: str | None = None
    """Container runtime that the engine knows (`runsc` for gVisor, `crun`); None = the engine's default."""
    profile: Literal["hardened", "relaxed"] = "hardened"
    """`relaxed`: root in the box, a writable root and the engine's usual capabilities; boxes are never used twice."""
    network: Literal["none", "internal", "proxy"] = "none"
    """`internal`: the pool's boxes reach one another, over a network of their own without a way out. `proxy`: what
    `allowed_hosts` names is reached through a proxy in this process, by HTTP_PROXY and HTTPS_PROXY; else as `none`."""
    allowed_hosts: tuple[str, ...] = ()
    """For `network=proxy`: `host` (ports 80 and 443), `host:port`, `*.suffix`, `*.suffix:port`. A private or loopback
    address has to be listed itself (`127.0.0.1:8000`)."""
    pool_size: int = Field(default=8, ge=1, le=1024)
    """Most boxes alive at once."""
    reuse: Literal["never", "group", "reset"] = "reset"
    """Who may get a used box: nobody; the trajectories of one task; anybody, once it is proved to be clean."""
    starts_per_s: float = Field(default=16.0, gt=0)
    """Most boxes started in a second."""
    breaker_failures: int = Field(default=8, ge=1)
    """After this many failed starts in a row nothing is started for `breaker_pause_s`."""
    breaker_pause_s: float = Field(default=10.0, gt=0)
    """How long the breaker waits before one start is tried again; doubled with every further failure, up to 8 times."""
    lease_s: float = Field(default=120.0, ge=1)
    """A box that hears nothing from its owner for this long removes itself."""
    memory_bytes: int = Field(default=256 * 2**20, ge=48 * 2**20)
    """Memory limit of a box; its tmpfs folders count towards it."""
    work_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Size of the writable work folder (a tmpfs)."""
    noexec: bool = False
    """Programs cannot be run from the writable folders."""
    open_files: int = Field(default=4096, ge=64)
    """Most open files of a process."""
    pids: int = Field(default=64, ge=8)
    """Most processes and threads in a box."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU share of a box, in cores."""
    exec_timeout_s: float = Field(default=10.0, gt=0, le=86_400)
    """Default deadline of one command."""
    max_output_bytes: int = Field(default=64 * 1024, ge=1024)
    """Most bytes kept of stdout and of stderr, each; head and tail are kept, the middle is cut."""
    max_spill_bytes: int = Field(default=2 * 2**20, ge=0)
    """Most bytes of a cut stream that are put into a file in the box, from its start; 0 = no such files."""
    acquire_timeout_s: float = Field(default=120.0, gt=0)
    """How long a trajectory waits for a free box before it ends as an infrastructure outcome."""

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            found = HOST_ENTRY.fullmatch(entry)
            if found is None or (found[4] and not 0 < int(found[4][1:]) < 2**16):
                raise ValueError(
                    f"{entry!r} is no host: use host, host:port, *.suffix, *.suffix:port or [IPv6 address]:port, "
                    "without http:// and path"
                )
        return entries

    @model_validator(mode="after")
    def _check_network(self) -> SandboxConfig:
        if self.network == "proxy" and not self.allowed_hosts:
            raise ValueError(
                "network=proxy reaches only what allowed_hosts names, and that is empty: set "
                'allowed_hosts: ["host", …], or network=none'
            )
        if self.allowed_hosts and self.network != "proxy":
            raise ValueError(
                f"allowed_hosts has no effect with network={self.network}: set network=proxy, or remove allowed_hosts"
            )
        if self.network == "proxy" and self.type == "local":
            raise ValueError(
                "network=proxy can't be had with type=local, whose commands have the machine's own network: set "
                "type=docker"
            )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> SandboxConfig:
        folders_bytes = self.work_bytes + self.work_bytes // 2 + self.work_bytes // 4
        if folders_bytes + HEADROOM_BYTES > self.memory_bytes:
            raise ValueError(
                f"memory_bytes ({self.memory_bytes}) is too small for work_bytes ({self.work_bytes}): the writable "
                f"folders (work, a half of it for /tmp, a quarter for /dev/shm) are memory too, and {HEADROOM_BYTES} "
                f"bytes must be left; lower work_bytes to {max(2**20, (self.memory_bytes - HEADROOM_BYTES) * 4 // 7)} "
                "or raise memory_bytes"
            )
        if self.profile == "relaxed" and "reuse" in self.model_fields_set and self.reuse != "never":
            raise ValueError(
                f"reuse={self.reuse} needs profile=hardened: the root of a relaxed box is writable, so it can't be "
                "proved clean; set reuse=never"
            )
        return self
