"""Who is answerable: what broke decides the outcome, and a failure never becomes a reward."""

from __future__ import annotations

import asyncio
import math

import pytest
from toy_chat import TASK, Parrot, call_text, renderer, roll

from quintain.agents.completion import VersionSpan
from quintain.agents.config import RolloutConfig
from quintain.agents.env_threads import EnvThreads, ThreadedEnv
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.policy import PolicyError
from quintain.agents.rollout import Assignment, RolloutSetup, run_group
from quintain.agents.scripted_policy import ScriptedPolicy, ScriptedReply
from quintain.envs import Message, VerifierError
from quintain.sandbox import SandboxDied, SandboxTimeout

INFRASTRUCTURE, ENVIRONMENT, VERIFIER = Outcome.INFRASTRUCTURE, Outcome.ENVIRONMENT, Outcome.VERIFIER


def failing(error: BaseException, *, at: str = "step") -> type[Parrot]:
    class Failing(Parrot):
        def prepare(self) -> None:
            if at == "reset":
                raise error

        def step(self, action: Message):
            if at == "step":
                raise error
            return super().step(action)

    return Failing


@pytest.mark.parametrize(
    ("error", "outcome", "stop_reason"),
    [
        (SandboxDied("box 7 is gone"), INFRASTRUCTURE, StopReason.SANDBOX_DIED),
        (SandboxTimeout("no free box"), INFRASTRUCTURE, StopReason.SANDBOX_ERROR),
        (VerifierError("judge is down"), VERIFIER, StopReason.VERIFIER_ERROR),
        (KeyError("bug"), ENVIRONMENT, StopReason.ENVIRONMENT_ERROR),
        (TimeoutError("the tool's own"), ENVIRONMENT, StopReason.ENVIRONMENT_ERROR),
        (StopIteration(), ENVIRONMENT, StopReason.ENVIRONMENT_ERROR),
        (SystemExit(3), ENVIRONMENT, StopReason.ENVIRONMENT_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
@pytest.mark.parametrize("at", ["reset", "step"])
def test_what_breaks_in_the_environment_is_a_failure_without_a_reward(error, outcome, stop_reason, at: str):
    """C15"""
    trajectory = roll([call_text(), "done"], env=failing(error, at=at))
    assert (trajectory.outcome, trajectory.stop_reason) == (outcome, stop_reason)
    assert trajectory.outcome.is_failure and not trajectory.outcome.is_trainable
    assert math.isnan(trajectory.reward) and trajectory.reward_terms == {} and not trajectory.success
    assert trajectory.error is not None and at in trajectory.error
    assert len(trajectory.turns) == (1 if at == "step" else 0)  # what was sampled is kept, to look at


@pytest.mark.parametrize("error", [PolicyError("engine is down"), RuntimeError("bug"), TimeoutError("http")])
def test_what_breaks_in_the_engine_is_an_infrastructure_failure(error: Exception):
    """C15"""
    trajectory = roll([call_text(), error])
    assert (trajectory.outcome, trajectory.stop_reason) == (INFRASTRUCTURE, StopReason.ENGINE_ERROR)
    assert math.isnan(trajectory.reward) and str(error) in str(trajectory.error)
    assert len(trajectory.turns) == 1 and trajectory.rows[0].sampled[-1]


def test_a_request_that_the_engine_aborts_is_an_infrastructure_failure():
    trajectory = roll([ScriptedReply(text="do", finish_reason="abort")])
    assert (trajectory.outcome, trajectory.stop_reason) == (INFRASTRUCTURE, StopReason.ENGINE_ERROR)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_a_verifier_failure(value: float):
    """C15"""

    class Judged(Parrot):
        def step(self, action: Message):
            observation, _, terminated, truncated, info = super().step(action)
            return observation, value, terminated, truncated, info

    trajectory = roll(["done"], env=Judged)
    assert (trajectory.outcome, trajectory.stop_reason) == (VERIFIER, StopReason.VERIFIER_ERROR)


def test_rewards_of_weight_zero_are_kept_as_metrics_and_do_not_count():
    trajectory = roll([call_text(), "done"])
    assert trajectory.metrics == {"num_words": 1.0}
    assert trajectory.reward_terms == {"right": 1.0} and trajectory.reward == 1.0


def test_every_sampled_token_knows_the_version_that_sampled_it():
    chat = renderer()
    ids = chat.encode_reply("done")
    spans = (
        VersionSpan(start=0, end=1, policy_version=4),
        VersionSpan(start=1, end=len(ids), policy_version=5),
    )
    trajectory = roll([call_text(), ScriptedReply(token_ids=ids, version_spans=spans)])
    (row,) = trajectory.rows
    assert row.policy_versions[-len(ids) :] == (4, *[5] * (len(ids) - 1))
    assert [v >= 0 for v in row.policy_versions] == list(row.sampled)
    assert trajectory.oldest_policy_version == 0


def test_a_group_keeps_its_failed_members_and_leaves_them_out_of_the_valid_ones():
    """C15"""
    chat = renderer()
    policy = ScriptedPolicy(lambda request: PolicyError("down") if request.key.member == 1 else "done", renderer=chat)

    async def run():
        threads = EnvThreads(2)
        envs = [ThreadedEnv(Parrot(), threads) for _ in range(3)]
        setup = RolloutSetup(policy=policy, renderer=chat, config=RolloutConfig())
        try:
            return await run_group(setup, Assignment(task=TASK, draw=5), envs, group_size=3)
        finally:
            threads.close()

    group = asyncio.run(run())
    assert [t.outcome for t in group.trajectories] == [Outcome.COMPLETED, INFRASTRUCTURE, Outcome.COMPLETED]
    assert [t.member for t in group.valid] == [0, 2]
    assert [t.reward for t in group.valid] == [1.0, 1.0]
    assert len({t.seed for t in group.trajectories}) == 1
    assert len({request.seed for request in policy.requests}) == 3
