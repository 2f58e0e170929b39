"""From groups to tensors: `samples_from_groups`, `make_batches`, and the one function that shifts to next-token form.

Flow::

    groups + advantages --samples_from_groups--> samples --split_minibatches--> K lists (one optimizer step each)
        --make_batches | batches_of_ranks--> micro-batches (`Batch`) of at most `micro_batch_tokens` tokens, sharing one
        denominator

Invariants: index `t` of every array describes token `t` itself; "no log-prob" is NaN and is selected away by the mask
before any arithmetic; only `next_token_view` knows that token `t` is predicted at position `t - 1`; the denominator is
the number of trained tokens of the whole optimizer step, so how it is cut into micro-batches never changes the loss.

Does not do: deciding which samples go together (`trainer/packing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch

from quintain.agents.outcome import Outcome
from quintain.agents.trajectory import Group, TokenRow, Trajectory
from quintain.trainer.config import AlgorithmConfig
from quintain.trainer.packing import Row, micro_batches_of, num_tokens_of, ranks_of, rows_of
from quintain.trainer.sample import Sample


class EmptyBatchError(ValueError):
    """Nothing would be trained: no sample, or no token that the loss mask keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: right-padded rows, index `t` describing token `t` itself.

    Example (a row of 3 tokens and one of 2, the last of each trained, 2 trained tokens in the whole optimizer step):
    ``token_ids_BT=[[5, 6, 7], [5, 8, 0]], loss_mask_BT=[[F, F, T], [F, T, F]], segment_ids_BT=[[0, 0, 0], [0, 0, -1]],
    position_ids_BT=[[0, 1, 2], [0, 1, 2]], denominator=2, num_sequences=2,
    has_signal=True``
    """

    token_ids_BT: torch.Tensor  # int64
    loss_mask_BT: torch.Tensor  # bool, True = trained
    rollout_logprobs_BT: torch.Tensor  # fp32, the sampler's; NaN where there is none
    old_logprobs_BT: torch.Tensor  # fp32, the proximal policy's; NaN until the learner fills it
    advantages_BT: torch.Tensor  # fp32, read only where loss_mask_BT
    segment_ids_BT: torch.Tensor  # int64, which sample of the row a token belongs to; -1 = padding
    position_ids_BT: torch.Tensor  # int64, restarts at 0 in every segment
    denominator: int
    """Trained tokens of the whole optimizer step, over all its micro-batches."""
    num_sequences: int
    """Samples of the whole optimizer step that have a trained token: what means over sequences divide by."""
    has_signal: bool
    """Whether any trained token has an advantage other than 0; without one the policy loss has no gradient."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.token_ids_BT.numel()

    @property
    def is_packed(self) -> bool:
        """True where a row holds more than one sample."""
        return bool((self.segment_ids_BT > 0).any())

    def to(self, device: torch.device | str) -> Batch:
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokenView:
    """The trained tokens of a batch and where each is predicted. `N` = trained tokens of this batch, row-major."""

    trained_BT: torch.Tensor  # bool: loss_mask without padding and without the first token of every segment
    predictor_N: torch.Tensor  # int64, flat position (row * T + t - 1) whose output predicts the token
    target_N: torch.Tensor  # int64, the token id


def next_token_view(batch: Batch) -> NextTokenView:
    """Shift to next-token form: token `t` is predicted by the model's output at `t - 1`.

    The first token of a segment has no prediction (position `t - 1` is another sample's last token) and is masked.
    """
    segments = batch.segment_ids_BT
    first_BT = torch.ones_like(batch.loss_mask_BT)
    first_BT[:, 1:] = segments[:, 1:] != segments[:, :-1]
    trained_BT = batch.loss_mask_BT & ~first_BT & (segments >= 0)
    index_N = trained_BT.flatten().nonzero().squeeze(1)
    return NextTokenView(trained_BT=trained_BT, predictor_N=index_N - 1, target_N=batch.token_ids_BT.flatten()[index_N])


