"""One Docker engine: finding it, calling it, and removing what dead owners left on it.

SDK calls block, so they run in a few threads of the engine's own, each with its own SDK client (a client is not
promised to be thread-safe). What the SDK raises (docker's, requests' and urllib3's exceptions) leaves here as
SandboxError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import docker
import docker.errors
import requests
import urllib3.exceptions

from quintain.sandbox.background import BlockingCalls
from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.docker.owner import PID, owner_is_dead

T = TypeVar("T")
PING_TIMEOUT_S = 1
CALL_TIMEOUT_S = 60
IMAGE_TIMEOUT_S = 600
NUM_THREADS = 4
log = logging.getLogger("quintain.sandbox")


class EngineMissing(SandboxUnavailable):
    """No Docker engine answers."""


class EngineError(SandboxError):
    """The engine refused or failed a call."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the engine's answer; None where there was no answer."""


@contextlib.contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Turn what the SDK raises while doing `what` into EngineError."""
    try:
        yield
    except docker.errors.APIError as error:
        text = error.explanation or str(error)
        raise EngineError(f"the Docker engine could not {what}: {text}", error.status_code) from error
    except (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise EngineError(f"the Docker engine did not answer when asked to {what}: {error}", None) from error


class Engine:
    """A reachable engine. `connect`, then calls; `close` at the end."""

    def __init__(self, url: str, api_version: str) -> None:
        self.url = url
        self.api_version = api_version
        self._clients = threading.local()
        self._calls = BlockingCalls(NUM_THREADS, name="quintain-docker")

    @classmethod
    def connect(cls) -> Engine:
        """The engine of DOCKER_HOST or of the usual sockets, asked once.

        Raises EngineMissing within 2 s where none answers, SandboxUnavailable for a kind of address not supported.
        """
        url = engine_url()
        if not url.startswith(("unix://", "tcp://", "http://")) or os.environ.get("DOCKER_TLS_VERIFY"):
            raise SandboxUnavailable(
                f"DOCKER_HOST={url}: quintain reaches engines over unix:// and plain tcp:// only; forward the engine's "
                "socket (ssh -L /tmp/docker.sock:/var/run/docker.sock HOST) and point DOCKER_HOST at it"
            )
        answer: list[str | Exception] = []

        def ask() -> None:
            try:
                with engine_errors("tell its version"):
                    answer.append(docker.APIClient(url, version="auto", timeout=PING_TIMEOUT_S).api_version)
            except SandboxError as error:
                answer.append(error)

        # In a thread of its own: resolving a host name has no deadline.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PING_TIMEOUT_S + 0.5)
        if not answer or isinstance(answer[0], Exception):
            reason = str(answer[0]) if answer else f"no answer in {PING_TIMEOUT_S} s"
            raise EngineMissing(f"no Docker engine answers at {url} ({reason})")
        return cls(url, answer[0])

    def client(self) -> docker.APIClient:
        """This thread's SDK client."""
        if not hasattr(self._clients, "client"):
            self._clients.client = docker.APIClient(self.url, version=self.api_version, timeout=CALL_TIMEOUT_S)
        return self._clients.client

    def image_client(self) -> docker.APIClient:
        """A client patient enough for building and pulling images."""
        return docker.APIClient(self.url, version=self.api_version, timeout=IMAGE_TIMEOUT_S)

    async def call(self, what: str, function: Callable[[docker.APIClient], T]) -> T:
        """Run a blocking SDK call in one of the engine's threads. Raises EngineError."""

        def job() -> T:
            with engine_errors(what):
                return function(self.client())

        return await self._calls.call(job)

    def remove(self, container: str) -> None:
        """Kill and remove a container; one that is gone, or going, is fine. Raises EngineError."""
        try:
            with engine_errors(f"remove container {container}"):
                self.client().remove_container(container, force=True, v=True)
        except EngineError as error:
            if error.status not in (404, 409):
                raise

    def remove_leftovers(self) -> int:
        """Remove the boxes whose owner is a dead process of this machine; how many there were. Raises EngineError."""
        with engine_errors("list containers"):
            found = self.client().containers(all=True, filters={"label": PID})
        dead = [container["Id"] for container in found if owner_is_dead(container.get("Labels") or {})]
        for container in dead:
            try:
                self.remove(container)
            except EngineError as error:
                log.warning("a box that an earlier run left could not be removed: %s", error)
        return len(dead)

    def close(self) -> None:
        """Let the engine's threads end."""
        self._calls.close()


def engine_url() -> str:
    """DOCKER_HOST, else the first usual socket that exists, else the default one."""
    given = os.environ.get("DOCKER_HOST")
    if given:
        return given
    usual = "/var/run/docker.sock"
    own = os.path.join(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "docker.sock")
    return f"unix://{own}" if os.path.exists(own) and not os.path.exists(usual) else f"unix://{usual}"
