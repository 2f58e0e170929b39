"""Scoring inside the box: hidden tests come in only then, and a scorer that gives no number is never a reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
from small_envs import call, say

from quintain.envs import ToolEnv, VerifierError, reward, tool
from quintain.sandbox import BlockingSandbox, SandboxPool

SECRET = "grader-secret-4711"


class Hidden(ToolEnv):
    """The model writes `answer`; `hidden_test` is put over whatever stands there when it is scored, and run."""

    sandbox_scope = "trajectory"
    scorer = f"[ \"$(cat answer)\" = '{SECRET}' ] && echo 1.0 > reward || echo 0.0 > reward"

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": "Write the answer."}]

    @tool
    def shell(self, command: str, sandbox: BlockingSandbox) -> str:
        """Run a command.

        Args:
            command: the command line.
        """
        return sandbox.exec(command).stdout

    @reward
    def passes(self) -> float:
        self.box.write_file("hidden_test", self.scorer.encode())
        self.box.exec("rm -rf reward; sh hidden_test")
        return float(self.box.read_file("reward").decode())


def test_a_hidden_test_is_not_in_the_box_before_scoring(pool: SandboxPool) -> None:
    """E10: nothing to find by searching; what the model put in the test's place does not count."""
    env = Hidden(pool=pool)
    env.reset(seed=1)
    observation, *_ = env.step(call(("shell", '{"command": "grep -rl grader-secret . 2>/dev/null; echo searched"}')))
    assert observation[0].content.split() == ["searched"]
    env.step(call(("shell", '{"command": "echo \'echo 1.0 > reward\' > hidden_test; echo 1.0 > reward"}')))
    _, score, terminated, _, info = env.step(say("done"))
    assert (score, terminated, info["reward_terms"]) == (0.0, True, {"passes": 0.0})
    env.close()


@pytest.mark.parametrize("scorer", ["true", "echo nan > reward", "echo '{}' > reward", "mkdir reward"])
def test_a_scorer_that_gives_no_number_is_an_error_of_the_verifier(pool: SandboxPool, scorer: str) -> None:
    """E17: neither 0 nor NaN nor the end of the job."""
    env = Hidden(pool=pool)
    env.scorer = scorer
    env.reset(seed=1)
    with pytest.raises(VerifierError, match="passes"):
        env.step(say("done"))
    env.close()


def test_a_scorer_may_end_its_number_with_a_newline(pool: SandboxPool) -> None:
    """E17"""
    env = Hidden(pool=pool)
    env.scorer = "printf '1.0\\n' > reward"
    env.reset(seed=1)
    assert math.isclose(env.step(say("done"))[1], 1.0)
    env.close()
