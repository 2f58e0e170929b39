"""`SGLangPolicy`: one or several SGLang servers as a `Policy`.

    generate ──check──> route: the group's home server, ──POST /generate──> answer ──check──> Completion
                        else the next that lives and         │
                        has room, else wait                  ╰─ cancelled: POST /abort_request

Invariants: no id beyond the vocabulary and no row beyond the context is ever sent; never more than `max_in_flight`
requests a server; a request is sent again only where nothing was sampled, and no longer than `retry_s`; a request that
nobody waits for any more is ended on the server. The members of a group share a home, so that their prompt is computed
once.

Waits: a place in flight and a server that comes back (both until the trajectory's deadline cancels the request), an
answer (`request_timeout_s`).

Through an `sglang-router` only generations go. It does not say which worker sampled, so aborts go to every worker, and
back-pressure counts over all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from quintain.agents.completion import Completion, GenerateRequest, RequestKey
from quintain.agents.sglang.answers import (
    EngineBusy,
    EngineError,
    EngineLost,
    check_request,
    generate_body,
    parse_completion,
)
from quintain.agents.sglang.client import ServerInfo, SGLangClient, check_version

_LOG = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between tries; each pause is twice the one before."""
ABORT_TIMEOUT_S = 5.0

Revive = Callable[[SGLangClient], Coroutine[Any, Any, None]]


class _Server:
    """A client and what is in flight to it."""

    def __init__(self, client: SGLangClient) -> None:
        self.client = client
        self.rids: set[str] = set()
        self.recovery: asyncio.Task[None] | None = None
        """Runs while the server is lost; nothing is sent to it meanwhile."""
        self.dead: str | None = None
        """Why it will not come back."""

    @property
    def is_up(self) -> bool:
        return self.dead is None and (self.recovery is None or self.recovery.done())


