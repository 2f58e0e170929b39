"""One training step of 128 calculator trajectories: quintain against the plain loop of `recipes/grpo_in_one_file.py`.

    PYTHONSAFEPATH=1 python benchmarks/step.py [--threads 1] [--steps 5] [--boxes none|local|docker]

Both start from the same warm-started model (built once, about a minute, then cached) and play the same tasks in the
same process, step by step in turn, so that a busy machine is busy for both. With `--boxes none` the tool computes on
the host for both, which leaves the cost of the loops themselves; with boxes, both use the same pool. Printed are
medians over the steps, the first one left out: wall time, CPU time of the process, sampled tokens a second of rollout.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

# Threads that wait must not spin: on few cores they would take the time of those that work. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from quintain.agents.scheduler import Draw
from quintain.envs import ToolError, make_env, tool
from quintain.envs.arithmetic import expression_tokens
from quintain.envs.calculator import CalculatorEnv
from quintain.recipes.assemble import Parts, assemble, starting_model
from quintain.recipes.config import RecipeConfig
from quintain.recipes.grpo_in_one_file import group_advantages as plain_advantages
from quintain.recipes.grpo_in_one_file import rollout as plain_rollout
from quintain.recipes.grpo_in_one_file import train_step as plain_train_step
from quintain.recipes.loader import load_recipe
from quintain.trainer.advantages import group_advantages
from quintain.trainer.batch import samples_from_groups
from quintain.trainer.learner import Learner
from quintain.trainer.progress import PlainProgress

ROOT = Path(__file__).parents[1]


class HostCalculatorEnv(CalculatorEnv):
    """The calculator without a box, for expressions of whole numbers and `+ - *`, as the tiny model writes them."""

    sandbox_scope = "none"

    @tool
    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers joined by + - * / and brackets.
        """
        try:
            tokens = expression_tokens(expression)
        except ValueError as error:
            raise ToolError(str(error)) from error
        total, sign, product = 0, 1, None
        for token in [*tokens, "+"]:
            if token in "+-" and product is not None:
                total, sign, product = total + sign * product, 1 if token == "+" else -1, None
            elif token.isdigit():
                product = int(token) * (1 if product is None else product)
        return str(total)


@dataclass(slots=True, kw_only=True)
class Timings:
    """Of one contender: a number a step."""

    rollout_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def add(self, act: Callable[[], int], train: Callable[[], object]) -> None:
        cpu, started = time.process_time(), time.perf_counter()
        num_tokens = act()
        acted = time.perf_counter()
        train()
        self.rollout_s.append(acted - started)
        self.train_s.append(time.perf_counter() - acted)
        self.cpu_s.append(time.process_time() - cpu)
        self.num_tokens.append(num_tokens)

    def step_s(self) -> float:
        return statistics.median(a + b for a, b in zip(self.rollout_s[1:], self.train_s[1:], strict=True))

    def line(self, name: str) -> str:
        rollout_s, train_s, cpu_s = (statistics.median(x[1:]) for x in (self.rollout_s, self.train_s, self.cpu_s))
        rate = statistics.median(n / s for n, s in zip(self.num_tokens[1:], self.rollout_s[1:], strict=True))
        return (
            f"{name:<11} rollout {rollout_s:6.3f} s   train {train_s:6.3f} s   step {self.step_s():6.3f} s   "
            f"cpu {cpu_s:6.3f} s   {rate:7.0f} sampled tokens/s of rollout"
        )


def quintain_step(parts: Parts, config: RecipeConfig, learner: Learner, step: int, timings: Timings) -> None:
    algorithm, groups = config.algorithm, []
    first = step * algorithm.tasks_per_step
    draws = [Draw(number=n, task=parts.train_env.task_at(n)) for n in range(first, first + algorithm.tasks_per_step)]

    def act() -> int:
        groups.extend(parts.runner.collect(draws, group_size=algorithm.group_size))
        return sum(t.num_sampled_tokens for group in groups for t in group.trajectories)

    def train() -> None:
        learner.train_on(samples_from_groups(groups, group_advantages(groups, algorithm), algorithm))
        parts.policy.set_policy_version(learner.policy_version)

    timings.add(act, train)


class PlainLoop:
    """The one-file loop on a copy of the model."""

    def __init__(self, parts: Parts, config: RecipeConfig) -> None:
        self._renderer, self._config = parts.renderer, config
        self._model = copy.deepcopy(parts.model).eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.algorithm.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        count = config.algorithm.tasks_per_step * config.algorithm.group_size
        self._envs = [make_env(config.environment, split="train", pool=parts.pool) for _ in range(count)]
        for env in self._envs:
            env.task_at(0)  # each makes its table of tasks when first asked

    def step(self, step: int, timings: Timings) -> None:
        algorithm, rows = self._config.algorithm, []
        size, first = algorithm.group_size, step * algorithm.tasks_per_step
        tasks = [self._envs[0].task_at(first + i // size) for i in range(len(self._envs))]

        def act() -> int:
            limit = self._config.rollout.max_new_tokens
            rows.extend(plain_rollout(self._model, self._renderer, self._envs, tasks, seed=step, max_new_tokens=limit))
            return sum(sum(row.sampled) for row in rows)

        def train() -> None:
            groups = [rows[i : i + size] for i in range(0, len(rows), size)]
            advantages = [a for group in groups for a in plain_advantages([row.reward for row in group])]
            plain_train_step(self._model, self._optimizer, rows, advantages)

        timings.add(act, train)


def main() -> None:
    parser = argparse.ArgumentParser(description="time one training step: quintain and the plain loop")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--boxes", choices=["none", "local", "docker"], default="none")
    args = parser.parse_args()
    overrides = [f"trainer.num_threads={args.threads}", f"trainer.steps={args.steps}"]
    if args.boxes == "none":
        overrides.append(f"environment.id={Path(__file__).resolve()}:HostCalculatorEnv")
    else:
        overrides.append(f"sandbox.type={args.boxes}")
    config = load_recipe(ROOT / "recipes" / "calculator.yaml", overrides).config
    progress = PlainProgress(sys.stderr)
    with ExitStack() as stack:
        load = partial(starting_model, config, progress=progress, folder=None)
        parts = assemble(config, stack=stack, owner="benchmark-step", progress=progress, load=load)
        parts.warm_up(config, progress)
        plain, learner = PlainLoop(parts, config), Learner(parts.model, config.algorithm, config.trainer, temperature=1)
        ours, theirs = Timings(), Timings()
        for step in range(args.steps + 1):
            quintain_step(parts, config, learner, step, ours)
            plain.step(step, theirs)
    count = config.algorithm.tasks_per_step * config.algorithm.group_size
    print(f"{count} trajectories a step, {args.threads} thread(s), boxes: {args.boxes}, {args.steps} steps each")
    print(ours.line("quintain"))
    print(theirs.line("plain loop"))
    print(f"step time, quintain / plain loop: {ours.step_s() / theirs.step_s():.2f}")


if __name__ == "__main__":
    main()
