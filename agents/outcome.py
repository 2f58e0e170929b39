"""How a trajectory ended: `Outcome` says who is answerable (and so what training does with it), `StopReason` where."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Who is answerable for the end of a trajectory."""

    COMPLETED = "completed"
    """The environment ended it: train."""
    POLICY = "policy"
    """The policy broke the rules (format errors exhausted, say): train with the reward it got, or with
    `RolloutConfig.unjudged_reward` where the environment has judged nothing."""
    TRUNCATED = "truncated"
    """A limit of turns, tokens, context or time was reached: train, counted; a setting masks or penalises. The limit of
    turns is the environment's, which judges; at the others the reward is `RolloutConfig.unjudged_reward`."""
    ENVIRONMENT = "environment"
    """The environment's own code raised: leaves loss and baseline, retried."""
    INFRASTRUCTURE = "infrastructure"
    """Sandbox or engine broke: leaves loss and baseline, retried."""
    VERIFIER = "verifier"
    """The reward could not be computed: leaves loss and baseline, retried."""
    CANCELLED = "cancelled"
    """We ended it: leaves loss and baseline; not a failure."""

    @property
    def is_failure(self) -> bool:
        """Nobody's reward: leaves the loss and the group's baseline, is retried, counts towards the breaker."""
        return self in (Outcome.ENVIRONMENT, Outcome.INFRASTRUCTURE, Outcome.VERIFIER)

    @property
    def is_trainable(self) -> bool:
        """Enters the group's baseline and, unless a setting masks it, the loss."""
        return self in (Outcome.COMPLETED, Outcome.POLICY, Outcome.TRUNCATED)


class StopReason(StrEnum):
    """Where a trajectory stopped."""

    TERMINATED = "terminated"
    """`env.step` returned terminated (also when it was truncated on the same step)."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    """One generation was cut at `max_new_tokens`."""
    MAX_TOKENS = "max_tokens"
    """The row's token budget or the model's context is used up; decided before sending."""
    DEADLINE = "deadline"
    """The time is over: truncated, or an infrastructure failure where nothing had been sampled yet."""
    FORMAT = "format"
    """The bound on malformed tool calls was reached."""
    SANDBOX_DIED = "sandbox_died"
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox machinery broke in another way: no free box in time, say."""
    ENVIRONMENT_ERROR = "environment_error"
    VERIFIER_ERROR = "verifier_error"
    ENGINE_ERROR = "engine_error"
    """The policy, or our own rendering of its input and output, broke."""
    PREFIX_BROKEN = "prefix_broken"
    """The template rewrote history and the recipe says `refuse`."""
    CANCELLED = "cancelled"