def samples_from_groups(
    groups: Sequence[Group], advantages_P_G: Sequence[Sequence[float]], config: AlgorithmConfig
) -> list[Sample]:
    """The trainable rows of a batch of groups, in the groups' order.

    Left out, and so in neither numerator nor denominator of the loss: members whose outcome is a failure or a
    cancellation, groups with fewer valid members than the estimator needs, truncated members under `truncated: mask`,
    and rows in which nothing was sampled.
    """
    samples: list[Sample] = []
    for group, advantages_G in zip(groups, advantages_P_G, strict=True):
        if len(group.valid) < config.min_valid_members:
            continue
        for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True):
            if _is_trained(trajectory, config):
                rows = (_sample_of(trajectory, row, advantage) for row in trajectory.rows)
                samples.extend(sample for sample in rows if sample.num_trained_tokens)
    return samples


def _is_trained(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    masked = trajectory.outcome is Outcome.TRUNCATED and config.truncated == "mask"
    return trajectory.outcome.is_trainable and not masked


def _sample_of(trajectory: Trajectory, row: TokenRow, advantage: float) -> Sample:
    loss_mask = (False, *row.sampled[1:])
    return Sample(
        token_ids=row.token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=row.logprobs,
        advantages=tuple(advantage if trained else 0.0 for trained in loss_mask),
        policy_versions=row.policy_versions,
        draw=trajectory.draw,
        member=trajectory.member,
    )


def split_minibatches(samples: Sequence[Sample], num_parts: int) -> list[list[Sample]]:
    """Cut into at most `num_parts` lists by task draw: whole groups, in the order of their draw number.

    Fewer lists come back where fewer draws have anything to train.
    """
    by_draw: dict[int, list[Sample]] = {}
    for sample in samples:
        by_draw.setdefault(sample.draw, []).append(sample)
    draws = sorted(by_draw)
    num_parts = min(num_parts, len(draws))
    edges = [len(draws) * i // num_parts for i in range(num_parts + 1)] if num_parts else []
    parts = [draws[start:end] for start, end in pairwise(edges)]
    return [[sample for draw in part for sample in by_draw[draw]] for part in parts]


def make_batches(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    packed: bool = False,
    row_tokens: int | None = None,
    denominator: int | None = None,
) -> list[Batch]:
    """The micro-batches of one process: `batches_of_ranks` for a single rank."""
    (batches,) = batches_of_ranks(
        samples, num_ranks=1, max_tokens=max_tokens, packed=packed, row_tokens=row_tokens, denominator=denominator
    )
    return batches


def batches_of_ranks(
    samples: Sequence[Sample],
    *,
    num_ranks: int,
    max_tokens: int,
    packed: bool = False,
    row_tokens: int | None = None,
    denominator: int | None = None,
) -> list[list[Batch]]:
    """One optimizer step's micro-batches of at most `max_tokens` tokens (padding included), one list a rank.

    All lists have one length, and `has_signal` is the same at every place of them, so that ranks that wait for each
    other in every forward and backward pass never wait in vain: a rank with less to do gets micro-batches of two tokens
    that train nothing (weight zero). All share one denominator, that of the whole optimizer step.

    Samples whose advantages are all 0 come last and in batches of their own: a forward pass is all that they need. A
    single sample longer than `max_tokens` gets a batch of its own. The result depends on the samples alone, so equal
    samples in any order give equal batches.

    Args:
        packed: put several samples into a row.
        row_tokens: width of a packed row; by default that of the longest sample. Attention kernels that take segments
            of any length want `max_tokens`; others compute row width squared.
        denominator: trained tokens of the optimizer step; by default those of `samples`.

    Raises:
        EmptyBatchError: no token is trained.
        ValueError: a trained token has a non-finite sampler log-prob or advantage; names the sample and the token.
    """
    num_trained = sum(sample.num_trained_tokens for sample in samples)
    if num_trained == 0:
        raise EmptyBatchError(
            f"none of the tokens of {len(samples)} samples is trained: every group has too few valid members "
            "(group_size 1, or failures), is masked, or has nothing sampled"
        )
    totals = (denominator or num_trained, sum(sample.num_trained_tokens > 0 for sample in samples))
    width = max(row_tokens or 0, *(len(s.token_ids) for s in samples)) if packed else None
    batches_of_rank: list[list[Batch]] = [[] for _ in range(num_ranks)]
    for has_signal in (True, False):
        chosen = [sample for sample in samples if _has_signal(sample) is has_signal]
        plans = [
            micro_batches_of(rows_of(part, width=width), max_tokens=max_tokens) for part in ranks_of(chosen, num_ranks)
        ]
        for batches, plan in zip(batches_of_rank, plans, strict=True):
            batches += [collate(rows, totals, has_signal=has_signal) for rows in plan]
            missing = max(map(len, plans)) - len(plan)
            batches += [_weightless(totals, has_signal=has_signal)] * missing
    return batches_of_rank


def padding_frac(batches: Iterable[Batch]) -> float:
    """Share of the forward passes' tokens that is padding, in [0, 1); weightless micro-batches count whole."""
    num_tokens = num_real = 0
    for batch in batches:
        num_tokens += batch.num_tokens
        num_real += int((batch.segment_ids_BT >= 0).sum()) if bool(batch.loss_mask_BT.any()) else 0
    return 1 - num_real / num_tokens


def _has_signal(sample: Sample) -> bool:
    return any(a != 0 for a, trained in zip(sample.advantages, sample.loss_mask, strict=True) if trained)


def _weightless(totals: tuple[int, int], *, has_signal: bool) -> Batch:
    """A micro-batch that trains nothing: a forward (and backward) pass in which all gradients are 0."""
    nothing = Sample(
        token_ids=(0, 0),
        loss_mask=(False, False),
        rollout_logprobs=(math.nan, math.nan),
        advantages=(0.0, 0.0),
        policy_versions=(-1, -1),
        draw=-1,
        member=-1,
    )
    return collate([(nothing,)], totals, has_signal=has_signal)


def collate(rows: Sequence[Row], totals: tuple[int, int], *, has_signal: bool) -> Batch:
    """One micro-batch of these rows, in this order; `totals` = trained tokens, sequences of the optimizer step."""
    num_tokens = max(num_tokens_of(row) for row in rows)

    def joined(values_of: Callable[[Sample], Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
        joined_rows = ([value for sample in row for value in values_of(sample)] for row in rows)
        return torch.tensor([(*row, *([fill] * (num_tokens - len(row)))) for row in joined_rows], dtype=dtype)

    rollout_logprobs_BT = joined(lambda s: s.rollout_logprobs, math.nan, torch.float32)
    segment_ids_BT = torch.full((len(rows), num_tokens), -1)
    # A packed row's padding starts anew, too: attention is told apart by where positions restart.
    position_ids_BT = torch.arange(num_tokens).repeat(len(rows), 1)
    for index, row in enumerate(rows):
        edges = list(accumulate((len(sample.token_ids) for sample in row), initial=0))
        for segment, (start, end) in enumerate(pairwise(edges)):
            segment_ids_BT[index, start:end] = segment
        for start in edges[1:] if len(row) > 1 else ():
            position_ids_BT[index, start:] = torch.arange(num_tokens - start)
    batch = Batch(
        token_ids_BT=joined(lambda s: s.token_ids, 0, torch.int64),
        loss_mask_BT=joined(lambda s: s.loss_mask, False, torch.bool),
        rollout_logprobs_BT=rollout_logprobs_BT,
        old_logprobs_BT=torch.full_like(rollout_logprobs_BT, math.nan),
        advantages_BT=joined(lambda s: s.advantages, 0.0, torch.float32),
        segment_ids_BT=segment_ids_BT,
        position_ids_BT=position_ids_BT,
        denominator=totals[0],
        num_sequences=totals[1],
        has_signal=has_signal,
    )
    _refuse_non_finite(rows, batch)
    return batch


def _refuse_non_finite(rows: Sequence[Row], batch: Batch) -> None:
    for what, values_BT in (("sampler log-prob", batch.rollout_logprobs_BT), ("advantage", batch.advantages_BT)):
        bad_BT = batch.loss_mask_BT & ~values_BT.isfinite()
        if bad_BT.any():
            row, place = (int(i) for i in bad_BT.nonzero()[0])
            sample = rows[row][int(batch.segment_ids_BT[row, place])]
            token = int(batch.position_ids_BT[row, place])
            raise ValueError(
                f"sample {sample.draw}/{sample.member}: token {token} (id {sample.token_ids[token]}) "
                f"is trained but its {what} is {values_BT[row, place].item()}; the policy must answer with a finite "
                "log-prob for every token that it sampled"
            )
