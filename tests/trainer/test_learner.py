"""`Learner.train_on`: one batch in, optimizer steps and metrics out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from trainer_data import NAN, make_sample, mixed_samples, tiny_model

from quintain.trainer.batch import EmptyBatchError, make_batches
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.learner import DivergedError, Learner, learning_rate_factor
from quintain.trainer.logprobs import model_logprobs
from quintain.trainer.metrics import METRICS


def learner_of(model: Any = None, *, micro_batch_tokens: int = 8192, temperature: float = 1.0, **algorithm) -> Learner:
    settings: dict[str, Any] = {"learning_rate": 1e-2} | algorithm
    trainer = TrainerConfig(micro_batch_tokens=micro_batch_tokens)
    return Learner(model or tiny_model(), AlgorithmConfig(**settings), trainer, temperature=temperature)


def gradients_of(samples, *, micro_batch_tokens: int = 8192, **algorithm) -> dict[str, torch.Tensor]:
    """The gradient that the optimizer was given in one step."""
    learner = learner_of(micro_batch_tokens=micro_batch_tokens, max_grad_norm=1e9, **algorithm)
    seen: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})

    learner.optimizer.optimizer.register_step_pre_hook(keep)
    learner.train_on(samples)
    return seen


def sampled_by(model, samples, *, temperature: float = 1.0):
    """The samples with the log-probs that a sampler with the model's weights would have reported."""
    model.eval()
    changed = []
    for sample in samples:
        (batch,) = make_batches([sample], max_tokens=1)
        with torch.no_grad():
            logprobs = model_logprobs(model, batch, temperature=temperature)[0].tolist()
        changed.append(replace(sample, rollout_logprobs=tuple(logprobs)))
    return changed


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


@pytest.mark.parametrize("micro_batch_tokens", [64, 70, 100, 200])
def test_token_mean_gradient_is_the_same_for_every_micro_batch_split(micro_batch_tokens: int) -> None:
    """C01"""
    samples = mixed_samples()
    whole = gradients_of(samples)
    split = gradients_of(samples, micro_batch_tokens=micro_batch_tokens)
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        assert torch.allclose(split[name], gradient, rtol=1e-4, atol=1e-6), name


def test_loss_is_the_token_mean_of_the_whole_step() -> None:
    """C01: lengths 1 and 3, advantages +1 and -1, ratio 1."""
    samples = [make_sample(20, [5], advantage=1.0), make_sample(60, [5, 6, 7], advantage=-1.0, member=1)]
    for micro_batch_tokens in (64, 8192):
        metrics = learner_of(micro_batch_tokens=micro_batch_tokens).train_on(samples)
        assert metrics["train/loss"] == 0.5 and metrics["train/num_trained_tokens"] == 4


def test_rows_without_trained_tokens_change_nothing() -> None:
    """C03: the batch that never had the masked rows."""
    samples = mixed_samples()
    masked = [make_sample(25, [], draw=9, member=m) for m in range(3)]
    with_masked, without = learner_of(), learner_of()
    assert with_masked.train_on([*masked, *samples]) == without.train_on(samples)
    assert all(torch.equal(w, weights_of(without)[n]) for n, w in weights_of(with_masked).items())


def test_first_step_has_a_ratio_of_exactly_one_and_agrees_with_the_sampler() -> None:
    model = tiny_model()
    samples = sampled_by(model, mixed_samples(), temperature=0.8)
    metrics = learner_of(model, temperature=0.8, micro_batch_tokens=100).train_on(samples)
    assert metrics["train/ratio_max"] == metrics["train/ratio_mean"] == metrics["train/sequence_ratio_max"] == 1.0
    assert metrics["train/clip_frac"] == metrics["train/num_clamped_tokens"] == 0
    assert metrics["mismatch/logprob_gap_max"] < 5e-5 and 0 <= metrics["mismatch/k3"] < 1e-8


def test_mismatch_leaves_out_tool_tokens_whatever_stands_there() -> None:
    """C11: 4 sampled tokens on which both agree, 60 tool tokens with dummy log-probs."""
    model = tiny_model()
    (sample,) = sampled_by(model, [make_sample(70, [5, 6, 68, 69])])
    dummy = tuple(lp if m else -9.0 for lp, m in zip(sample.rollout_logprobs, sample.loss_mask, strict=True))
    metrics = learner_of(model).train_on([replace(sample, rollout_logprobs=dummy)])
    assert metrics["mismatch/logprob_gap_max"] < 1e-5 and metrics["mismatch/k3"] < 1e-9


