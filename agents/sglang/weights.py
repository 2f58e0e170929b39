"""Weights and pauses of one SGLang server over HTTP: every call is checked, nothing relies on a server's default.

    pause(retract) ── update ── flush ── resume        replies go on with the new weights; their spans say where
    pause(abort)   ── update ── flush ── resume        replies end as `abort` with what was sampled
    pause(in_place) ─ update ── resume                 as the first, but keys and values of the old weights stay

Facts that the calls rest on (SGLang 0.5.23): a flush is refused while requests run or are held in place, and with
`retract` it passes; an update from disk waits for running requests unless generation is paused; updates by tensor or
process group are refused outside a begin/end bracket, and a refused one leaves the sender's broadcast hanging, so the
bracket is opened and checked before anything is sent. `update_weight_version` aborts every request unless told not to.

Tensors come as bytes that a sender made; there is no torch here.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from quintain.agents.sglang.answers import AnswerError, EngineError, EngineRefused
from quintain.agents.sglang.client import SGLangClient

PauseMode = Literal["in_place", "retract", "abort"]
UPDATE_TIMEOUT_S = 600.0
FLUSH_PAUSE_S = 0.1


async def pause(client: SGLangClient, mode: PauseMode) -> None:
    """Sample nothing until `resume`. New requests queue on the server meanwhile, in every mode."""
    await client.command("/pause_generation", {"mode": mode}, timeout_s=UPDATE_TIMEOUT_S)


async def resume(client: SGLangClient) -> None:
    """Go on sampling."""
    await client.command("/continue_generation", {})


@asynccontextmanager
async def paused(client: SGLangClient, mode: PauseMode) -> AsyncIterator[None]:
    """Paused inside, resumed at the end, also after an error."""
    await pause(client, mode)
    try:
        yield
    finally:
        await resume(client)


async def flush(client: SGLangClient, *, timeout_s: float = 10.0) -> None:
    """Empty the prefix cache. A server with open requests refuses; it is asked again until `timeout_s` is over.

    Raises EngineError where it still refuses: the cache may then hold states of old weights (D03, D04).
    """
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            await client.command("/flush_cache", {})
            return
        except EngineRefused as error:
            if time.monotonic() + FLUSH_PAUSE_S > give_up:
                raise EngineError(
                    f"the prefix cache could not be emptied within {timeout_s} s; pause with `retract` or `abort`, or "
                    f"wait until nothing runs: {error}"
                ) from error
        await asyncio.sleep(FLUSH_PAUSE_S)


async def update_from_disk(
    client: SGLangClient, model_dir: Path, *, policy_version: int, abort_all_requests: bool, flush_cache: bool
) -> None:
    """Load the weights in `model_dir`, as `policy_version`. Both choices are the caller's, always.

    Without abort and without a pause the server waits for its running requests. Raises EngineRefused with the old
    weights still in place.
    """
    body = {
        "model_path": str(model_dir),
        "weight_version": str(policy_version),
        "abort_all_requests": abort_all_requests,
        "flush_cache": flush_cache,
    }
    await client.command("/update_weights_from_disk", body, timeout_s=UPDATE_TIMEOUT_S)
    await check_version_is(client, policy_version)


async def set_version(client: SGLangClient, policy_version: int, *, abort_all_requests: bool) -> None:
    """Change the label alone. What is sampled from then on carries it."""
    body = {"new_version": str(policy_version), "abort_all_requests": abort_all_requests}
    await client.command("/update_weight_version", body)
    await check_version_is(client, policy_version)


async def check_version_is(client: SGLangClient, policy_version: int) -> None:
    """Raises AnswerError where the server says that it has other weights."""
    found = (await client.info()).weight_version
    if found != str(policy_version):
        raise AnswerError(f"{client.url}: has weight_version {found!r} after an update to {policy_version}")


@asynccontextmanager
async def update_bracket(client: SGLangClient) -> AsyncIterator[None]:
    """What updates by tensor and by process group stand in. Opened and checked before the sender sends anything."""
    await client.command("/begin_weight_update", {}, timeout_s=UPDATE_TIMEOUT_S)
    try:
        yield
    finally:
        await client.command("/end_weight_update", {}, timeout_s=UPDATE_TIMEOUT_S)


async def update_from_tensor(
    client: SGLangClient,
    payloads: Sequence[bytes],
    *,
    policy_version: int,
    abort_all_requests: bool,
    flush_cache: bool,
    load_format: str | None = None,
) -> None:
    """Weights as bytes, one payload for each tensor-parallel rank, inside `update_bracket`.

    A payload is a pickled list of (name, CPU tensor). Tensors shared by file descriptor end the server's scheduler.
    """
    body = {
        "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
        "weight_version": str(policy_version),
        "abort_all_requests": abort_all_requests,
        "flush_cache": flush_cache,
        "load_format": load_format,
    }
    await client.command("/update_weights_from_tensor", body, timeout_s=UPDATE_TIMEOUT_S)


async def join_group(
    client: SGLangClient,
    *,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    backend: str,
    group_name: str,
) -> None:
    """Let the server's ranks join the sender's process group; returns when all have met."""
    body = {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "backend": backend,
        "group_name": group_name,
    }
    await client.command("/init_weights_update_group", body, timeout_s=UPDATE_TIMEOUT_S)


async def leave_group(client: SGLangClient, *, group_name: str) -> None:
    """Let the server's ranks leave it."""
    await client.command("/destroy_weights_update_group", {"group_name": group_name})


async def update_from_group(
    client: SGLangClient,
    *,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    policy_version: int,
    abort_all_requests: bool,
    flush_cache: bool,
) -> None:
    """Receive the named weights by broadcast, in this order, inside `update_bracket`; the sender sends meanwhile."""
    body = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "weight_version": str(policy_version),
        "abort_all_requests": abort_all_requests,
        "flush_cache": flush_cache,
    }
    await client.command("/update_weights_from_distributed", body, timeout_s=UPDATE_TIMEOUT_S)
