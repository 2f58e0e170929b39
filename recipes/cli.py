"""The command line, `quintain`. Each command parses its arguments, then imports what it needs and nothing earlier.

Exit codes: 0 done; 1 the run failed (a short error, and where its log is); 2 bad input, found before anything started;
130 after Ctrl-C, 143 after SIGTERM (both after a clean end). `cli_errors` decides which.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from quintain.recipes.cli_accuracy import accuracy, replay_batch
from quintain.recipes.cli_doctor import doctor
from quintain.recipes.cli_sandbox import sandbox

ENVIRONMENT_DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads of two OpenMP libraries would spin against each other
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",  # the tokenizer is called from many threads, never on long lists
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # they would break ours
}
"""Read by native libraries when they load, so set before the first heavy import; what the user set wins."""

_OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="quintain", message="%(prog)s %(version)s")
def cli() -> None:
    """Train LLM agents by reinforcement learning in tool-using, sandboxed environments.

    \b
    Start here:
      quintain train recipes/calculator.yaml     train a tiny model, on a CPU, in minutes
      quintain view                              look at its curves and trajectories in the browser
    """


@cli.command(short_help="Train as a recipe says, or go on with a run.")
@click.argument("recipe")
@_OVERRIDES
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [default: runs/<recipe name>-<time>]")
@click.option("--resume", is_flag=True, help="Go on with a run: RECIPE's own folder, --out, or the newest.")
def train(recipe: str, overrides: tuple[str, ...], out: Path | None, resume: bool) -> None:
    """Train as RECIPE says, with settings overridden by KEY=VALUE.

    RECIPE is a file, or a run folder, whose config.yaml is then the recipe.

    \b
    Examples:
      quintain train recipes/calculator.yaml
      quintain train recipes/calculator.yaml seed=7 trainer.steps=50 --out runs/seed7
      quintain train runs/seed7/config.yaml --resume
    """
    from quintain.recipes.launch import is_follower, needs_launch, relaunch
    from quintain.recipes.loader import load_recipe
    from quintain.recipes.preflight import preflight

    loaded = load_recipe(recipe, overrides)
    notices = preflight(loaded, out=out, resume=resume)
    if needs_launch(loaded.config):
        raise click.exceptions.Exit(relaunch(loaded.config, sys.argv[1:]))
    if is_follower():
        from quintain.recipes.train import follow_recipe

        return follow_recipe(loaded)

    from quintain.recipes.progress import make_progress

    with make_progress() as progress:
        for notice in notices:
            progress.message(f"note: {notice}")
        from quintain.recipes.train import train_recipe

        summary = train_recipe(loaded, out=out, resume=resume, progress=progress)

    from quintain.recipes.show import print_summary

    print_summary(Path(summary.run_dir))


@cli.command(name="eval", short_help="Success on held-out tasks, of a run or a recipe's model.")
@click.argument("target", metavar="RUN|RECIPE")
@_OVERRIDES
@click.option("--greedy/--sampled", default=False, help="Temperature 0, or the recipe's.  [default: sampled]")
@click.option(
    "--num-tasks", type=click.IntRange(min=1), help="Use the first N held-out tasks.  [default: the recipe's]"
)
def evaluate(target: str, overrides: tuple[str, ...], greedy: bool, num_tasks: int | None) -> None:
    """Success on held-out tasks: of a run's newest checkpoint, or of a recipe's model before training.

    \b
    Examples:
      quintain eval runs/seed7 --greedy
      quintain eval recipes/calculator.yaml --num-tasks 64
    """
    from quintain.recipes.loader import load_recipe
    from quintain.recipes.preflight import check_engine
    from quintain.recipes.progress import make_progress

    loaded = load_recipe(target, overrides)
    check_engine(loaded)
    run = Path(target) if Path(target).is_dir() else None
    with make_progress() as progress:
        from quintain.recipes.evaluate import evaluate_run

        result = evaluate_run(loaded, run=run, greedy=greedy, num_tasks=num_tasks, progress=progress)
    failed = f", {result.num_failed} of them failed to run" if result.num_failed else ""
    click.echo(
        f"success {result.success_frac:.3f}, mean reward {result.reward_mean:.3f} "
        f"({result.num_tasks} tasks, {'greedy' if greedy else 'sampled'}{failed})"
    )


@cli.command(short_help="Print some conversations of a run's or a recipe's model.")
@click.argument("target", metavar="RUN|RECIPE")
@_OVERRIDES
@click.option("--num-tasks", type=click.IntRange(min=1), default=1, show_default=True, help="Groups to roll out.")
@click.option("--eval", "held_out", is_flag=True, help="Use held-out tasks.  [default: training tasks]")
def rollout(target: str, overrides: tuple[str, ...], num_tasks: int, held_out: bool) -> None:
    """Print conversations of a model on some tasks: a run's newest checkpoint, or a recipe's model before training.

    Nothing is trained (but for the recipe's warm start), nothing is written.

    \b
    Examples:
      quintain rollout recipes/calculator.yaml
      quintain rollout recipes/calculator.yaml algorithm.group_size=2 --num-tasks 3
      quintain rollout runs/seed7 algorithm.group_size=1 --num-tasks 5 --eval
    """
    from quintain.recipes.loader import load_recipe
    from quintain.recipes.preflight import check_engine
    from quintain.recipes.progress import make_progress

    loaded = load_recipe(target, overrides)
    check_engine(loaded)
    run = Path(target) if Path(target).is_dir() else None
    with make_progress() as progress:
        from quintain.recipes.rollout import rollout_recipe

        groups = rollout_recipe(loaded, run=run, num_tasks=num_tasks, held_out=held_out, progress=progress)

    from quintain.recipes.show import print_groups

    print_groups(groups)


@cli.command(short_help="A run's summary, curves and last conversations, as text.")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Show trajectories of this step.  [default: the last]")
@click.option("--num-trajectories", type=click.IntRange(min=0), default=2, show_default=True)
def show(run: Path | None, step: int | None, num_trajectories: int) -> None:
    """Summary, curves and last conversations of RUN (default: the newest under runs/), in the terminal.

    \b
    Examples:
      quintain show
      quintain show runs/seed7 --step 3 --num-trajectories 8
    """
    from quintain.recipes.show import newest_run, show_run

    show_run(run or newest_run(), step=step, num_trajectories=num_trajectories)


@cli.command(short_help="A run's curves and trajectories in the browser (Aim).")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port of the page.  [default: a free one]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
def view(run: Path | None, port: int | None, host: str) -> None:
    """Start Aim's page with links to trajectories and curves of RUN (default: the newest); Ctrl-C ends it.

    \b
    Examples:
      quintain view
      quintain view runs/seed7 --port 43800
    """
    from quintain.recipes.show import newest_run
    from quintain.recipes.view import view as view_run

    view_run(run or newest_run(), port=port, host=host)


@cli.group()
def env() -> None:
    """The environments that recipes can name."""


@env.command(name="list", short_help="The registered environments.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env_list(as_json: bool) -> None:
    """The registered environments, those of installed plugins included.

    \b
    Example:
      quintain env list --json
    """
    from quintain.recipes.cli_env import list_environments

    list_environments(as_json=as_json)


@env.command(name="check", short_help="Whether an environment keeps its promises.")
@click.argument("env_id", metavar="ID")
@click.option(
    "--sandbox", "sandbox_type", type=click.Choice(["auto", "docker", "local"]), default="auto", show_default=True
)
def env_check(env_id: str, sandbox_type: str) -> None:
    """Check the environment ID: Gymnasium's own checks, tool schemas, tasks, demonstrations against the real tools.

    ID is a Gymnasium id, path/to/file.py:ClassName or module:ClassName. The exit code is 1 where a check fails.

    \b
    Examples:
      quintain env check quintain/Calculator-v0
      quintain env check my_env.py:MyEnv --sandbox local
    """
    from quintain.recipes.cli_env import check_environment

    if not check_environment(env_id, sandbox_type=sandbox_type):
        raise click.exceptions.Exit(1)


cli.add_command(accuracy)
cli.add_command(replay_batch)
cli.add_command(doctor)
cli.add_command(sandbox)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always ends in SystemExit."""
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from quintain.recipes.cli_errors import report, terminate_like_ctrl_c

    terminate_like_ctrl_c()
    try:
        code = cli.main(None if arguments is None else list(arguments), prog_name="quintain", standalone_mode=False)
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (outermost boundary: error -> exit code)
        code = report(error)
    sys.exit(code if isinstance(code, int) else 0)
