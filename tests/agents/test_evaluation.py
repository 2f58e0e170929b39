"""Evaluation, and the random streams it must not share with training."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from toy_chat import Parrot, renderer

from quintain.agents.completion import GenerateRequest
from quintain.agents.config import RolloutConfig
from quintain.agents.evaluation import EvalResult, evaluate
from quintain.agents.policy import PolicyError
from quintain.agents.scheduler import RolloutRunner
from quintain.agents.scripted_policy import ScriptedPolicy
from quintain.agents.seeds import derive_seed
from quintain.envs import Task

TASKS = [Task(id=f"t{n}", prompt=f"say {n}", data={"answer": "done" if n % 4 else "never"}) for n in range(8)]


def run(script, *, greedy: bool, **config) -> tuple[EvalResult, ScriptedPolicy]:
    policy = ScriptedPolicy(script, renderer=renderer())
    settings = RolloutConfig(max_new_tokens=64, temperature=0.7, **config)
    runner = RolloutRunner(policy=policy, renderer=renderer(), make_env=Parrot, config=settings, seed=3)
    try:
        return evaluate(runner, TASKS, greedy=greedy), policy
    finally:
        runner.close()


@pytest.mark.parametrize(("greedy", "temperature"), [(True, 0.0), (False, 0.7)])
def test_each_task_is_tried_once_greedy_or_sampled(greedy: bool, temperature: float):
    result, policy = run(["done"], greedy=greedy)
    assert (result.success_frac, result.reward_mean, result.num_tasks, result.num_failed) == (0.75, 0.75, 8, 0)
    assert {request.sampling.temperature for request in policy.requests} == {temperature}
    assert [group.task_id for group in result.groups] == [task.id for task in TASKS]


def test_tasks_that_failed_for_our_reasons_are_counted_apart():
    """C15"""

    def answer(request: GenerateRequest) -> str | Exception:
        return PolicyError("down") if request.key.draw == 0 else "done"

    result, _ = run(answer, greedy=True, num_retries=0)
    assert result.num_failed == 1 and result.success_frac == pytest.approx(6 / 7)


def test_where_nothing_has_a_reward_there_is_no_success_rate():
    result, _ = run([PolicyError("down")], greedy=True, max_failure_frac=1.0)
    assert math.isnan(result.success_frac) and math.isnan(result.reward_mean) and result.num_failed == 8


def test_seeds_are_the_same_in_every_process_and_tell_their_parts_apart():
    code = "from quintain.agents.seeds import derive_seed; print(derive_seed(1, 'train', 2, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == derive_seed(1, "train", 2, 3)
    parts = [(1, 2), (12,), ("1", 2), ("1", "2"), ("12",), ("i1", "2"), (2, 1), (1, 2, 0)]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    assert all(0 <= derive_seed(number) < 2**53 for number in range(1000))
