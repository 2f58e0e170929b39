"""The server's log-probs are the trainer's, at the sampling temperature, over several turns and with a warm cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from quintain.agents.completion import Completion, GenerateRequest, RequestKey, SamplingParams
from quintain.agents.sglang.policy import SGLangPolicy
from quintain.agents.sglang.server import ManagedServer
from quintain.recipes.build_model import load_model
from quintain.trainer.batch import make_batches
from quintain.trainer.logprobs import score_tokens
from quintain.trainer.sample import Sample

NUM_ROWS, NUM_TURNS, NEW_TOKENS = 16, 3, 24
NAN = float("nan")

pytestmark = pytest.mark.sglang


def sample_rows(url: str, vocab_size: int, temperature: float) -> list[Sample]:
    """Rows of three turns; what comes between the turns (a tool's answer, say) was not sampled."""
    policy = SGLangPolicy([url], vocab_size=vocab_size)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS)

    async def row(member: int) -> Sample:
        ids, logprobs = [20 + (7 * member + i) % 200 for i in range(40)], [NAN] * 40
        for turn in range(NUM_TURNS):
            key = RequestKey(draw=member // 4, member=member % 4, attempt=0, turn=turn)
            request = GenerateRequest(key=key, prompt_ids=tuple(ids), sampling=sampling, seed=member)
            completion: Completion = await policy.generate(request)
            between = [30 + turn, 31, 32, 33, 34]
            ids += [*completion.token_ids, *between]
            logprobs += [*completion.logprobs, *[NAN] * len(between)]
        return make_row(ids, logprobs, member)

    async def rows() -> list[Sample]:
        try:
            return list(await asyncio.gather(*map(row, range(NUM_ROWS))))
        finally:
            await policy.close()

    return asyncio.run(rows())


def make_row(ids: list[int], logprobs: list[float], member: int) -> Sample:
    sampled = tuple(value == value for value in logprobs)
    return Sample(
        token_ids=tuple(ids),
        loss_mask=sampled,
        rollout_logprobs=tuple(logprobs),
        advantages=tuple(1.0 if is_sampled else 0.0 for is_sampled in sampled),
        policy_versions=tuple(0 if is_sampled else -1 for is_sampled in sampled),
        draw=member // 4,
        member=member % 4,
    )


def gaps(model: Any, samples: list[Sample], temperature: float) -> torch.Tensor:
    found = []
    for batch in make_batches(samples, max_tokens=8192):
        with torch.no_grad():
            scores = score_tokens(model, batch, temperature=temperature)
        trained = scores.trained_BT
        found.append((scores.logprobs_BT - batch.rollout_logprobs_BT)[trained].abs())
    return torch.cat(found)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_server_and_trainer_agree_at_every_temperature(
    temperature: float, sglang_server: ManagedServer, tiny_model_dir: Path
):
    """C09. Turns after the first, and members of a group, find their prefix in the server's cache."""
    model, tokenizer = load_model(tiny_model_dir)
    samples = sample_rows(sglang_server.url, len(tokenizer), temperature)
    found = gaps(model, samples, temperature)
    print(f"temperature {temperature}: {len(found)} tokens, gap max {found.max():.2e}, mean {found.mean():.2e}")
    assert len(found) > 500
    assert float(found.max()) <= 1e-4
    assert float(found.mean()) <= 1e-5
    wrong = gaps(model, samples, temperature * 1.5)  # what this test would see if one side used another
    assert float(wrong.mean()) > 1e-2
