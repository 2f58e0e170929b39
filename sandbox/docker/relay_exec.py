"""The relay of one box: started by the engine's exec, over whose own streams the frames go; so no engine needs more.

    exec of a command -> is the relay there and answering? -> else hang up, start another one

A job may kill it, or stop it, or take its port: what it can spoil is its own way out until the box is reset.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging

import docker

from quintain.sandbox import relay
from quintain.sandbox.allow_list import AllowList
from quintain.sandbox.docker.attach import STDOUT, Attachment, upgrade
from quintain.sandbox.docker.engine import Engine
from quintain.sandbox.network_log import NetworkLog
from quintain.sandbox.proxy import Proxy
from quintain.sandbox.relay_link import RelayLink

START_TIMEOUT_S = 10.0
PONG_TIMEOUT_S = 2.0
MAX_QUEUED_BYTES = 2 * relay.MAX_STREAMS * relay.WINDOW_BYTES
log = logging.getLogger("quintain.sandbox")


class RelayAttachment(Attachment):
    """An exec whose stdout is frames."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self.link = RelayLink(self._queue, proxy.begin, self.close)

    def _queue(self, data: bytes) -> None:
        self.write(data)
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            self.link.drop("it does not take what is sent to it")

    def deliver(self, stream: int, payload: bytes) -> None:
        """Take a piece of output."""
        if stream == STDOUT:
            self.link.feed(payload)
        else:
            super().deliver(stream, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.link.drop("it ended")


class BoxRelay:
    """`ensure` before each command, `close` before a reset and at the end."""

    def __init__(self, engine: Engine, container: str, allowed: AllowList, network_log: NetworkLog) -> None:
        self._engine, self._container = engine, container
        self._allowed, self._log = allowed, network_log
        self._lock = asyncio.Lock()
        self._attachment: RelayAttachment | None = None
        self._proxy: Proxy | None = None

    async def ensure(self) -> None:
        """Start the relay where none answers. Raises SandboxError where the engine fails to."""
        async with self._lock:
            if self._attachment is not None and await self._attachment.link.answers(PONG_TIMEOUT_S):
                return
            self.close()
            await self._start()

    async def _start(self) -> None:
        argv = ["python3", "-I", "-S", "-B", "-c", inspect.getsource(relay) + "\nmain()\n"]

        def create(client: docker.APIClient) -> str:
            return client.exec_create(self._container, argv, stdin=True, workdir="/")["Id"]

        exec_id = await self._engine.call("prepare the relay of a box", create)
        self._proxy = Proxy(self._allowed, self._log)
        attachment = self._attachment = RelayAttachment(self._proxy)
        path = f"/v{self._engine.api_version}/exec/{exec_id}/start"
        body = json.dumps({"Detach": False, "Tty": False}).encode()
        tls = self._engine.address.ssl_context
        await upgrade(self._engine.url, path, attachment, what="start the relay of a box", body=body, tls=tls)
        try:
            ready = await asyncio.wait_for(asyncio.shield(attachment.link.ready), START_TIMEOUT_S)
        except TimeoutError:
            ready = False
        if not ready:
            said = attachment.last_words().strip()[-300:]
            log.warning("box %s has no way out: its relay did not start %s", self._container, said)
            self.close()

    def close(self) -> None:
        """Hang up: the relay ends with its stdin. Idempotent."""
        if self._attachment is not None:
            self._attachment.link.drop("the box was reset or stopped")
        if self._proxy is not None:
            self._proxy.close()
        self._attachment = self._proxy = None
