"""The batch ledger, replaying its files, and the measures of mismatch and precision."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_data import make_sample, mixed_samples, tiny_model

from quintain.trainer.accuracy import PrecisionUnavailableError, compare
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.learner import Learner
from quintain.trainer.ledger import BatchFileError, BatchLedger, BatchRefusedError, first_violation, read_batch
from quintain.trainer.mismatch import mismatch
from quintain.trainer.replay import replay

GOOD = make_sample(6, [3, 4], draw=7, member=1)
SETTINGS = {
    "algorithm": AlgorithmConfig(learning_rate=1e-3).model_dump(mode="json"),
    "trainer": TrainerConfig(micro_batch_tokens=100).model_dump(mode="json"),
    "temperature": 0.9,
}


def with_value(field: str, value: float):
    values = list(getattr(GOOD, field))
    values[3] = value
    return replace(GOOD, **{field: tuple(values)})


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (with_value("rollout_logprobs", math.nan), "finite sampler log-prob: it is nan"),
        (with_value("rollout_logprobs", 0.5), "a log-prob is at most 0: it is 0.5"),
        (with_value("advantages", math.inf), "finite advantage: it is inf"),
        (with_value("policy_versions", 5), "no version is above the learner's 4: it is 5"),
        (with_value("policy_versions", -1), "known version: it is -1"),
        (with_value("token_ids", 61), "token ids are in the vocabulary: id 61"),
    ],
)
def test_a_broken_rule_is_named_with_sample_and_token_and_the_batch_is_kept(tmp_path: Path, sample, words) -> None:
    ledger = BatchLedger(tmp_path, settings=SETTINGS, group_size=8, vocab_size=61, keep_all=False)
    with pytest.raises(BatchRefusedError) as refused:
        ledger.admit(12, [make_sample(6, [3]), sample], policy_version=4)
    assert "sample 7/1: token 3: " in str(refused.value) and words in str(refused.value)
    saved = read_batch(tmp_path / "refused" / "step_000012.jsonl")
    assert saved.violation is not None and words in saved.violation
    assert repr(saved.samples[1]) == repr(sample) and saved.policy_version == 4


def test_rules_about_groups_and_rows() -> None:
    def broken(samples, group_size: int = 8) -> str:
        return str(first_violation(samples, policy_version=0, group_size=group_size, max_tokens=20))

    assert "at most group_size members: draw 0 has 2 > 1" in broken([make_sample(5, [1], member=m) for m in (0, 1)], 1)
    assert "every row is there once: a row of 7/1 is there 2 times" in broken([GOOD, GOOD])
    assert "some token is trained" in broken([make_sample(5, [])])
    assert "fits the model's context: 21 tokens > 20" in broken([make_sample(21, [1])])
    assert first_violation([GOOD], policy_version=0, group_size=1) is None


def test_a_kept_batch_replays_to_the_loss_and_gradient_norm_of_the_run(tmp_path: Path) -> None:
    samples = mixed_samples()
    ledger = BatchLedger(tmp_path, settings=SETTINGS, group_size=8, vocab_size=61, keep_all=True)
    ledger.admit(1, samples, policy_version=0)
    (replayed,) = replay(tiny_model(), read_batch(tmp_path / "batches" / "step_000001.jsonl"))
    algorithm, trainer = AlgorithmConfig(learning_rate=1e-3), TrainerConfig(micro_batch_tokens=100)
    metrics = Learner(tiny_model(), algorithm, trainer, temperature=0.9).train_on(samples)
    assert replayed.loss == pytest.approx(metrics["train/loss"], rel=1e-6)
    assert replayed.grad_norm == pytest.approx(metrics["train/grad_norm"], rel=1e-5)
    assert replayed.num_trained_tokens == metrics["train/num_trained_tokens"]


def test_a_cut_off_batch_file_is_refused(tmp_path: Path) -> None:
    ledger = BatchLedger(tmp_path, settings=SETTINGS, group_size=8, vocab_size=61, keep_all=True)
    ledger.admit(1, mixed_samples(), policy_version=0)
    path = tmp_path / "batches" / "step_000001.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(BatchFileError, match="11 of 12 samples"):
        read_batch(path)


def test_mismatch_is_nothing_where_both_agree_and_as_computed_by_hand_elsewhere() -> None:
    same = mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0]))
    assert (same.gap_max, same.gap_mean, same.k3, same.ess_frac, same.prob_error) == (0, 0, 0, 1, 1)
    found = mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.5]))
    weight = math.exp(0.5)
    assert (found.gap_max, found.gap_mean) == (0.5, 0.25)
    assert found.k3 == pytest.approx((weight - 1.5) / 2)
    assert found.ess_frac == pytest.approx((1 + weight) ** 2 / (2 * (1 + weight**2)))
    assert found.prob_error == pytest.approx((1 + weight) / 2)
    with pytest.raises(ValueError, match="not finite"):
        mismatch(torch.tensor([math.nan]), torch.tensor([0.0]))


def test_two_precisions_of_one_batch_are_compared() -> None:
    model, samples = tiny_model(), mixed_samples(num_draws=2)
    same = compare(model, samples, precision="fp32", temperature=1.0, max_tokens=200)
    assert same.precision.gap_max == 0 and same.gradient_cosine == pytest.approx(1.0)
    rounded = compare(model, samples, precision="bf16", temperature=1.0, max_tokens=200)
    assert 1e-4 < rounded.precision.gap_max < 1 and 0.9 < rounded.gradient_cosine < 1
    assert same.used_own_advantages and same.engine == rounded.engine
    with pytest.raises(PrecisionUnavailableError, match="a CPU has no fp8 products"):
        compare(model, samples, precision="fp8", temperature=1.0, max_tokens=200)
