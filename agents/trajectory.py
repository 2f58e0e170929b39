"""What happened in one trajectory: turns, token rows with provenance, reward and outcome. Made by `run_trajectory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quintain.agents.completion import Completion
from quintain.agents.outcome import Outcome, StopReason
from quintain.envs.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation and the environment step that it led to."""

    index: int
    """0-based."""
    prompt_token_ids: tuple[int, ...]  # [T] the delta that was appended before this generation (turn 0: the prompt)
    completion: Completion
    message: Message
    """The assistant message that was parsed from the completion."""
    observation: tuple[Message, ...]
    """The new messages that `env.step` answered with; empty where the step was not taken."""
    reward: float
    num_format_errors: int
    """Calls of this turn that could not be parsed or were refused by the tool layer."""
    generate_s: float
    env_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One token sequence that the engine really saw, in order, with who made which token.

    Index `t` of every array describes token `t` itself. Append-only templates give one row a trajectory; a template
    that rewrites history forks into several.

    Example (prompt of 3, 2 sampled): ``TokenRow(token_ids=(1, 9, 2, 40, 3), sampled=(False, False, False, True, True),
    logprobs=(nan, nan, nan, -0.1, -0.2), policy_versions=(-1, -1, -1, 0, 0))``
    """

    token_ids: tuple[int, ...]  # [T]
    sampled: tuple[bool, ...]  # [T] True where the policy sampled the token (provenance, not the loss mask)
    logprobs: tuple[float, ...]  # [T] the sampler's; NaN where not sampled
    policy_versions: tuple[int, ...]  # [T] -1 where not sampled

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.sampled), len(self.logprobs), len(self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"per-token arrays of one row differ in length: {sorted(lengths)}")

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens only: tool text between two turns does not count (A07)."""
        return sum(self.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One rollout of one task, complete: nothing else is needed to train on it, show it or replay it."""

    task_id: str
    draw: int
    """The task draw (= group) number in the run; the group key."""
    member: int
    """Index in the group."""
    attempt: int
    """0, or the number of infrastructure retries before this one."""
    seed: int
    """The task seed that `env.reset` got; shared by the group."""
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    rows: tuple[TokenRow, ...]
    reward: float
    """Sum of the weighted reward terms, or `RolloutConfig.unjudged_reward` where a limit came first; NaN where no
    reward exists (outcome is a failure or cancelled)."""
    reward_terms: Mapping[str, float]
    success: bool
    terminated: bool
    truncated: bool
    outcome: Outcome
    stop_reason: StopReason
    error: str | None = None
    """What broke, where the outcome is a failure."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Counted events: `unknown_tool`, `invalid_json`, `invalid_arguments`, `call_in_reasoning`, `calls_skipped`, …"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's reward functions of weight 0, by name; empty where the reward was not computed."""
    generate_s: float = 0.0
    env_s: float = 0.0
    duration_s: float = 0.0

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def oldest_policy_version(self) -> int | None:
        """The oldest version that sampled any of its tokens; None where nothing was sampled."""
        versions = [v for row in self.rows for v in row.policy_versions if v >= 0]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one task draw, failed members included; baselines are taken over its valid members."""

    task_id: str
    draw: int
    trajectories: tuple[Trajectory, ...]  # [G]

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """Members that enter the baseline."""
        return tuple(t for t in self.trajectories if t.outcome.is_trainable)
