"""Log-probs of trained tokens: agreement with the plain computation and the sampler, padding, packing, temperature."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from trainer_data import NAN, make_sample, mixed_samples, tiny_model

from quintain.agents.completion import GenerateRequest, RequestKey, SamplingParams
from quintain.agents.local_policy import LocalPolicy
from quintain.trainer.batch import Batch, make_batches
from quintain.trainer.logprobs import entropy, model_logprobs, score_tokens

KINDS = ["qwen3", "llama", "gpt2", "gemma2", "opt"]


def plain_logprobs(model, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """Log-prob of each token of one row, from all logits of an unpadded pass; NaN for token 0."""
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logprobs_TV = (model(input_ids=ids).logits[0, :-1].float() / temperature).log_softmax(-1)
    return [NAN, *logprobs_TV.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1).tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_each_row_alone_whatever_it_is_padded_with(kind: str) -> None:
    """Padding changes nothing; the model's own treatment of its logits is kept."""
    model = tiny_model(kind).eval()
    samples = [make_sample(5, [2, 4]), make_sample(17, [1, 2, 16], member=1), make_sample(9, [8], member=2)]
    by_ids = {s.token_ids: s for s in samples}
    (batch,) = make_batches(samples, max_tokens=1000)
    scores = score_tokens(model, batch, temperature=0.7)
    assert torch.equal(scores.logprobs_BT.isnan(), ~batch.loss_mask_BT)
    for row, logprobs_T in enumerate(scores.logprobs_BT.tolist()):
        length = int((batch.segment_ids_BT[row] >= 0).sum())
        sample = by_ids[tuple(batch.token_ids_BT[row, :length].tolist())]
        expected = plain_logprobs(model, sample.token_ids, 0.7)
        trained = [t for t, m in enumerate(sample.loss_mask) if m]
        assert [logprobs_T[t] for t in trained] == pytest.approx([expected[t] for t in trained], abs=2e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_trainer_and_sampler_agree_at_every_temperature(temperature: float) -> None:
    """C09"""
    model = tiny_model("qwen3").eval()
    policy = LocalPolicy(model)
    prompt = (3, 14, 15, 9, 2)

    async def sample():
        requests = [
            GenerateRequest(
                key=RequestKey(draw=0, member=m, attempt=0, turn=0),
                prompt_ids=prompt,
                sampling=SamplingParams(temperature=temperature, max_new_tokens=20),
                seed=m,
            )
            for m in range(4)
        ]
        return await asyncio.gather(*(policy.generate(r) for r in requests))

    samples = []
    for member, completion in enumerate(asyncio.run(sample())):
        ids = (*prompt, *completion.token_ids)
        sample_row = make_sample(len(ids), range(len(prompt), len(ids)), member=member)
        logprobs = (NAN,) * len(prompt) + completion.logprobs
        samples.append(replace(sample_row, token_ids=ids, rollout_logprobs=logprobs))
    for batch in make_batches(samples, max_tokens=1000):
        logprobs_BT = model_logprobs(model, batch, temperature=temperature)
        assert (logprobs_BT - batch.rollout_logprobs_BT)[batch.loss_mask_BT].abs().max() < 1e-5


def test_temperature_scales_logits_before_the_softmax() -> None:
    """C09: logits [2, 0, -1] give -0.0206 at T = 0.5 and -0.1698 at T = 1."""

    class ThreeLogits(torch.nn.Module):
        def forward(self, input_ids, **_):
            logits = torch.tensor([2.0, 0.0, -1.0]).expand(*input_ids.shape, 3)
            return type("Output", (), {"logits": logits})

    sample = replace(make_sample(2, [1]), token_ids=(0, 0))
    (batch,) = make_batches([sample], max_tokens=10)
    for temperature, expected in ((0.5, -0.0206), (1.0, -0.1698)):
        assert model_logprobs(ThreeLogits(), batch, temperature=temperature)[0, 1].item() == pytest.approx(
            expected, abs=5e-5
        )
    with pytest.raises(ValueError, match="temperature is 0"):
        model_logprobs(ThreeLogits(), batch, temperature=0)


def test_packed_segments_do_not_see_each_other() -> None:
    model = tiny_model("qwen3").eval()
    a, b = make_sample(6, range(1, 6)), make_sample(5, range(1, 5), member=1)
    ids = torch.tensor([[*a.token_ids, *b.token_ids]])
    floats = torch.zeros(ids.shape)
    batch = Batch(
        token_ids_BT=ids,
        loss_mask_BT=torch.ones_like(ids).bool(),
        rollout_logprobs_BT=floats,
        old_logprobs_BT=floats,
        advantages_BT=floats,
        segment_ids_BT=torch.tensor([[0] * 6 + [1] * 5]),
        position_ids_BT=torch.tensor([[*range(6), *range(5)]]),
        denominator=9,
        num_sequences=2,
        has_signal=True,
    )
    logprobs = model_logprobs(model, batch, temperature=1.0)[0].tolist()
    expected = plain_logprobs(model, a.token_ids) + plain_logprobs(model, b.token_ids)
    assert logprobs == pytest.approx(expected, abs=2e-5, nan_ok=True)
    with pytest.raises(ValueError, match="several samples a row are not supported for model type 'gemma2'"):
        model_logprobs(tiny_model("gemma2"), batch, temperature=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_computation(kind: str) -> None:
    model = tiny_model(kind).eval()
    (batch,) = make_batches(mixed_samples(num_draws=1), max_tokens=1000)
    logprobs_BT = model_logprobs(model, batch, temperature=1.0)
    logprobs_BT[batch.loss_mask_BT].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mask_BT = (batch.segment_ids_BT >= 0).long()
    logits_BTV = model(input_ids=batch.token_ids_BT, attention_mask=mask_BT).logits[:, :-1]
    plain_BT = logits_BTV.log_softmax(-1).gather(2, batch.token_ids_BT[:, 1:].unsqueeze(2)).squeeze(2)
    plain_BT[batch.loss_mask_BT[:, 1:]].sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4), name


def test_entropy_with_impossible_tokens_is_finite_in_value_and_gradient() -> None:
    """C06"""
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    value = entropy(logits)
    value.backward()
    assert value.item() == pytest.approx(math.log(2))
    assert logits.grad is not None and logits.grad.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)
    other = torch.tensor([[2.0, 0.0, -1.0], [0.3, 0.2, 5.0]])
    expected = torch.distributions.Categorical(logits=other).entropy()
    assert torch.allclose(entropy(other), expected, atol=1e-6)


def test_entropy_metric_is_of_the_distribution_each_token_was_drawn_from() -> None:
    model = tiny_model("qwen3").eval()
    sample = make_sample(8, [3, 7])
    (batch,) = make_batches([sample], max_tokens=100)
    scores = score_tokens(model, batch, temperature=1.0)
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([sample.token_ids])).logits[0]
    expected = torch.distributions.Categorical(logits=logits_TV[[2, 6]]).entropy()
    assert torch.allclose(scores.entropy_BT[0, [3, 7]], expected, atol=1e-5)
    assert not scores.entropy_BT.requires_grad
