"""The client against a real SGLang server: sampled ids are kept, aborts, updates in mid-reply, dead servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from quintain.agents.completion import GenerateRequest, RequestKey, SamplingParams
from quintain.agents.config import LaunchConfig, RolloutConfig
from quintain.agents.outcome import Outcome
from quintain.agents.policy import PolicyError
from quintain.agents.renderer import ChatRenderer
from quintain.agents.scheduler import Draw, RolloutRunner
from quintain.agents.sglang import weights
from quintain.agents.sglang.answers import EngineBusy, EngineError, EngineRefused
from quintain.agents.sglang.client import SGLangClient
from quintain.agents.sglang.policy import SGLangPolicy
from quintain.agents.sglang.server import ManagedServer
from quintain.envs import ToolEnv
from quintain.envs.calculator import CalculatorEnv

pytestmark = pytest.mark.sglang
LONG = 900


def vocab(models: Any) -> int:
    return len(models[1].tokenizer)


def request(*, prompt: tuple[int, ...] = (10, 20, 30, 40), member: int = 0, new: int = 8, **sampling: Any) -> Any:
    key = RequestKey(draw=0, member=member, attempt=0, turn=0)
    params = SamplingParams(max_new_tokens=new, **sampling)
    return GenerateRequest(key=key, prompt_ids=prompt, sampling=params, seed=member)


def use(url: str, models: Any, act: Callable[[SGLangPolicy], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    async def run() -> Any:
        policy = SGLangPolicy([url], vocab_size=vocab(models), **settings)
        try:
            return await act(policy)
        finally:
            await policy.close()

    return asyncio.run(run())


async def long_reply(policy: SGLangPolicy) -> Any:
    """One that samples for a while: greedy on random weights goes round in circles and never ends its turn."""
    if policy.max_context_tokens is None:
        await policy.start()
    task = asyncio.create_task(policy.generate(request(new=LONG, temperature=0.0)))
    await asyncio.sleep(0.3)
    assert not task.done()
    return task


@pytest.mark.parametrize("stream", [False, True])
def test_both_ways_of_asking_give_checked_completions(server: ManagedServer, models: Any, stream: bool):
    async def act(policy: SGLangPolicy) -> Any:
        return await asyncio.gather(*(policy.generate(request(member=m, temperature=0.0)) for m in range(4)))

    for done in use(server.url, models, act, stream=stream):
        assert 1 <= len(done.token_ids) <= 8 and {v for v in done.policy_versions()} == {0}


def test_a_prefix_sampled_before_is_read_from_the_cache_and_gone_after_a_flush(server: ManagedServer, models: Any):
    """D03"""

    async def cached(policy: SGLangPolicy) -> int:
        body = {"input_ids": list(range(10, 60)), "sampling_params": {"max_new_tokens": 1}, "rid": os.urandom(4).hex()}
        answer: Any = await policy.workers[0].generate(body)
        return answer["meta_info"]["cached_tokens"]

    async def act(policy: SGLangPolicy) -> None:
        await cached(policy)
        assert await cached(policy) >= 40
        await weights.flush(policy.workers[0])
        assert await cached(policy) == 0

    use(server.url, models, act)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_ends_on_the_server(server: ManagedServer, models: Any, stream: bool):
    async def act(policy: SGLangPolicy) -> None:
        task = await long_reply(policy)
        with pytest.raises(EngineError, match="could not be emptied"):  # D04: refused while it runs
            await weights.flush(policy.workers[0], timeout_s=0.01)
        task.cancel()
        await asyncio.wait([task])
        await policy.drain()
        await weights.flush(policy.workers[0], timeout_s=0.5)  # passes only where nothing is left

    use(server.url, models, act, stream=stream)


def test_an_update_in_mid_reply_is_seen_in_the_version_spans(server: ManagedServer, models: Any):
    """D04, D06: open requests survive, and each token knows its version."""

    async def act(policy: SGLangPolicy) -> None:
        client = policy.workers[0]
        task = await long_reply(policy)
        async with weights.paused(client, "retract"):
            await weights.flush(client)
            choices: Any = {"abort_all_requests": False, "flush_cache": True}
            await weights.update_from_disk(client, models[0][1], policy_version=7, **choices)
        done = await task
        assert [span.policy_version for span in done.version_spans] == [0, 7] and done.finish_reason != "abort"
        await weights.update_from_disk(
            client, models[0][0], policy_version=0, abort_all_requests=False, flush_cache=True
        )

    use(server.url, models, act)


def test_a_label_changes_without_aborting_and_an_abort_keeps_tokens_with_versions(server: ManagedServer, models: Any):
    """D06, D07"""

    async def act(policy: SGLangPolicy) -> None:
        task = await long_reply(policy)
        await weights.pause(policy.workers[0], "abort")
        await weights.resume(policy.workers[0])
        done = await task
        assert done.finish_reason == "abort" and len(done.policy_versions()) == len(done.token_ids) > 0
        task = await long_reply(policy)
        await weights.set_version(policy.workers[0], 3, abort_all_requests=False)
        assert (await task).finish_reason in ("length", "stop")
        await weights.set_version(policy.workers[0], 0, abort_all_requests=False)

    use(server.url, models, act)


def test_a_wrong_folder_and_an_update_outside_the_bracket_are_refused(
    server: ManagedServer, models: Any, tmp_path: Path
):
    async def act(policy: SGLangPolicy) -> None:
        client = policy.workers[0]
        choices: Any = {"policy_version": 9, "abort_all_requests": False, "flush_cache": True}
        with pytest.raises(EngineRefused):
            await weights.update_from_disk(client, tmp_path, **choices)
        with pytest.raises(EngineRefused):
            await weights.update_from_tensor(client, [b"none"], **choices)
        await weights.check_version_is(client, 0)

    use(server.url, models, act)


def calculator_runner(
    policy: SGLangPolicy, chat: ChatRenderer, make_env: Callable[[], ToolEnv] = CalculatorEnv, **config: Any
) -> RolloutRunner:
    settings = {"max_new_tokens": 6, "max_format_errors": 99, "history": "append", "max_failure_frac": 1.0}
    return RolloutRunner(
        policy=policy, renderer=chat, make_env=make_env, config=RolloutConfig(**{**settings, **config}), seed=1
    )


@pytest.mark.timeout(600)  # two starts of a server, each 20 s alone and over a minute on a busy machine
def test_trajectories_on_a_killed_server_are_made_again_from_the_prompt_on_a_synced_one(make_server: Any, models: Any):
    """D05: the attempt that lost its server is an infrastructure failure, and none of its tokens are in a later row."""
    server: ManagedServer = make_server()
    first_group = server.pid
    assert first_group is not None
    killer = threading.Thread(target=_kill_once_it_samples, args=(server.url, first_group))

    async def sync(client: SGLangClient) -> None:
        await weights.set_version(client, 4, abort_all_requests=False)

    policy = SGLangPolicy(
        [server.url], vocab_size=vocab(models), revive=lambda client: server.restart(sync), retry_s=200
    )
    rollouts = calculator_runner(policy, models[1], max_new_tokens=600, deadline_s=250)
    killer.start()
    try:
        draws = [Draw(number=n, task=CalculatorEnv().task_at(n)) for n in range(2)]
        groups = rollouts.collect(draws, group_size=4, temperature=0.0)
        stats = rollouts.stats
    finally:
        killer.join()
        rollouts.close()
        second_group = server.pid
        server.stop()
    assert server.num_restarts == 1 and stats.num_retries > 0 and second_group not in (None, first_group)
    assert all(error.startswith("engine_error: EngineLost") for error in stats.errors), stats.errors
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.outcome.is_trainable, trajectory.error
        versions = {v for turn in trajectory.turns for v in turn.completion.policy_versions()}
        assert versions == ({4} if trajectory.attempt else {0})
    assert _living_members(first_group) == [] == _living_members(second_group or 0)


def _kill_once_it_samples(url: str, group: int) -> None:
    """A flush is refused from the moment that replies are being sampled."""
    for _ in range(6000):
        if httpx.post(f"{url}/flush_cache", timeout=30).status_code == httpx.codes.BAD_REQUEST:
            break
        time.sleep(0.005)
    os.killpg(group, signal.SIGKILL)


def test_an_id_beyond_the_vocabulary_never_reaches_the_server(server: ManagedServer, models: Any):
    async def act(policy: SGLangPolicy) -> None:
        with pytest.raises(PolicyError, match="the model knows"):
            await policy.generate(request(prompt=(1, vocab(models))))
        await policy.generate(request())

    use(server.url, models, act)


def test_multi_turn_trajectories_keep_the_ids_that_the_server_sampled(server: ManagedServer, models: Any):
    """Each row is prompt and sampled ids of the turns, end to end; the server read exactly these (prompt_tokens)."""
    policy = SGLangPolicy([server.url], vocab_size=vocab(models))
    task = CalculatorEnv().task_at(0)
    rollouts = calculator_runner(policy, models[1], max_new_tokens=24)
    try:
        groups = rollouts.collect([Draw(number=n, task=task) for n in range(2)], group_size=4)
    finally:
        rollouts.close()
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.outcome is not Outcome.INFRASTRUCTURE, trajectory.error
        (row,) = trajectory.rows
        ids = [i for turn in trajectory.turns for i in (*turn.prompt_token_ids, *turn.completion.token_ids)]
        assert list(row.token_ids) == ids


def test_nothing_listens_is_tried_again_and_then_said(models: Any):
    started = time.monotonic()
    policy = SGLangPolicy(["http://127.0.0.1:9"], vocab_size=vocab(models), retry_s=0.5)
    policy.max_context_tokens = 64
    with pytest.raises((EngineBusy, EngineError)):
        asyncio.run(policy.generate(request()))
    assert time.monotonic() - started < 10


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path):
    launch = LaunchConfig(python=sys.executable, start_timeout_s=30)
    managed = ManagedServer(launch, model_dir=tmp_path, log=tmp_path / "x.log")
    with pytest.raises(EngineError, match=r"(?s)ended while it started.*sglang"):
        asyncio.run(managed.start())


def test_a_server_does_not_outlive_a_killed_owner(tmp_path: Path):
    """The owner is killed with SIGKILL; a sleeping program stands in for the server's processes."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path}/child\nwait\n")
    fake.chmod(0o755)
    code = (
        "import time; from pathlib import Path; from quintain.agents.config import LaunchConfig\n"
        "from quintain.agents.sglang.server import ManagedServer\n"
        f"launch, log = LaunchConfig(python={str(fake)!r}), Path({str(tmp_path)!r}) / 'log'\n"
        "s = ManagedServer(launch, model_dir=Path('m'), log=log)\n"
        "s._spawn(); time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as owner:
        child = tmp_path / "child"
        give_up = time.monotonic() + 20
        while not (child.exists() and child.read_text().strip()) and time.monotonic() < give_up:
            time.sleep(0.05)
        owner.kill()
    pid = int(child.read_text())
    while _alive(pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not _alive(pid)


def _living_members(group: int) -> list[str]:
    """Processes of the group that still run; one that nobody has reaped yet has ended."""
    stats = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in stats.splitlines()]
    return [" ".join(row) for row in rows if int(row[0]) == group and not row[1].startswith("Z")]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
