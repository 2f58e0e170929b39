"""`LocalPolicy`: samples in this process, with the live weights of the model that is being trained.

    rollout workers (asyncio)                       one worker thread
    generate ──┐
    generate ──┼── barrier: every slot waits ──> decode(all rows, sorted by key) ──> completions
    generate ──┘

Invariants: a batch starts only when every slot waits in `generate`, and its rows are sorted by `RequestKey`; so which
rows are computed together (floating-point results depend on it) never depends on how long a tool took. Keys and values
live from turn to turn while slots are held, and are dropped when the version changes or the last slot leaves. torch
runs in one thread of its own, so the event loop stays free; nothing may change the weights while a batch runs.

Not done here: top-p and its like, log-probs of tokens that were not sampled, cancelling one row of a batch that runs
(its result is thrown away; `drain` ends the whole batch).
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_threads
from contextlib import asynccontextmanager
from typing import Any

import torch

from quintain.agents.completion import Completion, GenerateRequest, VersionSpan
from quintain.agents.decoder import Backend, Decoded, decode
from quintain.agents.decoder_generic import GenericBackend, RecomputingBackend, has_cache
from quintain.agents.decoder_llama import LlamaBackend
from quintain.agents.policy import PolicyError

_Waiter = tuple[GenerateRequest, "asyncio.Future[Completion]"]


def make_backend(model: Any) -> Backend:
    """The quick backend where the architecture is known to it, else one over the model's own forward pass."""
    if LlamaBackend.supports(model):
        return LlamaBackend(model)
    return GenericBackend(model) if has_cache(model) else RecomputingBackend(model)


