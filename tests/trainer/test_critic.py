"""The critic: aligned with the policy's tokens, clipped, trained on returns, whole after a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_data import mixed_samples, tiny_model

from quintain.trainer.checkpoint import CheckpointError, Checkpoints, SavedTogether
from quintain.trainer.config import AlgorithmConfig, CriticConfig, TrainerConfig
from quintain.trainer.credit import Credit
from quintain.trainer.critic import Critic, value_loss
from quintain.trainer.learner import Learner
from quintain.trainer.metrics import METRICS


def make_critic(*, micro_batch_tokens: int = 8192, minibatches: int = 1, **settings: Any) -> Critic:
    critic = CriticConfig(**({"learning_rate": 1e-2} | settings))
    config = AlgorithmConfig(advantage="gae", critic=critic, minibatches_per_step=minibatches)
    return Critic(tiny_model(), config, micro_batch_tokens=micro_batch_tokens)


def with_head(critic: Critic) -> Critic:
    torch.manual_seed(1)
    with torch.no_grad():
        critic.model.weight_D.normal_()
    return critic


def batch_for(critic: Critic, *, target: float = 1.0) -> Credit:
    """Every token's return is `target` for draws of even number and 0 for the others."""
    samples = mixed_samples()
    returns = [[(target if s.draw % 2 == 0 else 0.0) if m else math.nan for m in s.loss_mask] for s in samples]
    return Credit(samples=samples, advantages_P_G=[], values=critic.values(samples), returns=returns)


def test_value_of_a_token_is_the_heads_answer_at_the_position_before_it() -> None:
    critic = with_head(make_critic(micro_batch_tokens=64))
    samples = mixed_samples()
    for sample, values in zip(samples, critic.values(samples), strict=True):
        with torch.no_grad():
            hidden_TD = critic.model.body(torch.tensor([sample.token_ids])).last_hidden_state[0]
        plain = (hidden_TD @ critic.model.weight_D).tolist()
        expected = [plain[t - 1] if m else math.nan for t, m in enumerate(sample.loss_mask)]
        assert values == pytest.approx(expected, abs=1e-4, nan_ok=True)


def test_what_comes_at_and_after_a_token_does_not_change_its_value() -> None:
    critic = with_head(make_critic())
    sample = mixed_samples()[0]
    t = max(i for i, m in enumerate(sample.loss_mask) if m)
    changed = type(sample)(
        token_ids=(*sample.token_ids[:t], (sample.token_ids[t] + 1) % 61),
        **{n: getattr(sample, n) for n in ("loss_mask", "rollout_logprobs", "advantages", "policy_versions")},
        draw=0,
        member=1,
    )
    first, second = critic.values([sample, changed])
    assert first[t] == pytest.approx(second[t], abs=1e-6)


def test_first_values_are_zero() -> None:
    critic = make_critic()
    assert {v for values in critic.values(mixed_samples()) for v in values if not math.isnan(v)} == {0.0}


def test_value_loss_is_the_larger_of_plain_and_clipped() -> None:
    values, old, returns = torch.tensor([0.5, 0.5]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.4])
    parts = value_loss(values, old, returns, value_clip=0.2)
    assert parts.loss.item() == pytest.approx((0.8**2 + 0.2**2) / 2) and parts.num_clipped == 2
    assert value_loss(values, old, returns, value_clip=None).loss.item() == pytest.approx((0.5**2 + 0.1**2) / 2)


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3))
def test_value_clip_never_lowers_the_loss(value: float, old: float, target: float) -> None:
    numbers = [torch.tensor([x], dtype=torch.float64) for x in (value, old, target)]
    assert value_loss(*numbers, value_clip=0.2).loss >= value_loss(*numbers, value_clip=None).loss


def test_critic_learns_its_targets_and_reports_registered_metrics() -> None:
    critic = make_critic(value_clip=None, learning_rate=3e-3, minibatches=2)
    first = critic.train_on(batch_for(critic))
    for _ in range(40):
        metrics = critic.train_on(batch_for(critic))
    assert metrics["critic/value_loss"] < first["critic/value_loss"] / 4
    assert metrics["critic/explained_variance"] > 0.5 and first["critic/explained_variance"] == pytest.approx(0)
    assert metrics.keys() <= METRICS.keys() and all(math.isfinite(v) for v in metrics.values())


def test_gradient_is_the_same_for_every_micro_batch_size() -> None:
    """C01"""

    def gradient(micro_batch_tokens: int) -> torch.Tensor:
        critic = with_head(make_critic(micro_batch_tokens=micro_batch_tokens, max_grad_norm=1e9))
        critic.model.double()
        seen: list[torch.Tensor] = []

        def keep(*_: Any) -> None:
            seen.append(torch.cat([p.grad.flatten() for p in critic.model.parameters() if p.grad is not None]))

        critic.optimizer.register_step_pre_hook(keep)
        critic.train_on(batch_for(critic))
        return seen[0]

    whole = gradient(8192)
    for micro_batch_tokens in (1, 70):
        assert (gradient(micro_batch_tokens) - whole).abs().max() <= 1e-10 * max(1.0, whole.abs().max().item())


def test_tokens_without_a_target_give_no_gradient() -> None:
    """Credit by turn: one target a turn."""
    critic = with_head(make_critic())
    full = batch_for(critic)
    assert full.returns is not None
    sparse = [[r if t % 2 else math.nan for t, r in enumerate(returns)] for returns in full.returns]
    metrics = critic.train_on(Credit(samples=full.samples, advantages_P_G=[], values=full.values, returns=sparse))
    assert math.isfinite(metrics["critic/value_loss"]) and math.isfinite(metrics["critic/grad_norm"])


def test_a_step_with_a_nonfinite_gradient_is_skipped_and_counted() -> None:
    critic = make_critic()
    critic.model.weight_D.register_hook(lambda gradient: gradient * math.nan)
    before = {n: p.clone() for n, p in critic.model.named_parameters()}
    assert critic.train_on(batch_for(critic))["critic/num_skipped_steps"] == 1
    assert all(torch.equal(p, before[n]) for n, p in critic.model.named_parameters())


def test_a_checkpoint_holds_the_critic_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    learner = Learner(tiny_model(), AlgorithmConfig(), TrainerConfig(), temperature=1.0)
    critic = make_critic()
    critic.train_on(batch_for(critic))
    saved = SavedTogether(learner, critic)
    assert saved.checkpoint_bytes() > learner.checkpoint_bytes()
    path = Checkpoints(tmp_path, keep=1).save(1, saved, {})
    again = make_critic()
    again.load(path)
    assert again.train_on(batch_for(again)) == critic.train_on(batch_for(critic))
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), critic.model.parameters(), strict=True))
    assert learner.policy_version == 0


def test_a_diverged_critic_is_not_saved_and_a_missing_one_is_named(tmp_path: Path) -> None:
    critic = make_critic()
    with pytest.raises(CheckpointError, match="run without a critic"):
        critic.load(tmp_path)
    with torch.no_grad():
        critic.model.bias.fill_(math.nan)
    with pytest.raises(CheckpointError, match=r"critic diverged.*algorithm\.critic\.learning_rate"):
        critic.save(tmp_path)
