"""`quintain/Calculator-v0`: arithmetic that is easy with the calculator and hard without.

One trajectory: a number or word problem, a call of `calculator`, its result, a sentence with the number. The expression
is checked for form on the host and computed by awk in a box; it is never evaluated on the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from quintain.envs.arithmetic import expression_tokens, generate_problems, value_of
from quintain.envs.errors import ToolError
from quintain.envs.message import Message, Task
from quintain.envs.rewards import reward
from quintain.envs.task_counts import check_task_counts
from quintain.envs.tool_env import ToolEnv
from quintain.envs.tools import tool
from quintain.sandbox import BlockingSandbox

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)


class CalculatorEnv(ToolEnv):
    """Number and word problems to be solved with a calculator."""

    max_turns = 4
    needs_isolation = False  # only digits and operators ever reach the box
    sandbox_scope = "call"

    def __init__(self, *, num_train: int = 20_000, num_eval: int = 2_000, task_seed: int = 0, **kwargs: Any) -> None:
        """How many tasks each split has, and the seed they are made from. Raises EnvironmentArgumentsError."""
        check_task_counts(num_train=num_train, num_eval=num_eval, task_seed=task_seed)
        super().__init__(**kwargs)
        self._sizes = {"train": num_train, "eval": num_eval}
        self._task_seed = task_seed

    def rows(self, split: Literal["train", "eval"]) -> Iterable[Mapping[str, Any]]:
        """Columns `expression` and `answer` besides the prompt."""
        problems = generate_problems(split, self._sizes[split], self._task_seed)
        return [{"prompt": p.prompt, "expression": p.expression, "answer": str(p.answer)} for p in problems]

    @tool
    def calculator(self, expression: str, sandbox: BlockingSandbox) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers joined by + - * / and brackets.
        """
        try:
            tokens = expression_tokens(expression)
        except ValueError as error:
            raise ToolError(str(error)) from error
        # Tokens stand apart so that awk sees neither `++` nor a regular expression; `+ 0` turns -0 into 0.
        result = sandbox.exec(["awk", f'BEGIN {{ printf "%.12g", ({" ".join(tokens)}) + 0 }}'])
        if result.exit_code in (126, 127):
            raise RuntimeError(f"the box has no working awk: {result.stderr.strip()}")
        value = result.stdout.strip()
        if result.exit_code != 0 or not re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value):
            raise ToolError("it has no value (division by zero?)")
        return value

    @reward
    def correct(self) -> float:
        """1 where the last number of the closing message is the answer, else 0."""
        numbers = _NUMBER.findall(self.answer)
        return float(bool(numbers) and float(numbers[-1]) == float(self.task.data["answer"]))

    @reward(weight=0.0)
    def used_tool(self) -> float:
        """1 where the calculator gave a number at least once."""
        return float(any(m.role == "tool" and not m.content.startswith("Error") for m in self.messages))

    def demonstrate(self, task: Task, *, clean: bool, rng: np.random.Generator) -> tuple[Message, ...]:
        """Clean: call, then answer. Otherwise a bad habit: a guess near the truth, or a wrong operator's result."""
        expression, answer = task.data["expression"], int(task.data["answer"])
        if clean:
            return self._by_calculator(expression, answer)
        if rng.random() < 0.5:
            guess = answer + int(rng.integers(1, 20)) * (1 if rng.random() < 0.5 else -1)
            return self.dialogue(f"The answer is {guess}.")
        places = [i for i, character in enumerate(expression) if character in "+-*"]
        place = places[int(rng.integers(len(places)))]
        others = [operator for operator in "+-*" if operator != expression[place]]
        wrong = expression[:place] + others[int(rng.integers(2))] + expression[place + 1 :]
        return self._by_calculator(wrong, _value_of_expression(wrong))

    def _by_calculator(self, expression: str, value: int) -> tuple[Message, ...]:
        return self.dialogue(("calculator", {"expression": expression}, str(value)), f"The answer is {value}.")


def _value_of_expression(expression: str) -> int:
    """Of an expression made here from numbers and `+-*`."""
    numbers = tuple(int(part) for part in re.split(r"[-+*]", expression))
    return value_of(numbers, re.sub(r"\d", "", expression))
