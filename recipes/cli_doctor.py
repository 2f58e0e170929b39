"""`quintain doctor`: whether a model's parts fit what a run does with them. Arguments and printing only."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.group(short_help="Whether a model's chat template suits a run.")
def doctor() -> None:
    """Examine a model before anything is trained."""


@doctor.command(name="template", short_help="What a chat template does, and what a run makes of it.")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_template(model_dir: Path, as_json: bool) -> None:
    """Examine the chat template of the tokenizer in MODEL_DIR (a Hugging Face folder; no weights are read).

    It tells what ends a reply, how tools, calls and reasoning are written, whether earlier turns are left as they were,
    and what each value of rollout.history does. The exit code is 1 where a run with the default (`refuse`) would not
    start, and 2 where the folder has no usable tokenizer or template.

    \b
    Examples:
      quintain doctor template models/Qwen3-0.6B
      quintain doctor template runs/seed7/checkpoints/step_0000030/model --json
    """
    from quintain.recipes.doctor import load_tokenizer, print_report

    tokenizer = load_tokenizer(model_dir)

    from quintain.agents.template_report import examine_template

    report = examine_template(tokenizer)
    if as_json:
        click.echo(json.dumps(report.to_json(), ensure_ascii=False, indent=2))
    else:
        print_report(str(model_dir), report)
    if not report.usable:
        raise click.exceptions.Exit(1)
