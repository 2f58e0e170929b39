"""DockerSandbox: a container that holds nothing but quintain's agent (PID 1) and what a trajectory runs.

    create -> attach -> start -> ping -> exec … reset … exec -> stop

The engine gives it no network, no capability, no new privileges, a read-only root and limits on memory, processes and
CPU; its user is not root; all it can write to are three tmpfs folders. When its owner dies in whatever way, the attach
stream ends, the agent exits and the engine removes the container.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

import docker
from docker.types import Ulimit

from quintain.sandbox.agent_sandbox import AgentSandbox, agent_command
from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.channel import Channel
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.attach import Attachment, attach
from quintain.sandbox.docker.engine import Engine, EngineError
from quintain.sandbox.docker.owner import RUN

WORK = "/work"
UID = 1000
START_TIMEOUT_S = 30.0
MAX_FILES_PER_FOLDER = 16384
OPTIONS = {
    "private": True,
    "work": WORK,
    "folders": [WORK, "/tmp", "/dev/shm"],
    "env": {},
}


class DockerSandbox(AgentSandbox):
    """One container. Example: ``DockerSandbox(config, engine=engine, image="python:3.12-slim", labels={})``"""

    kind = "docker"

    def __init__(self, config: SandboxConfig, *, engine: Engine, image: str, labels: Mapping[str, str]) -> None:
        super().__init__(config)
        self._engine = engine
        self._image = image
        self._labels = dict(labels)
        run = re.sub(r"[^a-zA-Z0-9_.-]+", "-", self._labels.get(RUN, ""))[-40:].strip("-.") or "box"
        self.id = f"quintain-{run}-{secrets.token_hex(6)}"
        self._created = False
        self._attachment: Attachment | None = None

    async def start(self) -> None:
        """Create the container and wait until its agent answers.

        Raises SandboxUnavailable (this image can't be a box), SandboxError (the engine failed; trying again may help).
        """
        self._created = True  # before the call: one that fails may have made it all the same
        try:
            await self._engine.call(f"create a box from {self._image}", self._create)
            attachment = self._attachment = await attach(self._engine.url, self._engine.api_version, self.id)
            await self._engine.call("start a box", lambda client: client.start(self.id))
        except EngineError as error:
            raise self._explained(error) from error
        self._channel = Channel(attachment.reader, attachment.write, box=self.id, last_words=attachment.last_words)
        await self._request({"op": "ping"}, timeout_s=START_TIMEOUT_S)

    async def stop(self) -> None:
        """Kill and remove the container. Idempotent. Raises SandboxError where the engine fails to."""
        if self._channel is not None:
            self._channel.broken = self._channel.broken or "it was stopped"
        if self._attachment is not None:
            self._attachment.close()
        if self._created:
            await self._engine.call(f"remove box {self.id}", lambda _: self._engine.remove(self.id))
            self._created = False

    def _create(self, client: docker.APIClient) -> None:
        command = agent_command("python3", json.dumps(OPTIONS))
        client.create_container(
            self._image,
            entrypoint=command[:1],
            command=command[1:],
            name=self.id,
            labels=self._labels,
            user=f"{UID}:{UID}",
            working_dir="/",
            environment={"HOME": WORK, "LANG": "C.UTF-8"},
            hostname="box",
            stdin_open=True,
            healthcheck={"test": ["NONE"]},  # an image's own check would start processes in the box
            use_config_proxy=False,  # else the user's proxy settings, with passwords, become its environment
            host_config=client.create_host_config(**host_options(self.config)),
        )

    def _explained(self, error: EngineError) -> SandboxError:
        text = str(error)
        if error.status == 404 and "image" in text.lower():
            return SandboxUnavailable(f"{text}. Build or pull the image {self._image}, or unset sandbox.image.")
        if "executable file not found" in text or "no such file or directory" in text:
            return SandboxUnavailable(f"image {self._image} has no python3, which every box needs; add it. ({text})")
        return error


def host_options(config: SandboxConfig) -> dict[str, Any]:
    """What a box may use; keyword arguments of the SDK's host config."""

    def tmpfs(size_bytes: int, owner: str) -> str:
        return f"rw,exec,nosuid,nodev,size={size_bytes},nr_inodes={MAX_FILES_PER_FOLDER},{owner}"

    return {
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": {
            WORK: tmpfs(config.work_bytes, f"mode=0755,uid={UID},gid={UID}"),
            "/tmp": tmpfs(max(config.work_bytes // 2, 2**20), "mode=1777"),
        },
        "shm_size": max(config.work_bytes // 4, 2**20),
        "ipc_mode": "private",
        "pids_limit": config.pids,
        "mem_limit": config.memory_bytes,
        "memswap_limit": config.memory_bytes,
        "nano_cpus": int(config.cpus * 1e9),
        "ulimits": [Ulimit(name="core", soft=0, hard=0), Ulimit(name="nofile", soft=4096, hard=4096)],
        "log_config": {"Type": "none", "Config": {}},  # the agent's answers would fill the engine's disk
        "init": False,  # the agent must be PID 1 itself, whatever the daemon's default
        "auto_remove": True,
    }
