"""From groups to samples with an advantage for every trained token, whatever the algorithm needs for it.

    groups --(kl_in = reward: reference_logprobs)--> penalties
       advantage of a trajectory: rewards - penalties --group_advantages--> the same number for all its tokens
       turn:                      rewards of turns    --turn_advantages--> a number a turn
       gae:                       rewards and values of tokens or turns --gae--> whitened over the batch; returns

Rewards of turns add up to the trajectory's effective reward: what its turns didn't get (a limit's reward, a penalty for
truncation, terms added over the group) is paid with the last turn. A turn's reward is paid on its last trained token.

Invariants: a trajectory of several rows is one trajectory, its turns going on from row to row; members without a reward
are in no baseline and no sample; filtered groups are in neither.

Does not do: forward passes (the callers' functions do), the critic's training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from quintain.agents.trajectory import Group, Trajectory
from quintain.trainer.advantages import GROUP_ESTIMATORS, effective_reward, group_advantages, is_informative
from quintain.trainer.batch import samples_from_groups
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.gae import gae, turn_advantages, whitened
from quintain.trainer.losses import KL_ESTIMATORS
from quintain.trainer.sample import Sample

Scores = Callable[[Sequence[Sample]], list[list[float]]]
"""One number a token for each sample, `[T]` each, read at trained tokens only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """A batch ready to be trained on."""

    samples: list[Sample]
    advantages_P_G: list[list[float]]
    """One number a trajectory, for records: its tokens' mean where they differ; NaN for members without a reward."""
    values: list[list[float]] | None = None  # [T] a sample: the critic's, before the update
    returns: list[list[float]] | None = None  # [T] a sample: the critic's targets; NaN where there is none
    kl_penalty_mean: float | None = None
    """Mean over the scored trajectories of what KL took off their reward."""


def credit(
    groups: Sequence[Group],
    config: AlgorithmConfig,
    *,
    reference_logprobs: Scores | None = None,
    values: Scores | None = None,
) -> Credit:
    """Advantages by `config.advantage` of all groups that the loss may use.

    Args:
        reference_logprobs: of the reference model; needed with `kl_in: reward`.
        values: of the critic; needed with `gae`.

    Raises:
        ValueError: a trainable trajectory has a non-finite reward.
    """
    used = [g for g in groups if is_informative(g, config)] if config.dynamic_sampling else list(groups)
    penalties = _kl_penalties(used, config, reference_logprobs)
    totals = {key: math.fsum(x for row in rows for x in row) for key, rows in penalties.items()}
    kl_penalty_mean = math.fsum(totals.values()) / len(totals) if totals else None
    if config.advantage in GROUP_ESTIMATORS:
        advantages_P_G = group_advantages(used, config, totals)
        samples = samples_from_groups(used, advantages_P_G, config)
        result = Credit(samples=samples, advantages_P_G=advantages_P_G)
    elif config.advantage == "turn":
        result = _by_turn(used, config, penalties)
    else:
        assert values is not None  # the recipe layer makes a critic for gae
        result = _by_gae(used, config, penalties, values)
    by_draw = {group.draw: advantages_G for group, advantages_G in zip(used, result.advantages_P_G, strict=True)}
    everything_P_G = [by_draw.get(group.draw, _zeros(group)) for group in groups]
    return replace(result, advantages_P_G=everything_P_G, kl_penalty_mean=kl_penalty_mean)


def _zeros(group: Group) -> list[float]:
    return [0.0 if t.outcome.is_trainable else math.nan for t in group.trajectories]


def _plain_samples(groups: Sequence[Group], config: AlgorithmConfig) -> list[Sample]:
    return samples_from_groups(groups, [_zeros(group) for group in groups], config)


def _kl_penalties(
    groups: Sequence[Group], config: AlgorithmConfig, reference_logprobs: Scores | None
) -> dict[tuple[int, int], list[list[float]]]:
    """``kl_coef * KL(sampler, reference)`` of every token, 0 where not trained; by (draw, member), `[T]` a row."""
    if config.kl_in != "reward":
        return {}
    assert reference_logprobs is not None
    # Also those that a setting masks: they stay in the baseline with the reward that everybody's is measured by.
    samples = _plain_samples(groups, config.model_copy(update={"truncated": "train"}))
    estimate = KL_ESTIMATORS[config.kl_estimator]
    penalties: dict[tuple[int, int], list[list[float]]] = {}
    for sample, ref_logprobs in zip(samples, reference_logprobs(samples), strict=True):
        mask = torch.tensor(sample.loss_mask)
        rollout = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)[mask]
        kl = config.kl_coef * estimate(rollout, torch.tensor(ref_logprobs, dtype=torch.float64)[mask])
        row = torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, kl).tolist()
        penalties.setdefault((sample.draw, sample.member), []).append(row)
    return penalties


def turn_rewards(trajectory: Trajectory, config: AlgorithmConfig) -> list[float]:
    """Reward of each turn, `[N]`; they add up to the effective reward, the last turn being paid the difference."""
    rewards = [turn.reward if math.isfinite(turn.reward) else 0.0 for turn in trajectory.turns]
    if rewards:
        rewards[-1] += effective_reward(trajectory, config) - math.fsum(rewards)
    return rewards


