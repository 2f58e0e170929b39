"""Packing, ranks and padding: where samples go, and that values and gradients do not depend on it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_data import SIZES, make_sample, mixed_samples, tiny_model

from quintain.trainer.batch import Batch, batches_of_ranks, make_batches, padding_frac
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.learner import Learner
from quintain.trainer.logprobs import score_tokens
from quintain.trainer.packing import ranks_of, rows_of
from quintain.trainer.sample import Sample

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def samples_of(lengths: list[int], *, silent_every: int = 0) -> list[Sample]:
    """A sample a length, its last token trained; every `silent_every`-th with advantage 0."""
    return [
        make_sample(n, [n - 1], draw=d, advantage=0.0 if silent_every and d % silent_every == 0 else 1.0)
        for d, n in enumerate(lengths)
    ]


def segments(batches: list[Batch]) -> list[tuple[int, ...]]:
    """Token ids of every segment of every row."""
    found = []
    for batch in batches:
        for ids_T, segments_T in zip(batch.token_ids_BT.tolist(), batch.segment_ids_BT.tolist(), strict=True):
            pairs = zip(segments_T, ids_T, strict=True)
            for segment, tokens in itertools.groupby(pairs, key=lambda pair: pair[0]):
                if segment >= 0:
                    found.append(tuple(token for _, token in tokens))
    return found


@settings(max_examples=50)
@given(LENGTHS, st.integers(8, 200), st.sampled_from([None, 64, 200]), st.randoms(use_true_random=False))
def test_packed_rows_hold_every_sample_once_within_the_budget_in_an_order_of_their_own(
    lengths: list[int], max_tokens: int, row_tokens: int | None, rng: random.Random
) -> None:
    samples = samples_of(lengths)
    batches = make_batches(samples, max_tokens=max_tokens, packed=True, row_tokens=row_tokens)
    assert sorted(segments(batches)) == sorted(s.token_ids for s in samples)
    width = max(row_tokens or 0, *lengths)
    assert all(batch.token_ids_BT.shape[1] <= width for batch in batches)
    assert all(batch.num_tokens <= max_tokens or len(batch.token_ids_BT) == 1 for batch in batches)
    assert {batch.denominator for batch in batches} == {len(samples)}
    shuffled = rng.sample(samples, len(samples))
    again = make_batches(shuffled, max_tokens=max_tokens, packed=True, row_tokens=row_tokens)
    assert [b.token_ids_BT.tolist() for b in again] == [b.token_ids_BT.tolist() for b in batches]


def test_positions_restart_in_every_segment_and_in_the_padding_behind() -> None:
    samples = [make_sample(5, [4]), make_sample(3, [1], draw=1), make_sample(9, [8], draw=2)]
    (batch,) = make_batches(samples, max_tokens=100, packed=True)
    assert batch.segment_ids_BT.tolist() == [[0] * 9, [0] * 5 + [1] * 3 + [-1]]
    assert batch.position_ids_BT.tolist() == [[*range(9)], [*range(5), *range(3), 0]]
    assert batch.is_packed


@settings(max_examples=50)
@given(LENGTHS, st.integers(1, 5), st.integers(8, 100), st.booleans(), st.sampled_from([0, 2, 3]))
def test_ranks_get_equally_many_micro_batches_that_agree_on_signal_and_share_the_denominator(
    lengths: list[int], num_ranks: int, max_tokens: int, packed: bool, silent_every: int
) -> None:
    samples = samples_of(lengths, silent_every=silent_every)
    ranks = batches_of_ranks(samples, num_ranks=num_ranks, max_tokens=max_tokens, packed=packed)
    assert len(ranks) == num_ranks
    assert len({tuple(batch.has_signal for batch in batches) for batches in ranks}) == 1
    everything = [batch for batches in ranks for batch in batches]
    assert {batch.denominator for batch in everything} == {len(samples)}
    assert sum(int(batch.loss_mask_BT.sum()) for batch in everything) == len(samples)
    trained = [batch for batch in everything if batch.loss_mask_BT.any()]
    assert sorted(segments(trained)) == sorted(s.token_ids for s in samples)


@settings(max_examples=100)
@given(LENGTHS, st.integers(1, 6))
def test_ranks_differ_by_at_most_one_sample_in_the_sum_of_squared_lengths(lengths: list[int], num_ranks: int) -> None:
    loads = [sum(len(s.token_ids) ** 2 for s in part) for part in ranks_of(samples_of(lengths), num_ranks)]
    assert max(loads) - min(loads) <= max(lengths) ** 2


def test_unpacked_rows_are_single_samples_and_packed_ones_waste_less() -> None:
    samples = mixed_samples(num_draws=40)
    assert all(len(row) == 1 for row in rows_of(samples, width=None))
    plain = padding_frac(make_batches(samples, max_tokens=2000))
    packed = padding_frac(make_batches(samples, max_tokens=2000, packed=True, row_tokens=200))
    assert packed < plain / 2


def test_weightless_micro_batches_count_as_padding() -> None:
    first, second = batches_of_ranks([make_sample(10, [9])], num_ranks=2, max_tokens=100)
    assert (padding_frac(first), padding_frac(second)) == (0.0, 1.0)


def double_model(kind: str) -> Any:
    makers: dict[str, tuple[Any, Any]] = {
        "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=None)),
        "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config(**SIZES)),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES)),
    }
    if kind not in makers:
        return tiny_model(kind).double().eval()
    torch.manual_seed(3)
    model_class, config = makers[kind]
    return model_class(config).double().eval()


def values_and_gradients(model: Any, batches: list[Batch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model.zero_grad()
    values: list[float] = []
    for batch in batches:
        scores = score_tokens(model, batch, temperature=0.9)
        logprobs_N, advantages_N = scores.logprobs_BT[scores.trained_BT], batch.advantages_BT[scores.trained_BT]
        values += logprobs_N.tolist()
        (-(logprobs_N * advantages_N).sum() / batch.denominator).backward()
    return sorted(values), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral", "phi3", "gpt2"])
def test_values_and_gradients_do_not_depend_on_packing_or_padding(kind: str) -> None:
    """C16: in fp64, within 1e-10."""
    model, samples = double_model(kind), mixed_samples()
    expected, gradients = values_and_gradients(model, make_batches(samples, max_tokens=1))
    layouts: list[dict[str, Any]] = [
        {"max_tokens": 500, "packed": True, "row_tokens": 90},
        {"max_tokens": 120, "packed": True},
        {"max_tokens": 500},
    ]
    for layout in layouts:
        values, found = values_and_gradients(model, make_batches(samples, **layout))
        assert values == pytest.approx(expected, abs=1e-10)
        for name, gradient in gradients.items():
            assert (found[name] - gradient).abs().max() <= 1e-10 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_of_ranks_add_up_to_those_of_one_process(num_ranks: int) -> None:
    """C02: one denominator for all; a weightless micro-batch adds exactly 0."""
    model, samples = double_model("qwen3"), mixed_samples()
    _, expected = values_and_gradients(model, make_batches(samples, max_tokens=500))
    ranks = batches_of_ranks(samples, num_ranks=num_ranks, max_tokens=64)
    totals = [values_and_gradients(model, batches)[1] for batches in ranks]
    for name, gradient in expected.items():
        total = sum(part[name] for part in totals)
        assert (total - gradient).abs().max() <= 1e-10 * max(1.0, float(gradient.abs().max())), name
    _, alone = batches_of_ranks([make_sample(10, [9])], num_ranks=2, max_tokens=100)
    assert all(not gradient.any() for gradient in values_and_gradients(model, alone)[1].values())


def test_a_packed_learner_trains_the_same_weights_and_reports_less_padding() -> None:
    results = []
    for packing in (False, True):
        config = TrainerConfig(micro_batch_tokens=300, packing=packing)
        model = tiny_model().double()
        learner = Learner(model, AlgorithmConfig(learning_rate=1e-3, minibatches_per_step=2), config, temperature=1.0)
        results.append((learner.train_on(mixed_samples(num_draws=20)), dict(learner.model.named_parameters())))
    (plain, plain_weights), (packed, packed_weights) = results
    assert packed["train/loss"] == pytest.approx(plain["train/loss"], abs=1e-9)
    assert packed["train/padding_frac"] < plain["train/padding_frac"]
    for name, weight in plain_weights.items():
        assert torch.allclose(weight, packed_weights[name], rtol=0, atol=1e-9), name


def test_packing_is_refused_for_models_that_are_not_known_to_keep_segments_apart() -> None:
    with pytest.raises(ValueError, match=r"'gemma2'.*trainer\.packing = false"):
        Learner(tiny_model("gemma2"), AlgorithmConfig(), TrainerConfig(packing=True), temperature=1.0)
