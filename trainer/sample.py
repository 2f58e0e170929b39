"""`Sample`: one trainable row. Made from a trajectory's `TokenRow` and its group's advantage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable row; index `t` of every array describes token `t` itself (alignment law). Token 0 is never trained.

    Example (prompt of 2, 2 sampled, advantage 0.7): ``Sample(token_ids=(1, 9, 40, 3), loss_mask=(False, False, True,
    True), rollout_logprobs=(nan, nan, -0.1, -0.2), advantages=(0.0, 0.0, 0.7, 0.7), policy_versions=(-1, -1, 4, 4),
    draw=12, member=3)``
    """

    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[bool, ...]  # [T] True = trained; a subset of the sampled tokens
    rollout_logprobs: tuple[float, ...]  # [T] the sampler's; NaN where not sampled
    advantages: tuple[float, ...]  # [T] read only where loss_mask is True
    policy_versions: tuple[int, ...]  # [T] -1 where not sampled
    draw: int
    """The group key: the task draw number."""
    member: int
    """Index of the trajectory in its group; several samples may share it (a forked trajectory)."""

    def __post_init__(self) -> None:
        arrays = (self.token_ids, self.loss_mask, self.rollout_logprobs, self.advantages, self.policy_versions)
        lengths = {len(a) for a in arrays}
        if len(lengths) != 1:
            raise ValueError(f"sample {self.draw}/{self.member}: per-token arrays differ in length: {sorted(lengths)}")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"sample {self.draw}/{self.member}: token 0 has no prediction and can't be trained")

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.loss_mask)
