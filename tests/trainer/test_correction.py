"""Importance weights towards the sampler, rejection and veto."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_data import ADVANTAGES_BT, MASK_BT, NEW_BT, OLD_BT, ROLLOUT_BT, loss_of, make_batch
from pydantic import ValidationError
from trainer_data import make_sample, mixed_samples, tiny_model

from quintain.trainer.aggregation import Sequences
from quintain.trainer.config import AlgorithmConfig, CorrectionConfig, TrainerConfig
from quintain.trainer.correction import importance_weights
from quintain.trainer.learner import Learner
from quintain.trainer.objective import Objective, totals_of, with_denominators

TWO = Sequences(index_N=torch.tensor([0, 0, 1]), lengths_S=torch.tensor([2, 1]))
LOG_RATIO_N = torch.tensor([math.log(4.0), 0.0, math.log(0.25)], dtype=torch.float64)


def weights_of(**settings: Any) -> list[float]:
    return importance_weights(LOG_RATIO_N, TWO, CorrectionConfig(**settings)).weight_N.tolist()


def test_weights_are_of_tokens_products_or_geometric_means_and_bounded() -> None:
    assert weights_of(weight="truncated") == pytest.approx([2.0, 1.0, 0.25])
    assert weights_of(weight="truncated", low=0.5) == pytest.approx([2.0, 1.0, 0.5])
    assert weights_of(weight="truncated", level="sequence", high=9.0) == pytest.approx([4.0, 4.0, 0.25])
    assert weights_of(weight="truncated", level="geometric", high=9.0) == pytest.approx([2.0, 2.0, 0.25])
    assert weights_of(weight="masked") == pytest.approx([0.0, 1.0, 0.25])
    assert weights_of(weight="masked", level="sequence") == pytest.approx([0.0, 0.0, 0.25])


def test_icepop_is_masked_weights_of_tokens_with_two_bounds() -> None:
    assert weights_of(weight="masked", level="token", low=0.5, high=5.0) == pytest.approx([4.0, 1.0, 0.0])


def test_weight_multiplies_the_clipped_loss_and_carries_no_gradient() -> None:
    """Decoupled PPO: behaviour, proximal and current policy are three."""
    lp = torch.tensor([[0.1, -0.3]], dtype=torch.float64, requires_grad=True)
    settings: dict[str, Any] = {"correction": {"weight": "truncated", "high": 10.0}}
    parts = loss_of(lp, [0.0, 0.0], [1.0, -1.0], rollout=[math.log(0.5), math.log(2.0)], **settings)
    parts.loss.backward()
    expected = (2.0 * -math.exp(0.1) + 0.5 * 0.8) / 2
    assert parts.loss.item() == pytest.approx(expected)
    assert lp.grad is not None and lp.grad[0].tolist() == pytest.approx([-math.exp(0.1), 0.0])
    assert parts.correction_sum.item() == pytest.approx(2.5) and parts.correction_max.item() == pytest.approx(2.0)
    assert parts.num_bounded == 0


def rejected(correction: dict[str, Any], rollout: Any = ROLLOUT_BT):
    batch = make_batch(OLD_BT, ADVANTAGES_BT, MASK_BT, rollout=rollout)
    objective = Objective(AlgorithmConfig(correction=CorrectionConfig(**correction)))
    kept = objective.reject([batch])
    return with_denominators(kept, [totals_of(kept)])[0]


def test_rejected_sequences_and_tokens_leave_numerator_and_denominators() -> None:
    """C03"""
    rollout_BT = OLD_BT.clone()
    rollout_BT[1] += math.log(4.0)
    kept = rejected({"reject_low": 0.5, "reject_high": 2.0}, rollout_BT)
    assert kept.loss_mask_BT.tolist() == MASK_BT.where(torch.tensor([[True], [False], [True], [True]]), False).tolist()
    assert kept.denominator == int(MASK_BT.sum()) - 4 and kept.num_sequences == 3
    rollout_BT = OLD_BT.clone()
    rollout_BT[0, 0] += math.log(4.0)
    kept = rejected({"reject_level": "token", "reject_low": 0.5}, rollout_BT)
    assert not kept.loss_mask_BT[0, 0] and kept.denominator == int(MASK_BT.sum()) - 1 and kept.num_sequences == 4


def test_veto_takes_out_a_sequence_for_one_token_that_became_impossible() -> None:
    rollout_BT = OLD_BT.clone()
    rollout_BT[3, 2] += math.log(1e5)
    kept = rejected({"veto": 1e-4}, rollout_BT)
    assert kept.loss_mask_BT.any(1).tolist() == [True, True, True, False] and kept.num_sequences == 3
    assert rejected({"veto": 1e-6}, rollout_BT).num_sequences == 4


def test_a_step_in_which_everything_is_rejected_has_a_loss_of_zero() -> None:
    kept = rejected({"reject_high": 0.001})
    assert not kept.loss_mask_BT.any() and (kept.denominator, kept.num_sequences) == (1, 1)


def test_learner_leaves_rejected_samples_out_as_if_they_had_never_been_there() -> None:
    """C03 with a model: the far-off samples change neither the weights nor the loss."""
    model = tiny_model()
    near = mixed_samples(rollout_near=model)
    far = [replace(s, draw=99 + i) for i, s in enumerate(mixed_samples(rollout_near=model, rollout_shift=5.0)[:3])]

    def trained(samples, **settings: Any):
        algorithm = AlgorithmConfig(learning_rate=1e-2, minibatches_per_step=1, **settings)
        learner = Learner(tiny_model(), algorithm, TrainerConfig(micro_batch_tokens=100), temperature=1.0)
        return learner.train_on(samples), {n: p.detach().clone() for n, p in learner.model.named_parameters()}

    metrics, weights = trained([*near, *far], correction=CorrectionConfig(reject_low=0.5, reject_high=2.0))
    plain_metrics, plain_weights = trained(near)
    num_far, num_near = (sum(s.num_trained_tokens for s in part) for part in (far, near))
    assert metrics["train/num_trained_tokens"] == plain_metrics["train/num_trained_tokens"] == num_near
    assert metrics["train/rejected_tokens_frac"] == pytest.approx(num_far / (num_far + num_near))
    assert metrics["train/loss"] == pytest.approx(plain_metrics["train/loss"], abs=1e-6)
    assert all(torch.allclose(w, plain_weights[n], atol=1e-5) for n, w in weights.items())


def test_correction_metrics_are_there_only_where_something_is_corrected() -> None:
    samples = [make_sample(12, [4, 5], advantage=a, member=m) for m, a in enumerate((1.0, -1.0))]
    on = AlgorithmConfig(correction=CorrectionConfig(weight="truncated"), dual_clip=3.0)
    metrics = Learner(tiny_model(), on, TrainerConfig(), temperature=1.0).train_on(samples)
    names = {name for name in metrics if "correction" in name or "dual" in name}
    assert names == {
        "train/correction_weight_mean",
        "train/correction_ratio_max",
        "train/correction_bounded_frac",
        "train/dual_clip_frac",
    }
    plain = Learner(tiny_model(), AlgorithmConfig(), TrainerConfig(), temperature=1.0).train_on(samples)
    assert not names & plain.keys()


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"loss": "gspo"}, "aggregation = seq-mean-token-mean"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip belongs to loss = ppo"),
        ({"loss": "reinforce", "minibatches_per_step": 2}, "minibatches_per_step = 1"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "norm_tokens"),
        ({"norm_tokens": 6}, "seq-mean-token-sum-norm"),
        ({"old_logprobs": "rollout", "correction": {"weight": "masked"}}, "old_logprobs = recompute"),
        ({"old_logprobs": "rollout", "correction": {"veto": 0.1}}, "old_logprobs = recompute"),
        ({"correction": {"low": 3.0}}, "must be below high"),
        ({"correction": {"reject_low": 3.0, "reject_high": 2.0}}, "must be below reject_high"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_remedy(settings, remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        AlgorithmConfig(**settings)


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=6), st.sampled_from(["token", "sequence", "geometric"]))
def test_weights_are_finite_and_within_their_bounds(log_ratios: list[float], level: Any) -> None:
    values_N = torch.tensor(log_ratios, dtype=torch.float64)
    one = Sequences(index_N=torch.zeros(len(values_N)).long(), lengths_S=torch.tensor([len(values_N)]))
    for weight in ("truncated", "masked"):
        config = CorrectionConfig(weight=weight, level=level, low=0.5, high=5.0)
        found_N = importance_weights(values_N, one, config).weight_N
        assert bool(((found_N == 0) | ((found_N >= 0.5) & (found_N <= 5.0))).all())


def test_a_current_policy_far_from_the_sampler_still_has_a_finite_loss() -> None:
    parts = loss_of(NEW_BT, OLD_BT, ADVANTAGES_BT, rollout=OLD_BT + 500, correction={"weight": "truncated"})
    assert parts.loss.isfinite()
