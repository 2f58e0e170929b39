"""The registry of metric names, and the metrics that are computed from groups.

Invariants: names are `area/what_unit` and fixed: no task, tool or member in a name; `docs/metrics.md` lists exactly
these; a mean leaves non-finite values out, and is absent where nothing finite is left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from quintain.agents.outcome import Outcome
from quintain.agents.trajectory import Group, Trajectory
from quintain.trainer.advantages import MIN_VALID_MEMBERS, has_no_spread, scaled_down

METRICS: dict[str, str] = {
    "reward/mean": "Mean reward of the batch's valid trajectories (those that ended with a reward).",
    "reward/std": "Standard deviation (ddof = 1) of the rewards of the batch's valid trajectories.",
    "reward/zero_variance_groups_frac": (
        "Share of the groups with at least two valid members in which all rewards are equal: they teach nothing."
    ),
    "reward/num_dropped_groups": (
        "Groups with too few valid members for a baseline (below two, mostly); they leave the loss."
    ),
    "reward/num_filtered_groups": (
        "Groups without spread that dynamic sampling left out and replaced; only with algorithm.dynamic_sampling."
    ),
    "reward/num_missing_groups": (
        "Groups by which dynamic sampling fell short of tasks_per_step, its cap of draws being reached."
    ),
    "reward/kl_penalty_mean": (
        "Mean over the trajectories that were scored of what KL took off their reward; only with kl_in = reward."
    ),
    "rollout/success_frac": "Share of the valid trajectories that the environment calls a success.",
    "rollout/tokens_mean": "Mean number of sampled tokens of a valid trajectory; tool text does not count.",
    "rollout/turns_mean": "Mean number of turns (generations) of a valid trajectory.",
    "rollout/truncated_frac": "Share of all trajectories that hit a limit of turns, tokens, context or time.",
    "rollout/failed_frac": (
        "Share of all trajectories that broke in the environment, the sandbox, the engine or the verifier."
    ),
    "rollout/format_error_frac": (
        "Share of all trajectories with at least one tool call that could not be parsed or was refused."
    ),
    "rollout/num_trajectories": "Trajectories of the batch, failed and cancelled ones included.",
    "rollout/num_retries": "Infrastructure retries that the batch's trajectories needed.",
    "rollout/event_loop_lag_max_s": (
        "Longest time that the rollouts' event loop left something waiting that was due: what blocks it delays all."
    ),
    "train/loss": (
        "Policy loss, plus weighted KL, minus weighted entropy, by algorithm.aggregation; mean over optimizer steps."
    ),
    "train/grad_norm": "Global L2 norm of the gradient before clipping; mean over the batch's optimizer steps.",
    "train/ratio_mean": "Mean over trained tokens of the importance ratio exp(logprobs - old_logprobs).",
    "train/ratio_max": (
        "Largest importance ratio of a trained token; exactly 1 with one optimizer step and recomputed old log-probs."
    ),
    "train/sequence_ratio_max": "Largest geometric mean of the importance ratios of one row's trained tokens.",
    "train/clip_frac": "Share of the trained tokens where the clip of the loss takes hold.",
    "train/dual_clip_frac": "Share of the trained tokens whose loss the dual clip bounds; only with dual_clip.",
    "train/correction_weight_mean": (
        "Mean over trained tokens of the importance weight towards the sampler, bounded; only with correction.weight."
    ),
    "train/correction_ratio_max": "Largest importance ratio of old over rollout log-probs before its bounds.",
    "train/correction_bounded_frac": "Share of the trained tokens whose importance weight was truncated or masked.",
    "train/rejected_tokens_frac": (
        "Share of the tokens that rejection and veto took out of loss and denominators; only with such bounds."
    ),
    "train/num_clamped_tokens": "Trained tokens whose log-ratio was beyond the clamp in front of the exponential.",
    "train/entropy": "Mean entropy, in nats, of the distributions that the trained tokens were drawn from.",
    "train/kl_reference": (
        "Mean over trained tokens of algorithm.kl_estimator of KL(policy || reference); only with kl_in = loss."
    ),
    "train/learning_rate": "Learning rate of the batch's first optimizer step.",
    "train/num_trained_tokens": (
        "Tokens that the loss mask keeps: the denominators of the batch's optimizer steps, added up."
    ),
    "train/num_rows": "Token rows that were trained on.",
    "train/padding_frac": "Share of the forward passes' tokens that is padding.",
    "train/minibatch_steps": "Optimizer steps that the batch was cut into.",
    "train/num_skipped_batches": "Is 1 where nothing in the batch could be trained on and no step was taken.",
    "train/num_skipped_steps": "Optimizer steps of the batch left out because the gradient norm was not finite.",
    "mismatch/logprob_gap_max": (
        "Largest absolute difference, over trained tokens, of the trainer's and the sampler's log-prob."
    ),
    "mismatch/logprob_gap_mean": (
        "Mean absolute difference, over trained tokens, of the trainer's and the sampler's log-prob."
    ),
    "mismatch/k3": "Mean k3 estimate over trained tokens of KL(sampler || trainer), before the batch's first update.",
    "critic/value_loss": "Half the clipped squared error of the critic over tokens with a target; mean over its steps.",
    "critic/explained_variance": "Is 1 - Var(return - value) / Var(return), the values being from before the update.",
    "critic/value_mean": "Mean of those values.",
    "critic/clip_frac": "Share of the tokens with a target where the critic's value clip takes hold.",
    "critic/grad_norm": "Global L2 norm of the critic's gradient before clipping; mean over its optimizer steps.",
    "critic/num_skipped_steps": "The critic's optimizer steps left out because the gradient norm was not finite.",
    "policy/version": "Version of the policy after the batch: optimizer steps taken since the start of RL.",
    "policy/staleness_max": (
        "Version at the batch's first optimizer step minus the oldest version that sampled a trained token."
    ),
    "eval/success_frac_sampled": "Share of the held-out tasks solved when sampling at the training temperature.",
    "eval/success_frac_greedy": "Share of the held-out tasks solved when always taking the likeliest token.",
    "eval/reward_mean_sampled": "Mean reward on the held-out tasks when sampling at the training temperature.",
    "eval/reward_mean_greedy": "Mean reward on the held-out tasks when always taking the likeliest token.",
    "time/delivery_s": "Seconds in which the engines were given weights, since the record of the batch before.",
    "time/rollout_s": "Seconds from the first request of the batch to its last trajectory.",
    "time/train_s": "Seconds of turning groups into samples and of all optimizer steps of the batch.",
    "time/step_s": "Seconds of the whole batch, rollouts and training; delivery, evaluation, saving and recording not.",
    "perf/tokens_per_second": "Sampled tokens of the batch divided by the seconds of the whole batch.",
    "metrics/nonfinite_num": "Values of this record that were NaN or infinite.",
}
"""Every metric name and the sentence that explains it."""


def mean_of_finite(values: Iterable[float]) -> tuple[float, int] | None:
    """Mean of the finite values and how many they are; None where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    finite, scale = scaled_down(finite)
    return math.fsum(finite) / len(finite) * scale, len(finite)


