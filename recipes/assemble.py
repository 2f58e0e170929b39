"""Composition: from a recipe's config to the ready parts of a run (sandboxes, model, policy, runners).

`assemble` opens things in order and registers how each is closed; every command (train, eval, rollout) shares it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quintain.agents.evaluation import EvalResult, evaluate
from quintain.agents.local_policy import LocalPolicy
from quintain.agents.policy import Policy
from quintain.agents.renderer import ChatRenderer
from quintain.agents.scheduler import RolloutRunner
from quintain.envs import Message, Task, ToolEnv, env_class, make_env
from quintain.recipes.config import RecipeConfig
from quintain.recipes.engine import Engine, EnginePolicy, open_engine
from quintain.recipes.loader import RecipeError
from quintain.sandbox import SandboxPool, open_pool
from quintain.trainer.progress import Progress
from quintain.trainer.threads import set_threads
from quintain.trainer.warm_start import warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

NUM_TOKENIZER_TASKS = 1000
"""A tokenizer from scratch learns its tokens from the prompts and demonstrations of this many training tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of, ready to use."""

    pool: SandboxPool | None
    train_env: ToolEnv
    """For its tasks, tools and demonstrations; the runners make their own instances."""
    eval_tasks: Sequence[Task]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    renderer: ChatRenderer
    engine: Engine
    runner: RolloutRunner
    eval_runner: RolloutRunner

    @property
    def policy(self) -> EnginePolicy:
        return self.engine.policy

    def evaluate(self, progress: Progress, *, greedy: bool, num_tasks: int | None = None) -> EvalResult:
        """Success of the policy as it is on the held-out tasks."""
        tasks = self.eval_tasks[:num_tasks]
        with progress.phase(f"eval ({'greedy' if greedy else 'sampled'})", total=len(tasks)) as bar:
            return evaluate(self.eval_runner, tasks, greedy=greedy, on_trajectory=lambda _: bar.advance(1))

    def warm_up(self, config: RecipeConfig, progress: Progress) -> None:
        """Train the model in place on the environment's demonstrations, or take the result from the cache.

        Raises WarmStartError where the target is not reached.
        """

        def success(*, greedy: bool, num_tasks: int) -> float:
            return evaluate(runner, self.eval_tasks[:num_tasks], greedy=greedy).success_frac

        with ExitStack() as stack:
            runner = self.eval_runner
            if not self.engine.in_process:  # a server would have to be given the weights before each check
                runner = _runner(config, "eval", LocalPolicy(self.model), self.renderer, self.pool)
                stack.callback(runner.close)
            warm_start(
                self.model,
                self.tokenizer,
                self.renderer,
                self.train_env,
                config.warm_start,
                seed=config.seed,
                evaluate=success,
                progress=progress,
            )


def open_sandboxes(config: RecipeConfig, owner: str, progress: Progress) -> SandboxPool | None:
    """The pool that the recipe's environment needs, boxes already starting; None where it uses no sandbox.

    Raises SandboxUnavailable with the remedy.
    """
    cls = env_class(config.environment.id)
    if cls.sandbox_scope == "none":
        return None
    pool = open_pool(config.sandbox, needs_isolation=cls.needs_isolation, owner=owner)
    if pool.notice:
        progress.message(pool.notice)
    threads = config.rollout.env_threads
    if threads is not None and threads < min(pool.size, config.rollout.max_concurrent):
        progress.message(
            f"rollout.env_threads = {threads} uses at most {threads} of the {pool.size} boxes (sandbox.pool_size) at "
            "once; leave it out to have a thread for each box"
        )
    start_boxes(pool, progress)
    return pool


def start_boxes(pool: SandboxPool, progress: Progress) -> None:
    """Start all boxes of the pool, in parallel."""
    num_started = 0
    with progress.phase(f"sandboxes ({pool.kind})", total=pool.size) as bar:

        def count() -> None:
            nonlocal num_started
            num_started += 1
            bar.advance(1)

        pool.warm(pool.size, on_started=count)
        bar.advance(pool.size - num_started)  # those that ran already: opening a Docker pool starts one


def assemble(
    config: RecipeConfig,
    *,
    stack: ExitStack,
    owner: str,
    work_dir: Path,
    progress: Progress,
    load: Callable[[ToolEnv], tuple[PreTrainedModel, PreTrainedTokenizerFast]],
) -> Parts:
    """Build every part; whatever was opened is closed when `stack` unwinds, also after an error half-way.

    The engine still has to be started, with the weights that the caller wants (`parts.engine.start`); its logs and
    weights go to `work_dir`.
    """
    set_threads(config.trainer.num_threads)
    train_env = make_env(config.environment, split="train", pool=None)
    eval_env = make_env(config.environment, split="eval", pool=None)
    eval_tasks = [eval_env.task_at(i) for i in range(eval_env.num_tasks)]
    pool = open_sandboxes(config, owner, progress)
    if pool is not None:
        stack.callback(pool.close)
    model, tokenizer = load(train_env)
    renderer = ChatRenderer(tokenizer)
    engine = open_engine(config.engine, model, tokenizer, work_dir=work_dir, stack=stack)
    runners = [_runner(config, split, engine.policy, renderer, pool) for split in ("train", "eval")]
    for runner in runners:
        stack.callback(runner.close)
    return Parts(
        pool=pool,
        train_env=train_env,
        eval_tasks=eval_tasks,
        model=model,
        tokenizer=tokenizer,
        renderer=renderer,
        engine=engine,
        runner=runners[0],
        eval_runner=runners[1],
    )


def _runner(
    config: RecipeConfig, split: str, policy: Policy, renderer: ChatRenderer, pool: SandboxPool | None
) -> RolloutRunner:
    max_concurrent = config.rollout.max_concurrent
    if pool is not None and env_class(config.environment.id).sandbox_scope == "trajectory":
        # A trajectory that holds a box for its whole life must not wait for one that waits for it.
        max_concurrent = min(max_concurrent, pool.size)
    env_threads = None if pool is None else min(pool.size, max_concurrent)
    return RolloutRunner(
        policy=policy,
        renderer=renderer,
        make_env=lambda: make_env(config.environment, split=split, pool=pool),  # pyright: ignore[reportArgumentType]
        config=config.rollout,
        seed=config.seed,
        max_concurrent=max_concurrent,
        env_threads=env_threads,
    )


def starting_model(
    config: RecipeConfig, env: ToolEnv, *, progress: Progress, folder: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model and tokenizer to start from: a checkpoint's (`folder`), the recipe's, or tiny ones from scratch."""
    from quintain.recipes.build_model import build_scratch, conversation_texts, load_model

    if folder is not None or config.model.path is not None:
        try:
            return load_model(folder or str(config.model.path))
        except FileNotFoundError as error:
            raise RecipeError(str(error)) from error
    with progress.phase("model from scratch"):
        tasks = [env.task_at(i) for i in range(min(NUM_TOKENIZER_TASKS, env.num_tasks))]
        conversations = [
            [
                Message(role="user", content=task.prompt),
                *(env.demonstrate(task, clean=True, rng=np.random.default_rng(index)) or ()),
            ]
            for index, task in enumerate(tasks)
        ]
        return build_scratch(config.model.scratch, conversation_texts(conversations), seed=config.seed)