class LocalPolicy:
    """In-process sampler over a transformers causal LM.

    Life cycle: make it around the model, use it from one event loop at a time, call `set_policy_version` after each
    optimizer step (between batches), `close` at the end.
    """

    def __init__(self, model: Any, *, policy_version: int = 0) -> None:
        self._model = model
        self._backend = make_backend(model)
        self._version = policy_version
        self.max_context_tokens: int | None = getattr(model.config, "max_position_embeddings", None) or None
        """The model's own limit on prompt and reply together; None where its config names none."""
        self._max_context = int(self.max_context_tokens or 2**31)
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-policy")
        self._waiting: list[_Waiter] = []
        self._num_slots = 0
        self._batch: asyncio.Task[None] | None = None
        self._job: Future[list[Decoded]] | None = None  # the batch's part in the thread; outlives a cancelled task
        self._stop = threading.Event()  # one a batch; set: decoding ends at its next step

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token would be sampled from."""
        return self._version

    def set_policy_version(self, version: int) -> None:
        """Say that the model's weights are now those of `version`. Raises RuntimeError while a batch runs."""
        if self._job is not None and not self._job.done():
            raise RuntimeError(f"set_policy_version({version}) while a batch is being sampled with {self._version}")
        self._version = version
        self._executor.submit(self._backend.forget)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, together with all other rows that wait.

        Raises PolicyError where the model failed or the prompt does not fit the model; nothing was sampled then.
        """
        self._check(request)
        waiter: _Waiter = (request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._start_batch_if_due()
        try:
            return await waiter[1]
        finally:
            if waiter in self._waiting:  # cancelled before its batch began
                self._waiting.remove(waiter)
                self._start_batch_if_due()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Counts a rollout worker: no batch starts before every holder waits in `generate` (or has left)."""
        self._num_slots += 1
        try:
            yield
        finally:
            self._num_slots -= 1
            if self._num_slots == 0:
                self._executor.submit(self._backend.forget)
            self._start_batch_if_due()

    async def drain(self) -> None:
        """End the batch that runs, if any, and wait for the thread: nothing reads the weights afterwards.

        Who still waits in `generate` gets a PolicyError.
        """
        waiting, self._waiting = self._waiting, []
        _fail(waiting, "sampling was ended before it began", None)
        self._stop.set()
        batch, job = self._batch, self._job
        if job is not None and not job.done():
            await asyncio.to_thread(wait_for_threads, [job])
        if batch is not None and not batch.done():
            await asyncio.wait([batch])

    async def close(self) -> None:
        """Wait for a running batch and stop the thread. The model is not touched."""
        await asyncio.to_thread(self._executor.shutdown)

    def _check(self, request: GenerateRequest) -> None:
        prompt, sampling = request.prompt_ids, request.sampling
        if not prompt or sampling.max_new_tokens < 1 or not sampling.temperature >= 0:
            raise PolicyError(
                f"{request.key}: a generation needs a prompt (here {len(prompt)} tokens), max_new_tokens >= 1 (here "
                f"{sampling.max_new_tokens}) and a temperature >= 0 (here {sampling.temperature})"
            )
        if len(prompt) >= self._max_context:
            raise PolicyError(
                f"{request.key}: the prompt has {len(prompt)} tokens and the model's context ends at "
                f"{self._max_context}; lower rollout.max_trajectory_tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise PolicyError(
                f"{request.key}: token ids {min(prompt)}..{max(prompt)} in the prompt, but the model knows "
                f"0..{self._vocab_size - 1}; tokenizer and model do not belong together"
            )

    def _start_batch_if_due(self) -> None:
        if self._batch is not None and self._batch.done():
            self._batch = None
        if self._batch is None and self._waiting and len(self._waiting) >= self._num_slots:
            self._batch = asyncio.get_running_loop().create_task(self._run_batch(), name="local-policy-batch")

    async def _run_batch(self) -> None:
        # The task starts one tick late: callers of the same tick are in, and one may have entered a slot meanwhile.
        if not self._waiting or len(self._waiting) < self._num_slots:
            return
        batch, self._waiting = sorted(self._waiting, key=lambda waiter: waiter[0].key), []
        requests = [request for request, _ in batch]
        version, retain = self._version, self._num_slots > 0
        self._stop = threading.Event()
        try:
            self._job = self._executor.submit(self._decode, requests, retain, self._stop)
            decoded = await asyncio.wrap_future(self._job)
        except Exception as error:  # noqa: BLE001 - the worker boundary: whatever broke is each waiter's PolicyError
            _fail(batch, f"sampling {len(batch)} rows failed: {type(error).__name__}: {error}", error)
        except BaseException:
            _fail(batch, f"sampling {len(batch)} rows was cancelled", None)
            raise
        else:
            for (request, future), row in zip(batch, decoded, strict=True):
                if not future.done():
                    _settle(future, request, row, version)
        finally:
            self._batch = None
        self._start_batch_if_due()

    def _decode(self, requests: Sequence[GenerateRequest], retain: bool, stop: threading.Event) -> list[Decoded]:
        """Runs in the worker thread."""
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.inference_mode():
                return decode(
                    self._backend,
                    requests,
                    max_context=self._max_context,
                    retain=retain,
                    stopped_early=stop.is_set,
                )
        except BaseException:
            self._backend.forget()
            raise
        finally:
            self._model.train(was_training)


def _settle(future: asyncio.Future[Completion], request: GenerateRequest, row: Decoded, version: int) -> None:
    if not all(math.isfinite(logprob) for logprob in row.logprobs):
        future.set_exception(
            PolicyError(
                f"{request.key}: the model of version {version} gave log-probs that are not finite; it diverged"
            )
        )
        return
    span = VersionSpan(start=0, end=len(row.token_ids), policy_version=version)
    future.set_result(
        Completion(
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            finish_reason=row.finish_reason,
            version_spans=(span,),
        )
    )


def _fail(batch: Sequence[_Waiter], reason: str, cause: BaseException | None) -> None:
    for _, future in batch:
        if not future.done():
            error = PolicyError(reason)
            error.__cause__ = cause
            future.set_exception(error)
