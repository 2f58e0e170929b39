"""DockerSandbox: a container that holds nothing but quintain's agent (PID 1) and what a trajectory runs.

    create -> attach -> start -> ping -> exec … reset … exec -> stop

The engine gives it no network, no capability, no new privileges, a read-only root and limits on memory, processes, CPU
and open files; its user is not root; all it can write to are three tmpfs folders. When its owner dies in whatever way,
the attach stream ends, or the lease runs out: the agent exits and the engine removes the container. A start that is
cancelled removes what it made before the cancellation goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import docker
from docker.types import Ulimit

from quintain.sandbox import relay
from quintain.sandbox.agent_sandbox import AgentSandbox, agent_command
from quintain.sandbox.base import SandboxDied, SandboxError, SandboxUnavailable
from quintain.sandbox.channel import Channel
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.attach import Attachment, attach
from quintain.sandbox.docker.engine import Engine, EngineError
from quintain.sandbox.docker.owner import RUN

WORK = "/work"
UID = 1000
START_TIMEOUT_S = 30.0
REATTACH_PAUSES_S = (0.0, 0.1, 0.3, 0.6)
MAX_FILES_PER_FOLDER = 16384
OPTIONS = {
    "private": True,
    "work": WORK,
    "folders": [WORK, "/tmp", "/dev/shm"],
    "env": {},
}


class ProgramMissing(SandboxUnavailable):
    """The image has no program that could be PID 1."""


class BoxWatcher(Protocol):
    """Whoever keeps count of boxes and of what their engine does."""

    async def box_started(self, box: DockerSandbox) -> None:
        """It answers. What this raises (SandboxError) makes the start fail."""
        ...

    def box_failed(self, error: SandboxError) -> None:
        """It did not start."""
        ...

    def box_gone(self, box: DockerSandbox) -> None:
        """It is being removed."""
        ...


class DockerSandbox(AgentSandbox):
    """One container. Example: ``DockerSandbox(config, engine=engine, image="python:3.12-slim", labels={})``"""

    kind = "docker"
    python_missing = False
    """The image has no python3, so that PID 1 is a shell (see `exec_box`)."""

    def __init__(
        self,
        config: SandboxConfig,
        *,
        engine: Engine,
        image: str,
        labels: Mapping[str, str],
        network: str | None = None,
        watcher: BoxWatcher | None = None,
    ) -> None:
        super().__init__(config)
        self._network = network
        self._watcher = watcher
        self._creation: asyncio.Future[None] | None = None
        self._removal: asyncio.Future[None] | None = None
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
        try:
            await self._start()
        except SandboxError as error:
            if self._watcher is not None:
                self._watcher.box_failed(error)
            raise
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._stop_quietly()))
            raise

    async def _start(self) -> None:
        self._created = True  # before the call: one that fails may have made it all the same
        try:
            # A cancelled wait does not end the call in its thread: `stop` has to wait for that.
            self._creation = asyncio.ensure_future(self._engine.call(f"create a box from {self._image}", self._create))
            await asyncio.shield(self._creation)
            engine = self._engine
            tls = engine.address.ssl_context
            attachment = self._attachment = await attach(
                engine.url, engine.api_version, self.id, tls=tls, with_output=not self.python_missing
            )
            await self._engine.call("start a box", lambda client: client.start(self.id))
        except EngineError as error:
            raise self._explained(error) from error
        self._channel = self._channel_over(attachment)
        await self._request({"op": "ping"}, timeout_s=START_TIMEOUT_S)
        if self._watcher is not None:
            await self._watcher.box_started(self)

    def _channel_over(self, attachment: Attachment) -> Channel:
        return Channel(
            attachment.reader,
            attachment.write,
            box=self.id,
            last_words=attachment.last_words,
            reopen=self._attach_again,
        )

    async def _attach_again(self) -> Attachment | None:
        """Another stream to a box that outlived its first one; None where it did not."""
        # A stream forwarded by ssh ends a moment before ssh itself, which only then is started anew.
        for pause_s in REATTACH_PAUSES_S if self._engine.address.given.startswith("ssh://") else (0.0,):
            await asyncio.sleep(pause_s)
            if not self._created or self._attachment is None or self._removal is not None:
                return None  # attaching to a container on its way out waits for nothing
            self._attachment.close()
            with contextlib.suppress(SandboxError):
                return await self._attach_if_running()
        return None

    async def _attach_if_running(self) -> Attachment | None:
        engine = self._engine
        try:
            state = await engine.call("look at a box", lambda client: client.inspect_container(self.id)["State"])
        except EngineError as error:
            if error.status == 404:
                return None
            raise
        if state["Running"]:
            self._attachment = await attach(engine.url, engine.api_version, self.id, tls=engine.address.ssl_context)
            return self._attachment
        return None

    def _first_process(self) -> list[str]:
        """What PID 1 is."""
        return agent_command("python3", json.dumps({**OPTIONS, "lease_s": self.config.lease_s}))

    @property
    def reusable(self) -> bool:
        """Whether `reset` can prove that the box is clean."""
        return self.config.profile == "hardened"

    async def reset(self) -> None:
        """As `Sandbox.reset`. The root of a relaxed box is writable, so it never counts as clean."""
        if self.config.profile == "relaxed" and self._channel is not None:
            self._channel.broken = "a relaxed box is not used twice"
            raise SandboxDied(f"box {self.id} is not used again: its root is writable, so it can't be proved clean")
        await super().reset()

    async def stop(self) -> None:
        """Kill and remove the container; a cancelled wait does not stop the removal. Idempotent.

        Raises SandboxError where the engine fails to.
        """
        if self._channel is not None:
            self._channel.broken = self._channel.broken or "it was stopped"
        if self._attachment is not None:
            self._attachment.close()
        if self._watcher is not None:
            self._watcher.box_gone(self)
        if self._created:
            self._removal = asyncio.ensure_future(self._remove())
            await asyncio.shield(self._removal)

    async def _remove(self) -> None:
        if self._creation is not None:
            await asyncio.wait([self._creation])
        await self._engine.call(f"remove box {self.id}", lambda _: self._engine.remove(self.id))
        self._created = False

    async def _stop_quietly(self) -> None:
        with contextlib.suppress(SandboxError):
            await self.stop()

    def _create(self, client: docker.APIClient) -> None:
        command = self._first_process()
        client.create_container(
            self._image,
            entrypoint=command[:1],
            command=command[1:],
            name=self.id,
            labels=self._labels,
            user=user(self.config),
            working_dir="/",
            environment={"HOME": WORK, "LANG": "C.UTF-8", **proxy_variables(self.config)},
            hostname="box",
            stdin_open=True,
            # Detached: its stdin stays open when the stream breaks. On this machine a stream only breaks because an end
            # of it is gone, and then the box shall go at once; over a network it may be opened anew, and the lease ends
            # the box of a dead owner.
            detach=not self._engine.address.given.startswith("unix://") and not self.python_missing,
            healthcheck={"test": ["NONE"]},  # an image's own check would start processes in the box
            use_config_proxy=False,  # else the user's proxy settings, with passwords, become its environment
            host_config=client.create_host_config(**host_options(self.config, network=self._network)),
        )

    def _explained(self, error: EngineError) -> SandboxError:
        text = str(error)
        if error.status == 404 and "image" in text.lower():
            return SandboxUnavailable(f"{text}. Build or pull the image {self._image}, or unset sandbox.image.")
        if "executable file not found" in text or "no such file or directory" in text:
            what = "no python3 and no /bin/sh" if self.python_missing else "no python3"
            return ProgramMissing(f"image {self._image} has {what}, one of which every box needs; add it. ({text})")
        return error


def user(config: SandboxConfig) -> str:
    """The user and group that everything in a box runs as."""
    return "0:0" if config.profile == "relaxed" else f"{UID}:{UID}"


def proxy_variables(config: SandboxConfig) -> dict[str, str]:
    """What tells the box's programs of the relay; empty where there is none."""
    if config.network != "proxy":
        return {}
    url = f"http://{relay.HOST}:{relay.PORT}"
    return dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), url) | {
        "NO_PROXY": "",
        "no_proxy": "",
    }


