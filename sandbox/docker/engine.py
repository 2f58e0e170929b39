"""One Docker engine: finding it and calling it.

SDK calls block, so they run in a few threads of the engine's own, each with its own SDK client (a client is not
promised to be thread-safe). What the SDK raises (docker's, requests' and urllib3's exceptions) leaves here as
SandboxError.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import docker
import docker.errors
import requests
import urllib3.exceptions

from quintain.sandbox.background import BlockingCalls
from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.docker.address import Address, default_address

T = TypeVar("T")
OLDEST_API = "1.40"
PING_TIMEOUT_S = 1
CALL_TIMEOUT_S = 60
IMAGE_TIMEOUT_S = 600
NUM_THREADS = 4


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

    def __init__(self, address: Address, api_version: str, *, num_threads: int = NUM_THREADS) -> None:
        self.address = address
        self.url = address.url
        self.api_version = api_version
        self._clients = threading.local()
        self._calls = BlockingCalls(num_threads, name="quintain-docker")

    @classmethod
    def connect(cls, address: Address | None = None, *, num_threads: int = NUM_THREADS) -> Engine:
        """The engine at `address` (default: of DOCKER_HOST or of the usual sockets), asked once.

        Raises EngineMissing within 2 s (ssh: 20 s) where none answers, SandboxUnavailable for an address of a kind that
        is not supported.
        """
        address = address or default_address()
        answer: list[str | Exception] = []

        def ask() -> None:
            try:
                with engine_errors("tell its version"):
                    client = address.client(timeout_s=PING_TIMEOUT_S, version=OLDEST_API)
                    answer.append(client.version(api_version=False)["ApiVersion"])
            except SandboxError as error:
                answer.append(error)

        try:
            address.open()
        except SandboxUnavailable as error:
            raise EngineMissing(str(error)) from error
        # In a thread of its own: resolving a host name has no deadline.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PING_TIMEOUT_S + 0.5)
        if not answer or isinstance(answer[0], Exception):
            address.close()
            reason = str(answer[0]) if answer else f"no answer in {PING_TIMEOUT_S} s"
            raise EngineMissing(f"no Docker engine answers at {address.given} ({reason})")
        return cls(address, answer[0], num_threads=num_threads)

    def client(self) -> docker.APIClient:
        """This thread's SDK client."""
        if not hasattr(self._clients, "client"):
            with engine_errors("take a connection"):
                self._clients.client = self.address.client(timeout_s=CALL_TIMEOUT_S, version=self.api_version)
        return self._clients.client

    def image_client(self) -> docker.APIClient:
        """A client patient enough for building and pulling images."""
        return self.address.client(timeout_s=IMAGE_TIMEOUT_S, version=self.api_version)

    async def call(self, what: str, function: Callable[[docker.APIClient], T]) -> T:
        """Run a blocking SDK call in one of the engine's threads. Raises EngineError."""

        def job() -> T:
            try:
                self.address.reopen()
            except SandboxUnavailable as error:
                raise EngineError(f"the Docker engine can't be asked to {what}: {error}", None) from error
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

    def close(self) -> None:
        """Let the engine's threads end, and the way to it. Idempotent."""
        self._calls.close()
        self.address.close()
