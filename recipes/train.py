"""`quintain train`: compose a run from its recipe, train, and leave a complete run folder, whatever happens.

    run folder, config.yaml -> parts (sandboxes, model, runners) -> warm start | checkpoint -> loop -> summary.json

The clean-up order is the reverse of the set-up: trackers close with the run's final status, runners, then boxes.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from quintain.agents.store import TrajectoryStore
from quintain.recipes.assemble import Parts, assemble, starting_model
from quintain.recipes.cli_errors import is_input_error
from quintain.recipes.config import RecipeConfig
from quintain.recipes.hints import command_line
from quintain.recipes.loader import LoadedRecipe, dump_config
from quintain.recipes.resume import checkpoint_to_resume, find_run
from quintain.recipes.run_lock import locked, make_run_folder
from quintain.recipes.run_log import LoggedProgress, log_file
from quintain.recipes.summary import Summary, summarise
from quintain.trainer.checkpoint import Checkpoints, GoodCheckpoint, SavedTogether
from quintain.trainer.critic import Critic
from quintain.trainer.follower import follow, start_followers
from quintain.trainer.launch import end_with_launcher
from quintain.trainer.learner import Learner
from quintain.trainer.ledger import BatchLedger
from quintain.trainer.loop import LoopConfig, LoopState, TrainingLoop
from quintain.trainer.parallel import describe_wrapping, wrapping_of
from quintain.trainer.progress import Progress
from quintain.trainer.ranks import Ranks
from quintain.trainer.status import StatusFile
from quintain.trainer.task_order import TaskOrder
from quintain.trainer.threads import set_threads
from quintain.trainer.tracking import AimTracker, JsonlTracker, Tracker, Trackers, supersede_after
from quintain.trainer.weights import WeightDelivery

logger = logging.getLogger("quintain")


def train_recipe(loaded: LoadedRecipe, *, out: Path | None, resume: bool, progress: Progress) -> Summary:
    """Train as the recipe says; with `resume`, from the newest good checkpoint of the run that `find_run` finds.

    Raises RecipeError where the run to resume was made by another recipe, SandboxUnavailable with the remedy, and
    whatever stops the run, after everything was closed and the last finished batch saved.
    """
    config = loaded.config
    if resume:
        run_dir = find_run(loaded, out)
    else:
        run_dir = out.resolve() if out else make_run_folder(config.name, time.strftime("%Y%m%d-%H%M%S"))
    resumed = checkpoint_to_resume(run_dir, loaded) if resume else None
    progress = LoggedProgress(progress)
    with _run_folder(run_dir, ours=out is None and not resume):
        (run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        status = StatusFile(run_dir, steps=config.trainer.steps)
        with log_file(run_dir), _final_status(run_dir, status), status.heartbeat(), ExitStack() as stack:
            progress.message(f"run folder: {run_dir}")
            if resume and resumed is None:
                progress.message("it has no checkpoint yet: it starts again")
            return _run(loaded, run_dir, resumed, status, stack, progress)


def open_ranks(config: RecipeConfig) -> Ranks:
    """This process among the learner's. Raises WrappingError where other processes were started than asked for."""
    if config.parallelism.num_processes > 1:
        end_with_launcher()
    set_threads(config.trainer.num_threads)
    return Ranks(config.parallelism)


def follow_recipe(loaded: LoadedRecipe) -> None:
    """The part of the ranks other than 0: they train, and do nothing else.

    Ctrl-C and SIGTERM, which reach every rank, are rank 0's to act on: it saves with the others' help and lets them go.
    Raises RankError where it is gone.
    """
    config = loaded.config
    ranks = open_ranks(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(ranks, config.algorithm, config.trainer, temperature=config.rollout.temperature, lora=config.model.lora)
    ranks.close()  # not after an error: this rank's death is how the others learn of it


def _run(
    loaded: LoadedRecipe,
    run_dir: Path,
    resumed: GoodCheckpoint | None,
    status: StatusFile,
    stack: ExitStack,
    progress: Progress,
) -> Summary:
    config = loaded.config
    state = LoopState(**resumed.state) if resumed else LoopState()
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=config.checkpoint.keep)
    ranks = open_ranks(config)
    stack.callback(ranks.close)
    parts, learner, critic = _start(config, run_dir, resumed, state, status, stack, progress, ranks)
    weights = _start_engine(parts, learner, state, status, progress)
    checkpoints.tokenizer = parts.tokenizer
    checkpoints.check_free_space(SavedTogether(learner, critic) if critic else learner)
    supersede_after(run_dir, state.step if resumed else -1)
    kind = parts.pool.kind if parts.pool else "none"
    status.update(sandbox=kind, sandbox_notice=parts.pool.notice if parts.pool else None)
    trackers = _open_trackers(loaded, run_dir, parts, kind, progress)
    loop = TrainingLoop(
        LoopConfig(
            algorithm=config.algorithm,
            trainer=config.trainer,
            evaluation=config.evaluation,
            checkpoint=config.checkpoint,
        ),
        runner=parts.runner,
        learner=learner,
        weights=weights,
        evaluate=partial(parts.evaluate, progress),
        task_at=parts.train_env.task_at,
        order=TaskOrder(parts.train_env.num_tasks, seed=config.seed),
        store=TrajectoryStore(run_dir / "trajectories"),
        trackers=trackers,
        checkpoints=checkpoints,
        status=status,
        progress=progress,
        state=state,
        ledger=_ledger(config, run_dir, parts),
        critic=critic,
    )
    ended = "failed"
    try:
        loop.run()
        ended = "finished"
    except KeyboardInterrupt:
        ended = "interrupted"
        raise
    finally:
        trackers.close(ended)
        summary = summarise(state, sandbox=kind, engine=config.engine.type, seed=config.seed, run_dir=run_dir)
        summary.write()
    return summary