@pytest.mark.parametrize("placeholder", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_placeholders_at_untrained_positions_change_no_metric_and_no_weight(placeholder, old_logprobs) -> None:
    """C12"""
    trained = [4, 5, 9]
    results = []
    for fill in (NAN, placeholder):
        samples = [make_sample(12, trained, advantage=a, member=m, placeholder=fill) for m, a in enumerate((1.0, -1.0))]
        learner = learner_of(old_logprobs=old_logprobs, kl_coef=0.1)
        results.append((learner.train_on(samples), weights_of(learner)))
    (first, first_weights), (second, second_weights) = results
    assert first == second
    assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)


def test_every_metric_is_registered_and_finite() -> None:
    metrics = learner_of(kl_coef=0.1, minibatches_per_step=2).train_on(mixed_samples())
    assert metrics.keys() <= METRICS.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert "train/kl_reference" not in learner_of().train_on(mixed_samples())


def test_several_optimizer_steps_a_batch_keep_the_first_policy_as_the_old_one() -> None:
    learner = learner_of(minibatches_per_step=4, learning_rate=1e-3)
    samples = sampled_by(learner.model, mixed_samples())
    first = weights_of(learner)
    metrics = learner.train_on(samples)
    assert metrics["train/minibatch_steps"] == 4 and metrics["policy/version"] == learner.policy_version == 4
    assert metrics["train/ratio_max"] > 1
    # All of the batch was compared before its first update, else the sampler would seem to disagree.
    assert metrics["mismatch/logprob_gap_max"] < 5e-5
    assert any(not torch.equal(w, first[n]) for n, w in weights_of(learner).items())


def test_several_steps_with_no_movement_have_a_ratio_of_exactly_one() -> None:
    metrics = learner_of(minibatches_per_step=4, learning_rate=1e-30, micro_batch_tokens=64).train_on(mixed_samples())
    assert metrics["train/ratio_max"] == metrics["train/ratio_mean"] == 1.0


def test_old_logprobs_may_be_the_samplers() -> None:
    metrics = learner_of(old_logprobs="rollout").train_on([make_sample(9, [4], rollout_logprob=-40.0)])
    assert metrics["train/ratio_max"] > 1e6 and metrics["train/num_clamped_tokens"] == 1


def test_a_step_with_a_nonfinite_gradient_is_skipped_counted_and_does_not_raise_the_version() -> None:
    learner = learner_of()
    learner.train_on(mixed_samples())
    before = weights_of(learner)
    handle = learner.model.lm_head.weight.register_hook(lambda gradient: gradient * NAN)
    metrics = learner.train_on(mixed_samples())
    handle.remove()
    assert metrics["train/num_skipped_steps"] == 1 and learner.num_skipped_steps == 1
    assert metrics["policy/version"] == learner.policy_version == 1
    assert math.isnan(metrics["train/grad_norm"])
    assert all(torch.equal(w, before[n]) for n, w in weights_of(learner).items())
    assert learner.train_on(mixed_samples())["policy/version"] == 2


def test_several_skipped_steps_in_a_row_end_the_run_and_name_the_remedy() -> None:
    learner = learner_of()
    handle = learner.model.lm_head.weight.register_hook(lambda gradient: gradient * NAN)
    for _ in range(2):
        learner.train_on(mixed_samples())
    handle.remove()
    learner.train_on(mixed_samples())  # a step that is taken starts the count again
    learner.model.lm_head.weight.register_hook(lambda gradient: gradient * NAN)
    for _ in range(2):
        learner.train_on(mixed_samples())
    with pytest.raises(
        DivergedError, match=r"3 optimizer steps in a row.*lower algorithm\.learning_rate.*max_grad_norm"
    ):
        learner.train_on(mixed_samples())
    assert all(bool(w.isfinite().all()) for w in weights_of(learner).values())


def test_nothing_trainable_is_refused_and_leaves_the_weights_alone() -> None:
    """A04"""
    learner = learner_of()
    before = weights_of(learner)
    for samples in ([], [make_sample(9, [])]):
        with pytest.raises(EmptyBatchError):
            learner.train_on(samples)
    assert learner.policy_version == 0
    assert all(torch.equal(w, before[n]) for n, w in weights_of(learner).items())


def test_staleness_counts_from_the_oldest_trained_token_to_the_first_optimizer_step() -> None:
    learner = learner_of(minibatches_per_step=2)
    assert learner.train_on(mixed_samples())["policy/staleness_max"] == 0
    samples = [make_sample(9, [4, 5], version=2), make_sample(9, [4, 5], draw=1, version=1)]
    assert learner.train_on(samples)["policy/staleness_max"] == 1


