"""When `LocalPolicy` samples: the barrier over slots, cancelled waiters, failures."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from toy_chat import TASK, Parrot, renderer

from quintain.agents.completion import Completion, GenerateRequest, RequestKey, SamplingParams
from quintain.agents.config import RolloutConfig
from quintain.agents.local_policy import LocalPolicy
from quintain.agents.outcome import StopReason
from quintain.agents.policy import PolicyError
from quintain.agents.scheduler import Draw, RolloutRunner


def small_model() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return transformers.LlamaForCausalLM(config)


def ask(member: int, *, turn: int = 0, prompt: tuple[int, ...] = (5, 6), max_new_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(
        key=RequestKey(draw=0, member=member, attempt=0, turn=turn),
        prompt_ids=prompt,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=member + 50 * turn,
    )


async def worker(
    policy: LocalPolicy, member: int, delays_s: list[float], log: list[tuple[int, int]]
) -> list[Completion]:
    """A rollout worker: one generation, then a tool that takes `delay`, and so on."""
    done, row = [], (5, 6 + member)
    async with policy.slot():
        for turn, delay_s in enumerate(delays_s):
            await asyncio.sleep(delay_s)
            done.append(await policy.generate(ask(member, turn=turn, prompt=row, max_new_tokens=3 + member)))
            log.append((turn, member))
            row = (*row, *done[-1].token_ids, 9)
    return done


def test_results_do_not_depend_on_how_long_tools_take_or_who_comes_first() -> None:
    """Same requests, three timings: bit-equal log-probs, and no turn starts before all have arrived at it."""

    async def run(delays: list[list[float]]) -> list[list[Completion]]:
        policy, log = LocalPolicy(small_model()), []
        results = await asyncio.gather(*(worker(policy, m, d, log) for m, d in enumerate(delays)))
        assert [turn for turn, _ in log] == sorted(turn for turn, _ in log)
        await policy.close()
        return results

    quick = asyncio.run(run([[0.0, 0.0, 0.0]] * 4))
    slow_last = asyncio.run(run([[0.0, 0.01 * m, 0.02] for m in range(4)]))
    slow_first = asyncio.run(run([[0.05 - 0.01 * m, 0.03 - 0.01 * m, 0.0] for m in range(4)]))
    assert quick == slow_last == slow_first


def test_a_worker_that_leaves_its_slot_is_no_longer_waited_for() -> None:
    async def run() -> int:
        policy, log = LocalPolicy(small_model()), []
        turns = [[0.0], [0.0, 0.0], [0.0, 0.0, 0.0]]
        results = await asyncio.wait_for(
            asyncio.gather(*(worker(policy, m, d, log) for m, d in enumerate(turns))), timeout=20
        )
        return sum(map(len, results))

    assert asyncio.run(run()) == 6


def test_a_caller_without_a_slot_is_served_at_once() -> None:
    completion = asyncio.run(asyncio.wait_for(LocalPolicy(small_model()).generate(ask(0)), timeout=20))
    assert len(completion.token_ids) == 6


def test_a_waiter_that_reaches_its_deadline_neither_hangs_nor_spoils_the_others() -> None:
    async def run() -> list[Completion]:
        policy = LocalPolicy(small_model())

        async def gives_up() -> None:
            async with policy.slot():
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(policy.generate(ask(0)), timeout=0.05)

        async def slow_tool() -> Completion:
            async with policy.slot():
                await asyncio.sleep(0.2)
                return await policy.generate(ask(1))

        async def plain() -> Completion:
            async with policy.slot():
                return await policy.generate(ask(2))

        _, *others = await asyncio.wait_for(asyncio.gather(gives_up(), slow_tool(), plain()), timeout=20)
        return others

    assert [len(c.token_ids) for c in asyncio.run(run())] == [6, 6]


def test_a_row_cancelled_while_its_batch_runs_leaves_the_others_their_results() -> None:
    async def run() -> Completion:
        policy = LocalPolicy(small_model())
        doomed = asyncio.create_task(policy.generate(ask(0, max_new_tokens=60)))
        other = asyncio.create_task(policy.generate(ask(1, max_new_tokens=60)))
        await asyncio.sleep(0.005)
        doomed.cancel()
        completion = await asyncio.wait_for(other, timeout=20)
        assert doomed.cancelled()
        await policy.generate(ask(3))
        return completion

    assert len(asyncio.run(run()).token_ids) == 60


def test_an_error_in_the_batch_reaches_every_waiter_and_the_next_batch_works() -> None:
    """An engine that fails is an infrastructure outcome for each row, with the reason."""
    model = small_model()

    async def run() -> None:
        policy = LocalPolicy(model)
        whole = model.lm_head
        model.lm_head = torch.nn.Linear(3, 3)  # does not fit the hidden size: the forward pass raises
        results = await asyncio.gather(*(policy.generate(ask(m)) for m in range(3)), return_exceptions=True)
        assert all(isinstance(r, PolicyError) and "sampling 3 rows failed" in str(r) for r in results), results
        model.lm_head = whole
        assert len((await policy.generate(ask(0))).token_ids) == 6

    asyncio.run(run())


def test_a_diverged_model_is_an_error_that_says_so() -> None:
    model = small_model()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(PolicyError, match=r"version 7 .*not finite"):
        asyncio.run(LocalPolicy(model, policy_version=7).generate(ask(0)))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [((), "needs a prompt"), (tuple([5] * 64), "context ends at 64"), ((5, 40), "do not belong together")],
)
def test_a_request_that_cannot_be_served_is_refused_before_it_joins_a_batch(
    prompt: tuple[int, ...], words: str
) -> None:
    with pytest.raises(PolicyError, match=words):
        asyncio.run(LocalPolicy(small_model()).generate(ask(0, prompt=prompt)))


def test_the_policy_can_be_used_from_one_event_loop_after_another() -> None:
    policy = LocalPolicy(small_model())
    first, second = asyncio.run(policy.generate(ask(0))), asyncio.run(policy.generate(ask(0)))
    assert first == second
    asyncio.run(policy.close())


def slowed(model: Any) -> Any:
    """Every forward pass takes 20 ms longer."""
    model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    return model


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_batch_that_nobody_waits_for_ends_with_the_collection(error: type[BaseException] | None) -> None:
    """D02: a deadline, or Ctrl-C, while tokens are sampled; the weights may change once `collect` is over."""
    chat, sampled = renderer(), threading.Event()
    model = slowed(generic_model(len(chat.tokenizer)))
    policy = LocalPolicy(model)
    config = RolloutConfig(max_new_tokens=400, deadline_s=0.3, num_retries=0, max_failure_frac=1.0)
    rollouts = RolloutRunner(policy=policy, renderer=chat, make_env=Parrot, config=config, seed=0)
    if error:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(error) if error else nullcontext():
        (group,) = rollouts.collect([Draw(number=0, task=TASK)], group_size=2)
        assert {t.stop_reason for t in group.trajectories} == {StopReason.DEADLINE}
    model.register_forward_pre_hook(lambda *_: sampled.set())
    assert not sampled.wait(0.2)
    policy.set_policy_version(1)
    assert policy.policy_version == 1
    rollouts.close()


def test_the_version_cannot_change_under_a_running_batch_and_can_after_a_drain() -> None:
    async def run() -> None:
        policy = LocalPolicy(slowed(generic_model(40)))
        asked = asyncio.create_task(policy.generate(ask(0, max_new_tokens=400)))
        await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="set_policy_version"):
            policy.set_policy_version(1)
        await policy.drain()
        policy.set_policy_version(1)
        with pytest.raises(PolicyError, match="given up"):
            await asked
        assert (await policy.generate(ask(0))).policy_versions() == (1,) * 6

    asyncio.run(run())


def generic_model(vocab_size: int) -> Any:
    """A model that is sampled through its own forward pass."""
    config = transformers.GPT2Config(vocab_size=vocab_size, n_embd=8, n_layer=1, n_head=1, n_positions=1024)
    return transformers.GPT2LMHeadModel(config)
