"""A policy that answers from a script: the fake that tests and environment authors use instead of a model.

It keeps an engine's promises: a reply is cut at `max_new_tokens` (finish reason `length`), ends at a stop token, and a
request that does not fit the context is refused. It samples nothing, and greedy or not makes no difference to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from quintain.agents.completion import Completion, FinishReason, GenerateRequest, VersionSpan
from quintain.agents.policy import PolicyError
from quintain.agents.renderer import ChatRenderer

DEFAULT_LOGPROB = -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """One answer. Give `text` or `token_ids`, or an `error`.

    Example: ``ScriptedReply(token_ids=(40, 41, 3), logprobs=(-0.1, -0.7, -0.01))``
    """

    text: str | None = None
    """Encoded with control tokens on; the end of the turn is added."""
    token_ids: tuple[int, ...] = ()
    """Exactly these, as if sampled."""
    logprobs: tuple[float, ...] | None = None
    """One a token; None = -0.5 each."""
    finish_reason: FinishReason = "stop"
    """Becomes `length` where the reply is cut at `max_new_tokens`."""
    version_spans: tuple[VersionSpan, ...] | None = None
    """None = the policy's current version for all."""
    error: Exception | None = None
    """Raised instead of an answer."""
    delay_s: float = 0.0
    """Seconds before it answers; infinity = never."""


Answer = ScriptedReply | str | tuple[int, ...] | Exception
Script = Sequence[Answer] | Callable[[GenerateRequest], Answer]


class ScriptedPolicy:
    """Answers turn `n` of every trajectory with `script[n]` (the last one from then on), or with `script(request)`.

    `requests` keeps everything that was asked, in order.
    """

    def __init__(
        self,
        script: Script,
        *,
        renderer: ChatRenderer,
        policy_version: int = 0,
        context_tokens: int | None = None,
        latency_s: float = 0.0,
    ) -> None:
        self._script = script
        self._renderer = renderer
        self._policy_version = policy_version
        self._context_tokens = context_tokens
        self._latency_s = latency_s
        self.requests: list[GenerateRequest] = []
        self.num_slots = 0
        """Slots held now."""
        self.max_slots = 0
        """Most slots held at once."""

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_context_tokens(self) -> int | None:
        return self._context_tokens

    def set_policy_version(self, version: int) -> None:
        self._policy_version = version

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        self.num_slots += 1
        self.max_slots = max(self.max_slots, self.num_slots)
        try:
            yield
        finally:
            self.num_slots -= 1

    async def generate(self, request: GenerateRequest) -> Completion:
        """The scripted answer. Raises PolicyError for a request that exceeds the context, and what the script says."""
        self.requests.append(request)
        asked = len(request.prompt_ids) + request.sampling.max_new_tokens
        if self._context_tokens is not None and asked > self._context_tokens:
            raise PolicyError(f"{asked} tokens asked for, but the context holds {self._context_tokens}")
        reply = self._reply(request)
        delay_s = self._latency_s + reply.delay_s
        if math.isinf(delay_s):
            await asyncio.get_running_loop().create_future()
        if delay_s:
            await asyncio.sleep(delay_s)
        if reply.error is not None:
            raise reply.error
        return self._completion(reply, request.sampling.max_new_tokens)

    async def drain(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def _reply(self, request: GenerateRequest) -> ScriptedReply:
        if callable(self._script):
            answer = self._script(request)
        else:
            answer = self._script[min(request.key.turn, len(self._script) - 1)]
        if isinstance(answer, str):
            return ScriptedReply(text=answer)
        if isinstance(answer, tuple):
            return ScriptedReply(token_ids=answer)
        if isinstance(answer, Exception):
            return ScriptedReply(error=answer)
        return answer

    def _completion(self, reply: ScriptedReply, max_new_tokens: int) -> Completion:
        ids = reply.token_ids if reply.text is None else self._renderer.encode_reply(reply.text)
        logprobs = reply.logprobs if reply.logprobs is not None else (DEFAULT_LOGPROB,) * len(ids)
        reason = reply.finish_reason
        if len(ids) > max_new_tokens:
            ids, logprobs, reason = ids[:max_new_tokens], logprobs[:max_new_tokens], "length"
        whole = (VersionSpan(start=0, end=len(ids), policy_version=self._policy_version),)
        return Completion(
            token_ids=ids, logprobs=logprobs, finish_reason=reason, version_spans=reply.version_spans or whole
        )