def num_nonfinite(metrics: Mapping[str, float]) -> int:
    """How many values of one record are NaN or infinite."""
    return sum(not math.isfinite(value) for value in metrics.values())


def rollout_metrics(groups: Sequence[Group], *, min_valid_members: int = MIN_VALID_MEMBERS) -> dict[str, float]:
    """The `reward/` and `rollout/` metrics of one batch; a mean over nothing is left out.

    A group with fewer than `min_valid_members` leaves the loss.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    valid = [t for group in groups for t in group.valid]
    rewards = [t.reward for t in valid if math.isfinite(t.reward)]
    rewards_of_groups = [[t.reward for t in group.valid] for group in groups]
    comparable = [rewards for rewards in rewards_of_groups if len(rewards) >= MIN_VALID_MEMBERS]
    means = {
        "reward/mean": mean_of_finite(rewards),
        "reward/zero_variance_groups_frac": mean_of_finite(has_no_spread(rewards) for rewards in comparable),
        "rollout/success_frac": mean_of_finite(t.success for t in valid),
        "rollout/tokens_mean": mean_of_finite(t.num_sampled_tokens for t in valid),
        "rollout/turns_mean": mean_of_finite(len(t.turns) for t in valid),
        "rollout/truncated_frac": mean_of_finite(t.outcome is Outcome.TRUNCATED for t in trajectories),
        "rollout/failed_frac": mean_of_finite(t.outcome.is_failure for t in trajectories),
        "rollout/format_error_frac": mean_of_finite(_has_format_error(t) for t in trajectories),
    }
    metrics = {name: mean[0] for name, mean in means.items() if mean is not None}
    if len(rewards) > 1:
        scaled, scale = scaled_down(rewards)
        metrics["reward/std"] = statistics.stdev(scaled) * scale
    metrics["reward/num_dropped_groups"] = sum(len(group.valid) < min_valid_members for group in groups)
    metrics["rollout/num_trajectories"] = len(trajectories)
    metrics["rollout/num_retries"] = sum(t.attempt for t in trajectories)
    return metrics


def _has_format_error(trajectory: Trajectory) -> bool:
    return any(turn.num_format_errors for turn in trajectory.turns)


def explained_variance(pairs: Sequence[tuple[float, float]]) -> float | None:
    """``1 - Var(R - V) / Var(R)`` of (value V, return R) pairs; None where the returns do not differ."""
    returns = [r for _, r in pairs]
    if len(pairs) < 2 or max(returns) == min(returns):
        return None
    return 1 - statistics.variance([r - v for v, r in pairs]) / statistics.variance(returns)
