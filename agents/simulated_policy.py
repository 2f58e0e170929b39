"""`SimulatedPolicy`: an engine without a model. It answers after the time that a stated latency model says.

    generate ──> queue (first come, first served) ──> one of `max_running` places ──sleep──> Completion, or PolicyError
                                                            ^ `set_policy_version` may come meanwhile

For the logic of schedulers, for their overhead with many trajectories in flight, for simulations of asynchronous
training. Invariants: what it answers to a request and how long that takes follow from its seed and the request's, never
from what else is in flight (`plan`); what waits for a place is not part of that time; a reply ends at
`max_new_tokens`; each token carries the version that was current when its turn to be decoded came.

It samples nothing (log-probs are made up), has no prefix cache, and requests do not slow each other down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from quintain.agents.completion import Completion, FinishReason, GenerateRequest, VersionSpan
from quintain.agents.policy import PolicyError
from quintain.agents.renderer import ChatRenderer
from quintain.agents.seeds import derive_seed

LOGPROB = -1.0

TokenSource = Callable[[GenerateRequest, Random], tuple[int, ...]]
"""The ids of a reply, its end of turn included. The stream is the request's own: equal seeds, equal replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long a request takes once it has a place.

    `(request_s + prompt tokens * prefill_token_s + new tokens * decode_token_s) * factor`, with the factor drawn
    evenly from `1 - jitter_frac` to `1 + jitter_frac`. Example: ``Latency(prefill_token_s=1e-5, decode_token_s=0.02)``
    """

    request_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0
    jitter_frac: float = 0.0
    """0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """What a request gets, and when.

    Example: ``PlannedAnswer(token_ids=(40, 41, 3), finish_reason="stop", decode_from_s=0.1, latency_s=0.4,
    fails=False)``
    """

    token_ids: tuple[int, ...]  # [T]
    finish_reason: FinishReason
    decode_from_s: float
    """Seconds from getting a place to the start of decoding."""
    latency_s: float
    """Seconds from getting a place to the answer."""
    fails: bool
    """It ends in a PolicyError after that time."""


def random_tokens(vocab_size: int, *, num_tokens: tuple[int, int], stop_token_id: int) -> TokenSource:
    """Replies of `num_tokens[0]` to `num_tokens[1]` ids below `vocab_size`, the last being the stop token."""

    def draw(request: GenerateRequest, random: Random) -> tuple[int, ...]:
        ids = random.choices(range(vocab_size), k=random.randint(*num_tokens) - 1)
        return (*(i if i != stop_token_id else (i + 1) % vocab_size for i in ids), stop_token_id)

    return draw


def scripted_tokens(texts: Sequence[str], *, renderer: ChatRenderer) -> TokenSource:
    """Turn `n` is answered with `texts[n]`, the last one from then on."""
    replies = [renderer.encode_reply(text) for text in texts]
    return lambda request, random: replies[min(request.key.turn, len(replies) - 1)]