def _start(
    config: RecipeConfig,
    run_dir: Path,
    resumed: GoodCheckpoint | None,
    state: LoopState,
    status: StatusFile,
    stack: ExitStack,
    progress: Progress,
    ranks: Ranks,
) -> tuple[Parts, Learner, Critic | None]:
    """Parts, learner and (with GAE) critic before the first batch: warm-started, or as the checkpoint has them."""
    started = time.perf_counter()
    status.update(phase="assembly", step=state.step)
    load = partial(starting_model, config, progress=progress, folder=resumed.model_path if resumed else None)
    parts = assemble(config, stack=stack, owner=run_dir.name, work_dir=run_dir, progress=progress, load=load)
    assembled = time.perf_counter()
    state.seconds["assembly"] = state.seconds.get("assembly", 0.0) + assembled - started
    if resumed is None and config.warm_start.enabled:
        status.update(phase="warm start")
        parts.warm_up(config, progress)
        state.seconds["warm_start"] = time.perf_counter() - assembled
    start_followers(ranks, parts.model)
    learner = Learner(
        parts.model,
        config.algorithm,
        config.trainer,
        temperature=config.rollout.temperature,
        ranks=ranks,
        lora=config.model.lora,
    )
    critic = None
    if config.algorithm.advantage == "gae":
        device, budget = learner.accelerator.device, config.trainer.micro_batch_tokens
        critic = Critic(parts.model, config.algorithm, micro_batch_tokens=budget, device=device)
    status.update(learner=wrapping_of(learner.model), num_processes=ranks.size)
    if ranks.size > 1 or config.model.lora is not None:
        progress.message(f"learner: {describe_wrapping(learner.model, ranks.size)}")
    if resumed is not None:
        if critic is not None:
            critic.load(resumed.path)
        learner.load(resumed.path)
        for reason in resumed.passed_over:
            progress.message(f"passed over a newer checkpoint: {reason}")
        progress.message(f"resumed after step {state.step}, policy version {learner.policy_version}")
    return parts, learner, critic


def _start_engine(
    parts: Parts, learner: Learner, state: LoopState, status: StatusFile, progress: Progress
) -> WeightDelivery:
    started = time.perf_counter()
    status.update(phase="engine start")
    weights = parts.engine.start(learner.export_model, version=learner.policy_version, progress=progress)
    status.update(engine=parts.engine.description)
    if not parts.engine.in_process:
        progress.message(f"engine: {parts.engine.description}")
        state.seconds["engine_start"] = state.seconds.get("engine_start", 0.0) + time.perf_counter() - started
    return weights


def _ledger(config: RecipeConfig, run_dir: Path, parts: Parts) -> BatchLedger:
    sections = {"algorithm": config.algorithm, "trainer": config.trainer}
    settings = {name: section.model_dump(mode="json") for name, section in sections.items()}
    return BatchLedger(
        run_dir,
        settings=settings | {"temperature": config.rollout.temperature},
        group_size=config.algorithm.group_size,
        vocab_size=parts.model.config.get_text_config().vocab_size,
        keep_all=config.trainer.save_batches,
    )


def _open_trackers(loaded: LoadedRecipe, run_dir: Path, parts: Parts, kind: str, progress: Progress) -> Trackers:
    config = loaded.config
    trackers: list[Tracker] = [JsonlTracker(run_dir)]
    if config.tracking.aim:
        trackers.append(
            AimTracker(
                run_dir,
                experiment=config.tracking.experiment or config.name,
                config=config.tracking,
                decode=lambda ids: str(parts.tokenizer.decode(list(ids), skip_special_tokens=False)),
                mask_truncated=config.algorithm.truncated == "mask",
                report=progress.message,
            )
        )
    opened = Trackers(trackers, report=progress.message)
    record: dict[str, Any] = {"recipe": dict(loaded.resolved), "sandbox": kind, "seed": config.seed}
    if parts.pool and parts.pool.notice:
        record["sandbox_notice"] = parts.pool.notice
    opened.log_params(record)
    return opened


@contextmanager
def _run_folder(run_dir: Path, *, ours: bool) -> Iterator[None]:
    """The folder is there and locked inside the block; `ours`: it was made for this run.

    What a refused run made (input error, no metrics yet) is removed again.
    """
    files = [run_dir / name for name in ("config.yaml", "status.json", "logs/run.log", ".lock")]
    folders = [run_dir / "logs", run_dir / "checkpoints", run_dir, *run_dir.parents]
    made_files, made_folders = ([path for path in paths if not path.exists()] for paths in (files, folders))
    made_folders += [run_dir] if ours else []
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir):
        try:
            yield
        except Exception as error:
            if is_input_error(error) and not (run_dir / "metrics.jsonl").exists():
                for file in made_files:
                    file.unlink(missing_ok=True)
                for folder in made_folders:
                    with suppress(OSError):  # not empty: someone else's file is in it
                        folder.rmdir()
            raise


@contextmanager
def _final_status(run_dir: Path, status: StatusFile) -> Iterator[None]:
    """status.json and the log say how the run ended; the exception that ended it is told where the log is."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        status.update(state="interrupted")
        interrupt.add_note(f"go on with: {command_line('train', run_dir / 'config.yaml', '--resume')}")
        raise
    except BaseException as error:
        logger.exception("the run failed")
        status.update(state="failed", error=f"{type(error).__name__}: {error}")
        error.add_note(f"log: {run_dir / 'logs' / 'run.log'}")
        raise
    status.update(state="finished", phase="end")
