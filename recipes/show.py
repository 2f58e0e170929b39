"""A run in the terminal: summary, curves, the last conversations. Reads the run folder's files; no Aim, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quintain.recipes.hints import command_line
from quintain.recipes.loader import RecipeError

if TYPE_CHECKING:
    from quintain.agents.trajectory import Group

_BARS = "▁▂▃▄▅▆▇█"
_CURVES = (
    "reward/mean",
    "rollout/success_frac",
    "eval/success_frac_sampled",
    "eval/success_frac_greedy",
    "train/loss",
    "train/grad_norm",
    "time/rollout_s",
    "time/train_s",
)
_STYLES = {"system": "dim", "user": "bold", "assistant": "cyan", "tool": "yellow"}


def newest_run(runs_dir: Path = Path("runs")) -> Path:
    """The run with metrics whose metrics were written last. Raises RecipeError where there is none."""
    metrics = list(runs_dir.glob("*/metrics.jsonl"))
    if metrics:
        return max(metrics, key=lambda path: path.stat().st_mtime).parent
    begun = max(runs_dir.glob("*/status.json"), key=lambda path: path.stat().st_mtime, default=None)
    start = "name a run folder, or start one: quintain train RECIPE"
    raise RecipeError(
        without_metrics(begun.parent) if begun else f"there is no run under {runs_dir.resolve()}; {start}"
    )


def without_metrics(run: Path) -> str:
    """Why a folder has no metrics.jsonl, in a sentence."""
    status = _json_object(run / "status.json")
    if status.get("state") == "running":
        return f"{run} is still in its {status.get('phase')}: it has nothing to show before its first step"
    if status:
        return f"{run} has nothing to show: it ended before its first step ({status.get('state')})"
    return f"{run} is no run folder (it has no metrics.jsonl)"


def show_run(run: Path, *, step: int | None, num_trajectories: int) -> None:
    """Print everything. Raises RecipeError where `run` is no run folder or has no such step."""
    if not (run / "config.yaml").is_file() and not (run / "metrics.jsonl").is_file():
        raise RecipeError(f"{run} is no run folder (it has neither config.yaml nor metrics.jsonl)")
    console = Console()
    print_summary(run, console=console)
    rows = _json_lines(run / "metrics.jsonl")
    if rows:
        console.print(curves_table(rows, width=console.width))
    if num_trajectories:
        _print_trajectories(run, step=step, limit=num_trajectories, console=console)


def print_summary(run: Path, *, console: Console | None = None) -> None:
    """What the run came to, and where to look next."""
    console = console or Console()
    status = _json_object(run / "status.json")
    summary = _json_object(run / "summary.json")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("run", Text(str(run)))
    if status:
        state = f"{status.get('state', '?')}, step {status.get('step', '?')} of {status.get('steps', '?')}"
        table.add_row("state", Text(f"{state}: {status['error']}" if status.get("error") else state))
    if summary:
        before, after = _number(summary.get("success_before")), _number(summary.get("success_after"))
        table.add_row("success on held-out tasks", f"{before} -> {after}")
        first, last = _number(summary.get("reward_first")), _number(summary.get("reward_last"))
        table.add_row("mean reward of a batch", f"{first} -> {last}")
        seconds = summary.get("seconds") or {}
        parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "total")
        table.add_row("seconds", f"{seconds.get('total', 0):.1f}" + (f" ({parts})" if parts else ""))
        table.add_row("sampled tokens per second", _number(summary.get("tokens_per_second")))
        places = (summary.get("sandbox"), summary.get("engine"), summary.get("seed"))
        table.add_row("sandbox, engine, seed", ", ".join(str(value) for value in places))
    console.print(table)
    hint = f"\nLook at it: {command_line('view', run)}    (in the terminal: {command_line('show', run)})"
    console.print(Text(hint), soft_wrap=True)  # one line, to be copied


def curves_table(rows: Sequence[Mapping[str, Any]], *, width: int = 120) -> Table:
    """A line for each known curve that the run has: first value, shape, last value. `width` characters, if possible."""
    found: list[tuple[str, str, list[float], str, str]] = []
    for name in _CURVES:
        points = [(row.get("step"), row[name]) for row in rows if isinstance(row.get(name), int | float)]
        if points:
            values = [float(value) for _, value in points]
            found.append((name, _number(values[0]), values, _number(values[-1]), f"{points[0][0]}–{points[-1][0]}"))
    heads = ("metric", "first", "curve", "last", "steps")
    texts = [max([len(heads[i]), *(len(str(line[i])) for line in found)]) for i in (0, 1, 3, 4)]
    room = max(8, min(40, width - sum(texts) - 3 * len(heads) - 1))  # 3: a rule and two blanks a column
    table = Table(title="curves", title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head in ("first", "last", "steps") else "left", no_wrap=True)
    for name, first, values, last, steps in found:
        table.add_row(name, first, sparkline(values, width=room), last, steps)
    return table


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """A row of bars from lowest to highest value, long series averaged down to `width`; all equal = low bars."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def print_groups(groups: Sequence[Group]) -> None:
    """The conversations of groups that are still in memory."""
    from dataclasses import asdict

    console = Console()
    for group in groups:
        for trajectory in group.trajectories:
            print_trajectory(asdict(trajectory), console=console)


def print_trajectory(trajectory: Mapping[str, Any], *, console: Console) -> None:
    """One conversation; what came from the model or a tool is printed as it is, markup and control characters inert."""
    reward = trajectory.get("reward")
    head = (
        f"task {trajectory.get('task_id')}  draw {trajectory.get('draw')}  member {trajectory.get('member')}  "
        f"reward {_number(reward)}  {trajectory.get('outcome')}/{trajectory.get('stop_reason')}"
    )
    console.rule(Text(head, style="green" if trajectory.get("success") else "red"), align="left")
    for message in trajectory.get("messages", ()):
        role = message["role"]
        console.print(Text(f"{role:>9}  ", style=_STYLES.get(role, "")) + Text(_inert(message["content"] or "")))
        for call in message.get("tool_calls") or ():
            console.print(Text("           -> ", style="cyan") + Text(_inert(f"{call['name']}({call['arguments']})")))
    if trajectory.get("error"):
        console.print(Text(f"    error  {_inert(trajectory['error'])}", style="red"))


def _print_trajectories(run: Path, *, step: int | None, limit: int, console: Console) -> None:
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    if step is not None:
        files = [path for path in files if path.stem.removeprefix("step_").lstrip("0") == str(step).lstrip("0")]
        if not files:
            raise RecipeError(f"{run} has no trajectories of step {step}")
    if not files:
        return
    trajectories = _json_lines(files[-1])
    shown = trajectories[:limit]
    console.print(f"\n{files[-1].stem}: {len(shown)} of {len(trajectories)} trajectories", highlight=False)
    for trajectory in shown:
        print_trajectory(trajectory, console=console)


def _inert(text: str) -> str:
    """Control characters (a terminal escape, say) made visible; newlines and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _number(value: Any) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return f"{value:.4g}" if known else "–"


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a JSONL file that may still be written to."""
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
