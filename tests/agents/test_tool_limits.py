"""A tool's own limit of tokens, and its deadline, in a rollout."""

from __future__ import annotations

import math
import time

from toy_chat import Parrot, call_text, renderer, roll

from quintain.agents.outcome import Outcome, StopReason
from quintain.envs import tool


class Limited(Parrot):
    @tool(max_output_tokens=24)
    def say(self, text: str) -> str:
        """Say."""
        return "北京" * 500

    @tool(deadline_s=0.1)
    def sleep(self) -> str:
        """Sleep."""
        time.sleep(0.5)
        return ""


def test_the_lower_of_the_tools_and_the_runs_limit_holds():
    chat = renderer()
    for of_the_run, limit in ((256, 24), (12, 12)):
        trajectory = roll([call_text(), "done"], env=Limited, max_tool_tokens=of_the_run)
        (answer,) = (m for m in trajectory.messages if m.role == "tool")
        assert limit // 2 < len(chat.encode_plain(answer.content)) <= limit and "\ufffd" not in answer.content
        assert trajectory.events["tool_output_cut"] == 1


def test_a_tool_that_cannot_be_stopped_at_its_deadline_is_the_environments_failure():
    trajectory = roll([call_text("sleep", "{}"), "done"], env=Limited)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.ENVIRONMENT, StopReason.ENVIRONMENT_ERROR)
    assert math.isnan(trajectory.reward) and "`sleep` took longer than its deadline of 0.1 s" in str(trajectory.error)