class SimulatedPolicy:
    """Answers with what `source` gives. Use from one event loop at a time; nothing needs closing.

    Example: ``SimulatedPolicy(scripted_tokens(["done"], renderer=chat), latency=Latency(decode_token_s=0.02))``
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        latency: Latency | None = None,
        max_running: int = 256,
        max_queued: int | None = None,
        failure_frac: float = 0.0,
        seed: int = 0,
        policy_version: int = 0,
        context_tokens: int | None = None,
    ) -> None:
        """`max_queued`: requests that may wait for a place; more are refused (None = any number). `failure_frac`: share
        of the requests that end in a PolicyError."""
        self._source, self._latency = source, latency or Latency()
        self._max_running, self._max_queued = max_running, max_queued
        self._failure_frac, self._seed = failure_frac, seed
        self._versions: list[tuple[float, int]] = []
        """(time, version) of the updates that some running request may still need."""
        self._version = policy_version
        self.max_context_tokens: int | None = context_tokens
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.num_running = 0
        """Requests that have a place now."""
        self.max_running_seen = 0
        self.num_answered = 0
        self.num_failed = 0
        """Requests that ended in a PolicyError."""
        self.num_aborted = 0
        """Requests whose caller was cancelled while they waited or ran."""

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place now."""
        return len(self._waiting)

    def set_policy_version(self, version: int) -> None:
        """New weights. What is being decoded goes on with them, from the next token."""
        if self.num_running:
            self._versions.append((asyncio.get_running_loop().time(), version))
        self._version = version

    def plan(self, request: GenerateRequest) -> PlannedAnswer:
        """What this request is answered with, and how long that takes once it has a place."""
        random, latency = Random(derive_seed(self._seed, request.seed)), self._latency
        max_new_tokens = request.sampling.max_new_tokens
        factor = 1.0 + latency.jitter_frac * (2.0 * random.random() - 1.0)
        fails = random.random() < self._failure_frac
        ids = self._source(request, random)
        cut = len(ids) > max_new_tokens
        ids = ids[:max_new_tokens]
        decode_from_s = factor * (latency.request_s + len(request.prompt_ids) * latency.prefill_token_s)
        return PlannedAnswer(
            token_ids=ids,
            finish_reason="length" if cut else "stop",
            decode_from_s=decode_from_s,
            latency_s=decode_from_s + factor * len(ids) * latency.decode_token_s,
            fails=fails,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """The planned answer. Raises PolicyError where the request does not fit, is refused, or was planned to fail."""
        asked = len(request.prompt_ids) + request.sampling.max_new_tokens
        if self.max_context_tokens is not None and asked > self.max_context_tokens:
            raise PolicyError(f"{asked} tokens asked for, but the context holds {self.max_context_tokens}")
        planned = self.plan(request)
        try:
            await self._take_place()
            try:
                started, version = asyncio.get_running_loop().time(), self._version
                await asyncio.sleep(planned.latency_s)
                spans = self._spans(planned, started, version)
            finally:
                self._leave_place()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        if planned.fails:
            self.num_failed += 1
            raise PolicyError(f"{request.key}: the simulated engine failed, as {self._failure_frac} of its requests do")
        self.num_answered += 1
        return Completion(
            token_ids=planned.token_ids,
            logprobs=(LOGPROB,) * len(planned.token_ids),
            finish_reason=planned.finish_reason,
            version_spans=spans,
        )

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Nothing to hold: whatever is there is answered."""
        yield

    async def drain(self) -> None:
        """Whoever still waits for a place gets a PolicyError; what runs ends with its caller."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(PolicyError("the simulated engine was drained before it had a place"))

    async def close(self) -> None:
        await self.drain()

    async def _take_place(self) -> None:
        if self.num_running < self._max_running:
            self._count_in()
            return
        if self._max_queued is not None and len(self._waiting) >= self._max_queued:
            self.num_failed += 1
            raise PolicyError(f"the simulated engine runs {self.num_running} requests and {self._max_queued} wait")
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = None
        try:
            await place
        except asyncio.CancelledError:
            self._waiting.pop(place, None)
            if not place.cancelled() and place.exception() is None:
                self._leave_place()  # it was given one just now, and nobody takes it
            raise

    def _count_in(self) -> None:
        self.num_running += 1
        self.max_running_seen = max(self.max_running_seen, self.num_running)

    def _leave_place(self) -> None:
        self.num_running -= 1
        while self._waiting and self.num_running < self._max_running:
            place = next(iter(self._waiting))
            del self._waiting[place]
            if not place.done():
                self._count_in()
                place.set_result(None)
        if not self.num_running:
            self._versions.clear()

    def _spans(self, planned: PlannedAnswer, started: float, version: int) -> tuple[VersionSpan, ...]:
        """Token `t` is decoded at the end of the `t`-th of equal parts of the decoding time."""
        count, edge, spans = len(planned.token_ids), 0, []
        first, decode_s = started + planned.decode_from_s, planned.latency_s - planned.decode_from_s
        for at, newer in self._versions:
            if at < started:
                continue
            share = 0.0 if at <= first else (at - first) / decode_s if decode_s > 0 else 1.0
            end = min(count, int(share * count))
            if end > edge:
                spans.append(VersionSpan(start=edge, end=end, policy_version=version))
                edge = end
            version = newer
        if count > edge:
            spans.append(VersionSpan(start=edge, end=count, policy_version=version))
        return tuple(spans)
