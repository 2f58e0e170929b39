"""Metrics of groups, and means that survive a NaN."""

from __future__ import annotations

import math
import re

import pytest
from trainer_data import group_of, make_group, make_trajectory

from quintain.agents.outcome import Outcome
from quintain.trainer.metrics import METRICS, mean_of_finite, num_nonfinite, rollout_metrics


def test_a_mean_leaves_nonfinite_values_out_and_says_how_many_it_is_over() -> None:
    """G06"""
    assert mean_of_finite([0.5, math.nan, 0.8]) == (pytest.approx(0.65), 2)
    assert mean_of_finite([math.nan, math.inf]) is None
    assert num_nonfinite({"a": 1.0, "b": math.nan, "c": -math.inf}) == 2


def test_rewards_are_averaged_over_valid_trajectories_only() -> None:
    """C15, G06"""
    metrics = rollout_metrics([group_of([1.0, 0.0, None, None]), group_of([1.0, 1.0, 1.0, 1.0], draw=1)])
    assert metrics["reward/mean"] == pytest.approx(5 / 6)
    assert metrics["rollout/success_frac"] == pytest.approx(5 / 6)
    assert metrics["rollout/failed_frac"] == 0.25
    assert metrics["reward/zero_variance_groups_frac"] == 0.5
    assert metrics["reward/num_dropped_groups"] == 0 and metrics["rollout/num_trajectories"] == 8
    assert metrics["rollout/tokens_mean"] == 3 and metrics["rollout/turns_mean"] == 1


def test_huge_finite_rewards_have_a_mean_and_a_standard_deviation() -> None:
    metrics = rollout_metrics([group_of([1.7e308, 1.7e308, 1.7e308, 0.0])])
    assert metrics["reward/mean"] == pytest.approx(1.275e308) and metrics["reward/std"] == pytest.approx(0.85e308)
    assert rollout_metrics([group_of([1e200, 1e200])])["reward/std"] == 0


def test_a_batch_without_any_valid_trajectory_has_no_means() -> None:
    """G06"""
    metrics = rollout_metrics([group_of([None, None])])
    assert metrics["rollout/failed_frac"] == 1 and metrics["reward/num_dropped_groups"] == 1
    assert (
        not {"reward/mean", "reward/std", "rollout/success_frac", "reward/zero_variance_groups_frac"} & metrics.keys()
    )


def test_truncation_format_errors_and_retries_are_counted() -> None:
    group = make_group(
        make_trajectory(0.0, outcome=Outcome.TRUNCATED),
        make_trajectory(1.0, member=1, num_format_errors=2),
        make_trajectory(1.0, member=2, attempt=2),
        make_trajectory(0.0, member=3, outcome=Outcome.CANCELLED),
    )
    metrics = rollout_metrics([group])
    assert metrics["rollout/truncated_frac"] == 0.25 and metrics["rollout/format_error_frac"] == 0.25
    assert metrics["rollout/num_retries"] == 2 and metrics["rollout/failed_frac"] == 0


def test_names_are_area_and_what_and_every_one_has_a_sentence() -> None:
    assert rollout_metrics([group_of([1.0, 0.0])]).keys() <= METRICS.keys()
    for name, sentence in METRICS.items():
        assert re.fullmatch(r"[a-z]+/[a-z0-9_]+", name)
        assert sentence[0].isupper() and sentence.endswith(".")
