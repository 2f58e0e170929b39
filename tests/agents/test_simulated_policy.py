"""`SimulatedPolicy`: its latency model, its places, failures, versions, and that a seed fixes all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from toy_chat import TASK, Parrot, call_text, renderer

from quintain.agents.completion import Completion, GenerateRequest, RequestKey, SamplingParams
from quintain.agents.config import RolloutConfig
from quintain.agents.policy import PolicyError
from quintain.agents.scheduler import Draw, RolloutRunner
from quintain.agents.simulated_policy import Latency, SimulatedPolicy, random_tokens, scripted_tokens
from quintain.agents.simulated_time import run_in_simulated_time

T = TypeVar("T")
STOP = 7
TOKENS = random_tokens(100, num_tokens=(5, 20), stop_token_id=STOP)


def request(seed: int, *, new: int = 64, prompt: int = 10) -> GenerateRequest:
    key = RequestKey(draw=seed, member=0, attempt=0, turn=0)
    return GenerateRequest(key=key, prompt_ids=(1,) * prompt, sampling=SamplingParams(max_new_tokens=new), seed=seed)


def answers(run: Coroutine[Any, Any, T]) -> T:
    return run_in_simulated_time(run)[0]


async def gathered(*calls: Coroutine[Any, Any, Completion]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def test_what_is_answered_and_when_follows_from_the_seeds_and_not_from_the_order_of_asking():
    latency = Latency(decode_token_s=1e-5, jitter_frac=0.5)
    first, second = (SimulatedPolicy(TOKENS, latency=latency, failure_frac=0.3, max_running=2) for _ in range(2))
    forward = answers(gathered(*(first.generate(request(n)) for n in range(40))))
    backward = answers(gathered(*(second.generate(request(n)) for n in reversed(range(40)))))
    assert list(map(repr, forward)) == list(map(repr, reversed(backward)))
    assert [first.plan(request(n)) for n in range(40)] == [second.plan(request(n)) for n in range(40)]
    assert SimulatedPolicy(TOKENS, seed=1).plan(request(3)) != first.plan(request(3))


def test_replies_stay_within_the_vocabulary_end_at_the_stop_token_or_are_cut():
    policy = SimulatedPolicy(TOKENS)
    for done in answers(gathered(*(policy.generate(request(n, new=10)) for n in range(50)))):
        assert all(0 <= i < 100 for i in done.token_ids) and STOP not in done.token_ids[:-1]
        assert len(done.token_ids) <= 10 and len(done.logprobs) == len(done.token_ids)
        assert (done.token_ids[-1] == STOP) == (done.finish_reason == "stop")


def test_latency_counts_prompt_and_new_tokens():
    plain = SimulatedPolicy(TOKENS, latency=Latency(request_s=1.0, prefill_token_s=0.1, decode_token_s=10.0))
    planned = plain.plan(request(0, prompt=10))
    assert planned.decode_from_s == pytest.approx(2.0)
    assert planned.latency_s == pytest.approx(2.0 + 10.0 * len(planned.token_ids))
    jittery = SimulatedPolicy(TOKENS, latency=Latency(request_s=1.0, jitter_frac=0.25))
    seconds = [jittery.plan(request(n)).latency_s for n in range(400)]
    assert 0.75 <= min(seconds) < 0.8 and 1.2 < max(seconds) <= 1.25


def test_a_request_takes_its_latency_and_waits_for_a_place_before():
    policy = SimulatedPolicy(TOKENS, latency=Latency(request_s=0.05), max_running=2)
    _, seconds = run_in_simulated_time(gathered(*(policy.generate(request(n)) for n in range(6))))
    assert seconds == pytest.approx(0.15)
    assert policy.max_running_seen == 2 and policy.num_answered == 6 and policy.num_running == policy.num_queued == 0


def test_a_full_queue_refuses():
    policy = SimulatedPolicy(TOKENS, latency=Latency(request_s=0.02), max_running=1, max_queued=1)
    done = answers(gathered(*(policy.generate(request(n)) for n in range(3))))
    assert [isinstance(answer, PolicyError) for answer in done] == [False, False, True]


def test_a_request_beyond_the_context_is_refused():
    policy = SimulatedPolicy(TOKENS, context_tokens=64)
    with pytest.raises(PolicyError, match="context"):
        answers(policy.generate(request(0, new=60, prompt=10)))


@pytest.mark.parametrize("when", ["running", "waiting", "given a place"])
def test_a_cancelled_request_gives_its_place_to_the_next(when: str):
    async def act() -> Completion:
        first = asyncio.create_task(policy.generate(request(0)))
        second = asyncio.create_task(policy.generate(request(1)))
        await asyncio.sleep(0)
        assert (policy.num_running, policy.num_queued) == (1, 1)
        if when == "given a place":
            first.cancel()
            await asyncio.sleep(0)
        (first if when == "running" else second).cancel()
        last = await policy.generate(request(2))
        await asyncio.gather(first, second, return_exceptions=True)
        return last

    policy = SimulatedPolicy(TOKENS, latency=Latency(request_s=0.01), max_running=1)
    assert answers(act()).finish_reason == "stop"
    assert policy.num_aborted == (2 if when == "given a place" else 1)
    assert policy.num_running == policy.num_queued == 0


def test_drain_lets_nobody_wait_for_a_place():
    async def act() -> list[Any]:
        tasks = [asyncio.create_task(policy.generate(request(n))) for n in range(3)]
        await asyncio.sleep(0)
        await policy.drain()
        return await asyncio.gather(*tasks, return_exceptions=True)

    policy = SimulatedPolicy(TOKENS, latency=Latency(request_s=0.01), max_running=1)
    first, *others = answers(act())
    assert isinstance(first, Completion) and all(isinstance(error, PolicyError) for error in others)


def test_tokens_after_an_update_in_mid_reply_carry_the_new_version():
    """D05, D07"""

    async def act() -> Completion:
        task = asyncio.create_task(policy.generate(request(0)))
        await asyncio.sleep(5.5)
        policy.set_policy_version(4)
        await asyncio.sleep(5)
        policy.set_policy_version(5)
        return await task

    policy = SimulatedPolicy(
        lambda request, random: tuple(range(20)), latency=Latency(decode_token_s=1.0), policy_version=3
    )
    done = answers(act())
    assert done.policy_versions() == (3,) * 5 + (4,) * 5 + (5,) * 10
    assert set(answers(policy.generate(request(1))).policy_versions()) == {5}


def test_an_update_before_the_first_token_leaves_none_to_the_old_version():
    async def act() -> Completion:
        task = asyncio.create_task(policy.generate(request(0)))
        await asyncio.sleep(0)
        policy.set_policy_version(1)
        return await task

    policy = SimulatedPolicy(TOKENS, latency=Latency(request_s=0.05, decode_token_s=0.001))
    assert set(answers(act()).policy_versions()) == {1}


def test_a_run_over_a_failing_engine_is_whole_and_the_same_each_time():
    """C15, D02"""

    def run() -> tuple[list[Any], int]:
        chat = renderer()
        policy = SimulatedPolicy(
            scripted_tokens([call_text(), "done"], renderer=chat),
            latency=Latency(request_s=0.001, jitter_frac=1.0),
            max_running=8,
            failure_frac=0.1,
        )
        config = RolloutConfig(max_new_tokens=256, num_retries=8)
        runner = RolloutRunner(policy=policy, renderer=chat, make_env=Parrot, config=config, seed=1)
        try:
            groups = runner.collect([Draw(number=n, task=TASK) for n in range(16)], group_size=4)
        finally:
            runner.close()
        members = [(t.draw, t.member, t.attempt, t.reward, t.rows) for g in groups for t in g.trajectories]
        return [repr(member) for member in members], policy.num_failed

    (members, num_failed), again = run(), run()
    assert len(members) == 64 and num_failed > 0 and (members, num_failed) == again


def test_simulated_time_refuses_to_wait_for_what_never_comes():
    async def act() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never comes"):
        answers(act())