def test_rows_with_advantage_zero_count_in_the_mean_but_need_no_backward_pass() -> None:
    silent = [make_sample(12, [3, 4], advantage=0.0, draw=9, member=m) for m in range(3)]
    samples = [*mixed_samples(), *silent]
    explicit = gradients_of(samples, kl_coef=1e-30)  # a KL term makes every row take the backward pass
    for name, gradient in gradients_of(samples).items():
        assert torch.allclose(gradient, explicit[name], rtol=1e-4, atol=1e-6), name
    assert learner_of().train_on(samples)["train/num_trained_tokens"] == sum(s.num_trained_tokens for s in samples)


def test_a_batch_without_any_signal_is_still_a_step_with_a_gradient_of_zero() -> None:
    learner = learner_of()
    metrics = learner.train_on([make_sample(12, [3, 4], advantage=0.0, member=m) for m in range(3)])
    assert metrics["train/grad_norm"] == 0 and metrics["policy/version"] == 1
    assert metrics["train/entropy"] > 0
    learner.train_on(mixed_samples())
    before = weights_of(learner)
    learner.train_on([make_sample(12, [3, 4], advantage=0.0)])
    assert any(not torch.equal(w, before[n]) for n, w in weights_of(learner).items())  # Adam's momentum


def test_dropout_is_off_so_that_the_trained_policy_is_the_sampled_one() -> None:
    model = tiny_model("gpt2", dropout=0.5).train()
    samples = sampled_by(tiny_model("gpt2", dropout=0.5), mixed_samples())
    assert learner_of(model).train_on(samples)["mismatch/logprob_gap_max"] < 5e-5


def test_model_is_trained_in_place_so_that_an_in_process_sampler_has_the_live_weights() -> None:
    model = tiny_model()
    before = model.lm_head.weight.detach().clone()
    assert learner_of(model).model is model
    learner_of(model).train_on(mixed_samples())
    assert not torch.equal(model.lm_head.weight, before)


def test_kl_term_pulls_towards_the_model_that_the_run_started_from() -> None:
    free, held = learner_of(), learner_of(kl_coef=10.0)
    for _ in range(3):
        free.train_on(mixed_samples())
        metrics = held.train_on(mixed_samples())
    assert metrics["train/kl_reference"] > 0
    start = dict(tiny_model().named_parameters())

    def distance(learner: Learner) -> float:
        return sum((w - start[name]).abs().sum().item() for name, w in weights_of(learner).items())

    assert distance(held) < distance(free)


def test_better_tries_become_likelier_and_worse_ones_less_likely() -> None:
    learner = learner_of(learning_rate=1e-3)
    samples = [make_sample(12, [6, 7, 8], advantage=a, member=m) for m, a in enumerate((1.0, -1.0))]

    def total(sample) -> float:
        (batch,) = make_batches([sample], max_tokens=100)
        with torch.no_grad():
            return model_logprobs(learner.model, batch, temperature=1.0)[batch.loss_mask_BT].sum().item()

    before = [total(s) for s in samples]
    learner.train_on(samples)
    after = [total(s) for s in samples]
    assert after[0] > before[0] and after[1] < before[1]


def test_learning_rate_warms_up_and_follows_its_schedule() -> None:
    def factors(schedule: str) -> list[float]:
        return [learning_rate_factor(schedule, step, warmup_steps=2, total_steps=6) for step in range(8)]

    assert factors("constant") == [0.5, 1, 1, 1, 1, 1, 1, 1]
    assert factors("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0.25, 0.25]
    assert factors("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0.146447, 0.146447], abs=1e-6)
    learner = learner_of(warmup_steps=4, learning_rate=0.4)
    assert [learner.train_on(mixed_samples())["train/learning_rate"] for _ in range(3)] == pytest.approx(
        [0.1, 0.2, 0.3]
    )
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.3)


def test_weight_decay_spares_norms_and_biases() -> None:
    groups = learner_of(weight_decay=0.1).optimizer.param_groups
    assert [(group["weight_decay"], {p.dim() for p in group["params"]}) for group in groups] == [(0.1, {2}), (0.0, {1})]


def test_same_samples_in_another_order_give_the_same_weights() -> None:
    """C14: shuffling rows changes nothing."""
    a, b = learner_of(), learner_of()
    assert a.train_on(mixed_samples()) == b.train_on(mixed_samples()[::-1])
    assert all(torch.equal(w, weights_of(b)[n]) for n, w in weights_of(a).items())
