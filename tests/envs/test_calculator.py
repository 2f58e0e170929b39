"""The calculator: problems, the tool in a box, rewards and demonstrations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from small_envs import call, say

from quintain.envs import Task, ToolEnv
from quintain.envs.arithmetic import MAX_EXPRESSION, TEMPLATES, expression_tokens, generate_problems
from quintain.envs.calculator import CalculatorEnv
from quintain.sandbox import SandboxPool


@pytest.fixture
def env(pool: SandboxPool) -> Iterator[CalculatorEnv]:
    made = CalculatorEnv(pool=pool)
    yield made
    made.close()


def compute(env: ToolEnv, expression: str) -> str:
    env.reset(options={"task": Task(id="t", prompt="p", data={"answer": "0", "expression": "0"})})
    observation, *_ = env.step(call(("calculator", json.dumps({"expression": expression}))))
    return observation[0].content


def test_problems_are_plentiful_reproducible_and_disjoint_between_splits() -> None:
    train, held_out = generate_problems("train", 20_000, 0), generate_problems("eval", 2_000, 0)
    assert (len(train), len(held_out)) == (20_000, 2_000)
    assert generate_problems("eval", 2_000, 0) == held_out != generate_problems("eval", 2_000, 1)
    assert not {p.expression for p in train} & {p.expression for p in held_out}
    assert not {p.prompt for p in train} & {p.prompt for p in held_out} and len({p.prompt for p in train}) == 20_000
    for problem in [*train[:500], *held_out[:500]]:
        numbers = [int(part) for part in re.findall(r"\d+", problem.expression)]
        assert (
            re.findall(r"\d+", problem.prompt) == [str(n) for n in numbers] and 2 <= min(numbers) <= max(numbers) <= 99
        )
        assert eval(problem.expression) == problem.answer  # the test's own arithmetic on text made here
    assert len(TEMPLATES) == 9 and max(len(p.prompt) for p in train) <= 64


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37+48", "85"),
        ("3 - 50", "-47"),
        ("99*99", "9801"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("7/2", "3.5"),
        ("1/3", "0.333333333333"),
        ("5--3", "8"),
        ("5+-+3", "2"),
        ("-3*-4", "12"),
        ("0*-5", "0"),
        ("007+1", "8"),
        ("0.1+0.2", "0.3"),
        (".5*4.", "2"),
        ("99999*99999", "9999800001"),
    ],
)
def test_expressions_are_computed_in_the_box(env: CalculatorEnv, expression: str, value: str) -> None:
    assert compute(env, expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "not finished"),
        ("3+", "not finished"),
        ("(3+4", "not finished"),
        ("3 4", "does not fit"),
        ("3(4)", "does not fit"),
        ("()", "does not fit"),
        ("3)", "does not fit"),
        ("2**3", "does not fit"),
        ("5//3", "does not fit"),
        ("/5/", "does not fit"),
        ("1.2.3", "does not fit"),
        ("1/0", "division by zero"),
        ("0/0", "division by zero"),
        ("2^3", "only digits"),
        ("system(1)", "only digits"),
        ('1}; BEGIN {system("touch /tmp/x")}', "only digits"),
        ("1\n+1", "only digits"),
        ("١+١", "only digits"),
        ("1+" * MAX_EXPRESSION + "1", "at most 64"),
    ],
)
def test_what_is_no_expression_is_an_observation(env: CalculatorEnv, expression: str, words: str) -> None:
    answer = compute(env, expression)
    assert answer.startswith("Error: ") and words in answer and len(answer) < 120


def test_tokens_are_only_numbers_signs_and_brackets() -> None:
    assert expression_tokens("(12+ .5)*3.") == ["(", "12", "+", ".5", ")", "*", "3."]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 85.", 1.0),
        ("85", 1.0),
        ("37 plus 48 is 85.0", 1.0),
        ("The answer is 86.", 0.0),
        ("The answer is -85.", 0.0),
        ("85 or 86", 0.0),
        ("The answer is 185.", 0.0),
        ("", 0.0),
        ("eighty-five", 0.0),
    ],
)
def test_the_last_number_of_the_closing_message_counts(env: CalculatorEnv, text: str, value: float) -> None:
    env.reset(options={"task": Task(id="t", prompt="p", data={"answer": "85", "expression": "37+48"})})
    _, total, _, _, info = env.step(say(text))
    assert (total, info["success"]) == (value, value == 1.0)
    assert info["metrics"] == {"used_tool": 0.0}


def test_used_tool_is_a_metric_and_failed_calls_do_not_count(env: CalculatorEnv) -> None:
    for expression, used in (("1+1", 1.0), ("1/0", 0.0)):
        compute(env, expression)
        assert env.step(say("5"))[4]["metrics"] == {"used_tool": used}


def test_demonstrations_say_what_the_real_tool_answers(env: CalculatorEnv) -> None:
    rng = np.random.default_rng(0)
    habits = {"calls": 0, "guesses": 0, "right": 0}
    for index in range(60):
        task, clean = env.task_at(index), index < 30
        messages = env.demonstrate(task, clean=clean, rng=rng)
        env.reset(options={"task": task})
        shown = [message for message in messages if message.role == "tool"]
        seen, info = [], {}
        for message in messages:
            if message.role == "assistant":
                observation, _, _, _, info = env.step(message)
                seen += observation
        assert seen == shown
        if clean:
            assert info["success"] and len(messages) == 3
        else:
            habits["calls" if shown else "guesses"] += 1
            habits["right"] += info["success"]
    assert habits["calls"] >= 8 and habits["guesses"] >= 8 and habits["right"] <= 3