class SGLangPolicy:
    """Samples on SGLang servers.

    Life cycle: make it, `await start()` (checks the servers), generate from one event loop at a time; `drain` at the
    end of each collection; `set_policy_version` once *every* server has the new weights; `close`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int,
        policy_version: int = 0,
        router: str | None = None,
        max_in_flight: int = 64,
        stream: bool = False,
        request_timeout_s: float = 600.0,
        retry_s: float = 30.0,
        revive: Revive | None = None,
    ) -> None:
        """`revive` is awaited after a server was lost, before anything is sent to it again; it may start the server
        anew and must bring its weights up to date. Raises ValueError without servers."""
        if not urls:
            raise ValueError("SGLangPolicy needs the URL of at least one server")
        self.workers = tuple(SGLangClient(url, timeout_s=request_timeout_s) for url in urls)
        """Every server, for control calls; generations go to a router where there is one."""
        entries = self.workers if router is None else (SGLangClient(router, timeout_s=request_timeout_s),)
        self._servers = [_Server(client) for client in entries]
        self._max_in_flight = max_in_flight * (1 if router is None else len(self.workers))
        self._vocab_size, self._version = vocab_size, policy_version
        self._stream, self._retry_s = stream, retry_s
        self._revive = revive
        self._new_places()
        self._run = uuid.uuid4().hex[:8]
        self._num_sent = 0
        self._aborts: set[asyncio.Task[None]] = set()
        self.max_context_tokens: int | None = None
        """Set by `start`."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that every server has."""
        return self._version

    def set_policy_version(self, version: int) -> None:
        """Say that every server now has the weights of `version`."""
        self._version = version

    async def start(self) -> list[ServerInfo]:
        """Check every server. Raises EngineError for a version known not to work, one that can't sample, or another
        model than the other servers'."""
        infos = [await self._examine(client) for client in self.workers]
        self.max_context_tokens = min(info.max_context_tokens for info in infos)
        return infos

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises PolicyError where the request does not fit (never sent) or the server failed; on cancellation the server
        is told to end it.
        """
        async with self._starting:  # whoever comes first checks the servers; the others wait
            if self.max_context_tokens is None:
                await self.start()
        most = self.max_context_tokens or 0
        check_request(request, vocab_size=self._vocab_size, max_context_tokens=most)
        give_up, pause_s = time.monotonic() + self._retry_s, FIRST_PAUSE_S
        while True:
            try:
                async with self._places:
                    return await self._ask(request)
            except EngineBusy as error:
                if time.monotonic() + pause_s > give_up:
                    raise
                _LOG.info("%s: %s; trying again in %.1f s", request.key, error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Nothing to hold: servers batch whatever is there."""
        yield

    async def drain(self) -> None:
        """End what is still in flight, wait until the servers were told, and close the connections.

        A server that is being started again is waited for: the weights must not change under its start.
        """
        for server in self._servers:
            for rid in server.rids:
                self._abort(server, rid)
        recoveries = {server.recovery for server in self._servers if server.recovery is not None}
        while waiting := {task for task in self._aborts | recoveries if not task.done()}:
            await asyncio.wait(waiting)
        for client in {*self.workers, *(server.client for server in self._servers)}:
            await client.close()
        self._new_places()  # the next collection may run in another event loop

    async def close(self) -> None:
        """Close the connections. The servers are not ours to stop."""
        await self.drain()

    def next_rid(self, key: RequestKey) -> str:
        """A request id: says where in the run it belongs, is used once, and is the start of no other (it ends in its
        only full stop; a server aborts all ids that *start* with the given one)."""
        self._num_sent += 1
        return f"{self._run}-d{key.draw}-m{key.member}-a{key.attempt}-t{key.turn}-{self._num_sent}."

    def _new_places(self) -> None:
        self._places = asyncio.Semaphore(self._max_in_flight * len(self._servers))
        self._freed = asyncio.Event()
        self._starting = asyncio.Lock()

    async def _ask(self, request: GenerateRequest) -> Completion:
        server = await self._choose(request.key)
        rid = self.next_rid(request.key)
        server.rids.add(rid)
        try:
            answer = await server.client.generate(generate_body(request, rid, stream=self._stream))
        except asyncio.CancelledError:
            self._abort(server, rid)
            raise
        except EngineLost:
            self._abort(server, rid)  # where it lives still, what it samples is for nobody
            self._lost(server)
            raise
        except EngineBusy:
            self._lost(server)
            raise
        finally:
            server.rids.discard(rid)
            self._freed.set()
        return parse_completion(answer, request, rid, vocab_size=self._vocab_size)

    async def _choose(self, key: RequestKey) -> _Server:
        """The group's home, else the next server that is up and has room. Raises EngineError where none will be."""
        home = key.draw % len(self._servers)
        order = [*self._servers[home:], *self._servers[:home]]
        while True:
            for server in order:
                if server.is_up and len(server.rids) < self._max_in_flight:
                    return server
            if all(server.dead for server in order):
                raise EngineError(f"no server is left: {order[0].dead}")
            self._freed.clear()
            await self._freed.wait()

    def _lost(self, server: _Server) -> None:
        """Send it nothing until it answers again."""
        if server.is_up:
            recovery = asyncio.get_running_loop().create_task(
                self._recover(server), name=f"recover {server.client.url}"
            )
            server.recovery = recovery

    async def _recover(self, server: _Server) -> None:
        try:
            if self._revive is not None and not await server.client.healthy():
                await self._revive(server.client)
            give_up = time.monotonic() + self._retry_s
            while not await server.client.healthy() and time.monotonic() < give_up:
                await asyncio.sleep(FIRST_PAUSE_S)
        except EngineError as error:
            server.dead = str(error)
            _LOG.error("%s is lost for good: %s", server.client.url, error)
        finally:
            # Who waits looks at the task's end, which comes one tick after this.
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, self._freed.set)

    def _abort(self, server: _Server, rid: str) -> None:
        """Tell the server in the background, so that cancellation is not held up; `drain` waits for it."""
        clients = self.workers if server.client not in self.workers else (server.client,)
        for client in clients:
            task = asyncio.get_running_loop().create_task(_quiet_abort(client, rid), name=f"abort {rid}")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _examine(self, client: SGLangClient) -> ServerInfo:
        info = await client.info()
        notice = check_version(info.version)
        if notice:
            _LOG.warning("%s: %s", client.url, notice)
        if self._stream and info.incremental_stream:
            raise EngineError(
                f"{client.url}: started with --incremental-streaming-output, which is not read here; set "
                "engine.stream=false"
            )
        if not await client.ready():
            raise EngineError(f"{client.url}: answers, but could not generate one token; see its log")
        return info


async def _quiet_abort(client: SGLangClient, rid: str) -> None:
    """A server that can't be told is gone, and the request with it."""
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await client.abort(rid)
    except (EngineError, TimeoutError) as error:
        _LOG.debug("abort of %s: %s", rid, error)