def folder_sizes(config: SandboxConfig) -> dict[str, int]:
    """The only folders that a hardened box can write to -> their size in bytes."""
    return {
        WORK: config.work_bytes,
        "/tmp": max(config.work_bytes // 2, 2**20),
        "/dev/shm": max(config.work_bytes // 4, 2**20),
    }


def host_options(config: SandboxConfig, *, network: str | None = None) -> dict[str, Any]:
    """What a box may use; keyword arguments of the SDK's host config."""
    sizes = folder_sizes(config)
    hardened = config.profile == "hardened"
    run = "noexec" if config.noexec else "exec"

    def tmpfs(folder: str, owner: str) -> str:
        return f"rw,{run},nosuid,nodev,size={sizes[folder]},nr_inodes={MAX_FILES_PER_FOLDER},{owner}"

    owner = user(config).replace(":", ",gid=")
    files = config.open_files
    options = {
        "network_mode": network or "none",
        "security_opt": ["no-new-privileges:true"],
        "read_only": hardened,
        "tmpfs": {WORK: tmpfs(WORK, f"mode=0755,uid={owner}"), "/tmp": tmpfs("/tmp", "mode=1777")},
        "shm_size": sizes["/dev/shm"],
        "ipc_mode": "private",
        "pids_limit": config.pids,
        "mem_limit": config.memory_bytes,
        "memswap_limit": config.memory_bytes,
        "nano_cpus": int(config.cpus * 1e9),
        "ulimits": [Ulimit(name="core", soft=0, hard=0), Ulimit(name="nofile", soft=files, hard=files)],
        "log_config": {"Type": "none", "Config": {}},  # the agent's answers would fill the engine's disk
        "init": False,  # the agent must be PID 1 itself, whatever the daemon's default
        "auto_remove": True,
    }
    if network is not None:
        # Old engines ask their own name servers even for internal networks, which lets data out in names; a name server
        # of the box's own loopback, where there is none, stops that.
        options["dns"] = ["127.0.0.1"]
    if hardened:
        options["cap_drop"] = ["ALL"]
    if config.runtime is not None:
        options["runtime"] = config.runtime
    return options
