"""One generation: what is asked of a policy and what it answers. Produced by every `Policy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Training allows a temperature and nothing else (top-p and its like renormalise, C10)."""

    temperature: float = 1.0
    """> 0; 0 means greedy (evaluation only)."""
    max_new_tokens: int = 64
    """Most tokens of one generation."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these was sampled; it is part of the completion."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RequestKey:
    """Where in the run a generation belongs; orders the rows of an in-process batch, whatever the arrival order."""

    draw: int
    """The task draw (group) number in the run."""
    member: int
    """Index of the trajectory in its group."""
    attempt: int
    """0, then 1, 2, … for retries after an infrastructure failure."""
    turn: int
    """0-based turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Everything a policy needs for one generation."""

    key: RequestKey
    prompt_ids: tuple[int, ...]  # [T] every token so far: the engine sees exactly these
    sampling: SamplingParams
    seed: int
    """One random stream per trajectory and turn (see `derive_seed`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `[start, end)` of a completion were sampled by `policy_version`."""

    start: int
    end: int
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What was sampled.

    Example: ``Completion(token_ids=(40, 41, 3), logprobs=(-0.1, -0.7, -0.01), finish_reason="stop",
    version_spans=(VersionSpan(start=0, end=3, policy_version=4),))``
    """

    token_ids: tuple[int, ...]  # [T] as sampled, the stop token included
    logprobs: tuple[float, ...]  # [T] log-prob of each token under the sampling distribution (temperature applied)
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]  # cover [0, T) without gaps or overlaps

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs in one completion")
        edges = [0, *(span.end for span in self.version_spans)]
        starts = [span.start for span in self.version_spans]
        if starts != edges[:-1] or edges[-1] != len(self.token_ids):
            raise ValueError(f"version spans {self.version_spans} do not cover {len(self.token_ids)} sampled tokens")

    def policy_versions(self) -> tuple[int, ...]:
        """The policy version of each token, `[T]`."""
        return tuple(s.policy_version for s in self.version_spans for _ in range(s.end - s.start))