def turns_of_tokens(trajectory: Trajectory) -> list[list[int]]:
    """Which turn sampled each token, -1 where none did; `[T]` for each row that has a trained token.

    Rows hold the turns' completions one after the other, in order, also where history was forked.

    Raises:
        ValueError: the rows don't hold as many sampled tokens as the turns.
    """
    turns = [turn.index for turn in trajectory.turns for _ in turn.completion.token_ids]
    if len(turns) != sum(row.num_sampled_tokens for row in trajectory.rows):
        raise ValueError(
            f"trajectory {trajectory.draw}/{trajectory.member}: its rows don't hold the tokens of its turns one after "
            "the other, so they can't be told apart; use an advantage of whole trajectories"
        )
    remaining = iter(turns)
    rows = [[next(remaining) if sampled else -1 for sampled in row.sampled] for row in trajectory.rows]
    return [turns for turns, row in zip(rows, trajectory.rows, strict=True) if any(row.sampled[1:])]


def _by_turn(
    groups: Sequence[Group], config: AlgorithmConfig, penalties: dict[tuple[int, int], list[list[float]]]
) -> Credit:
    advantages: dict[tuple[int, int], list[float]] = {}
    for group in groups:
        rewards_G_N = []
        for t in group.valid:
            rewards = turn_rewards(t, config)
            for turns, row in zip(turns_of_tokens(t), penalties.get((t.draw, t.member), ()), strict=False):
                for turn, penalty in zip(turns, row, strict=True):
                    rewards[turn] -= penalty  # 0 where turn is -1
            rewards_G_N.append(rewards)
        for t, advantages_N in zip(group.valid, turn_advantages(rewards_G_N, discount=config.discount), strict=True):
            advantages[t.draw, t.member] = advantages_N
    samples, rows = [], _rows_by_trajectory(groups)
    for sample in _plain_samples(groups, config):
        advantages_N, turns = advantages[sample.draw, sample.member], next(rows[sample.draw, sample.member])
        tokens = [advantages_N[n] if m else 0.0 for n, m in zip(turns, sample.loss_mask, strict=True)]
        samples.append(replace(sample, advantages=tuple(tokens)))
    return Credit(samples=samples, advantages_P_G=_means(groups, samples))


def _rows_by_trajectory(groups: Sequence[Group]):
    return {(t.draw, t.member): iter(turns_of_tokens(t)) for group in groups for t in group.valid}


def _by_gae(
    groups: Sequence[Group],
    config: AlgorithmConfig,
    penalties: dict[tuple[int, int], list[list[float]]],
    values_of: Scores,
) -> Credit:
    samples = _plain_samples(groups, config)
    values = values_of(samples) if samples else []
    trajectories = {(t.draw, t.member): t for group in groups for t in group.valid}
    rows_of: dict[tuple[int, int], list[int]] = {}
    for index, sample in enumerate(samples):
        rows_of.setdefault((sample.draw, sample.member), []).append(index)
    advantages = [[0.0] * len(sample.token_ids) for sample in samples]
    returns = [[math.nan] * len(sample.token_ids) for sample in samples]
    for key, rows in rows_of.items():
        steps = _actions(trajectories[key], [samples[i] for i in rows], penalties.get(key), config)
        action_values = [values[rows[row]][t] for (row, t), *_ in steps.tokens]
        found, targets = gae(steps.rewards, action_values, discount=config.discount, lam=config.gae_lambda)
        for tokens, advantage, target in zip(steps.tokens, found, targets, strict=True):
            for row, t in tokens:
                advantages[rows[row]][t] = advantage
            row, t = tokens[0]
            returns[rows[row]][t] = target
    samples = _with_whitened(samples, advantages)
    return Credit(samples=samples, advantages_P_G=_means(groups, samples), values=values, returns=returns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actions:
    """A trajectory as a sequence of actions, tool text left out."""

    tokens: list[list[tuple[int, int]]]  # (row, t) of each action's trained tokens; one each, or a turn's
    rewards: list[float]  # paid after each action


def _actions(
    trajectory: Trajectory, samples: Sequence[Sample], penalties: list[list[float]] | None, config: AlgorithmConfig
) -> _Actions:
    tokens: list[list[tuple[int, int]]] = []
    turns: list[int] = []
    for row, (sample, turns_T) in enumerate(zip(samples, turns_of_tokens(trajectory), strict=True)):
        for t, (turn, trained) in enumerate(zip(turns_T, sample.loss_mask, strict=True)):
            if trained and config.credit == "turn" and turns and turns[-1] == turn:
                tokens[-1].append((row, t))
            elif trained:
                tokens.append([(row, t)])
                turns.append(turn)
    rewards = [0.0] * len(tokens)
    last_of_turn = {turn: index for index, turn in enumerate(turns)}
    for turn, reward in enumerate(turn_rewards(trajectory, config)):
        # a turn without a trained token (its answer was empty) is paid with the last action
        rewards[last_of_turn.get(turn, len(rewards) - 1)] += reward
    if penalties is not None:
        rewards = [
            reward - math.fsum(penalties[row][t] for row, t in part)
            for reward, part in zip(rewards, tokens, strict=True)
        ]
    return _Actions(tokens=tokens, rewards=rewards)


def _with_whitened(samples: Sequence[Sample], advantages: Sequence[Sequence[float]]) -> list[Sample]:
    masked = [
        [a for a, m in zip(advantages_T, s.loss_mask, strict=True) if m]
        for s, advantages_T in zip(samples, advantages, strict=True)
    ]
    remaining = iter(whitened([a for part in masked for a in part]))
    return [replace(s, advantages=tuple(next(remaining) if m else 0.0 for m in s.loss_mask)) for s in samples]


def _means(groups: Sequence[Group], samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over a trajectory's trained tokens; 0 for valid members without any, NaN for the others."""
    tokens: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        trained = (a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if m)
        tokens.setdefault((sample.draw, sample.member), []).extend(trained)
    means = {key: math.fsum(values) / len(values) for key, values in tokens.items()}
    return [
        [means.get((t.draw, t.member), 0.0) if t.outcome.is_trainable else math.nan for t in group.trajectories]
        for group in groups
    ]
