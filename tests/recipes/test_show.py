"""A run in the terminal: numbers, curves, conversations, for whole runs, broken ones and none."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.store import TrajectoryStore
from quintain.agents.trajectory import Group, Trajectory
from quintain.envs import Message, ToolCall
from quintain.recipes.loader import RecipeError
from quintain.recipes.show import curves_table, newest_run, print_groups, print_trajectory, show_run, sparkline
from quintain.recipes.view import aim_data

GROUP = Group(
    task_id="train-4",
    draw=4,
    trajectories=(
        Trajectory(
            task_id="train-4",
            draw=4,
            member=0,
            attempt=0,
            seed=9,
            messages=(
                Message(role="user", content="line\u2028separator"),
                Message(role="assistant", content="", tool_calls=(ToolCall(id="call_0", name="add", arguments="{}"),)),
            ),
            turns=(),
            rows=(),
            reward=math.nan,
            reward_terms={},
            success=False,
            terminated=False,
            truncated=False,
            outcome=Outcome.INFRASTRUCTURE,
            stop_reason=StopReason.SANDBOX_DIED,
            error="the box is gone",
        ),
    ),
)
TRAJECTORY = {
    "task_id": "train-3",
    "draw": 3,
    "member": 0,
    "reward": 1.0,
    "success": True,
    "outcome": "completed",
    "stop_reason": "terminated",
    "messages": [
        {"role": "user", "content": "What is 37 plus 48?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "name": "calculator", "arguments": '{"expression": "37+48"}'}],
        },
        {"role": "tool", "content": "85"},
        {"role": "assistant", "content": "It is [bold]85[/bold]\x1b[2J."},
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: one\n")
    summary = {
        "success_before": 0.375,
        "success_after": 0.97,
        "reward_first": 0.3,
        "reward_last": None,
        "seconds": {"total": 9.0},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": step, "reward/mean": step / 10, "train/loss": None} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "rew')
    (folder / "trajectories" / "step_000005.jsonl").write_text(json.dumps(TRAJECTORY) + "\n")
    return folder


def test_summary_curves_and_conversation_are_printed(run: Path, capsys: pytest.CaptureFixture[str]):
    show_run(run, step=None, num_trajectories=2)
    out = capsys.readouterr().out
    assert "0.375 -> 0.97" in out
    assert "reward/mean" in out and "▁▂▃▄▅▆▇█" in out
    assert "step_000005: 1 of 1 trajectories" in out
    assert 'calculator({"expression": "37+48"})' in out


def test_what_a_model_wrote_reaches_the_terminal_as_text():
    stream = io.StringIO()
    print_trajectory(TRAJECTORY, console=Console(file=stream, force_terminal=False, width=200))
    assert "It is [bold]85[/bold]\\x1b[2J." in stream.getvalue()


def test_groups_in_memory_and_on_disk_look_the_same(run: Path, capsys: pytest.CaptureFixture[str]):
    print_groups([GROUP])
    in_memory = capsys.readouterr().out
    assert "infrastructure/sandbox_died" in in_memory and "-> add({})" in in_memory and "the box is gone" in in_memory
    TrajectoryStore(run / "trajectories").write_step(12, [GROUP], None)
    show_run(run, step=12, num_trajectories=1)
    on_disk = capsys.readouterr().out
    assert "step_000012: 1 of 1" in on_disk
    assert on_disk.endswith(in_memory)


def test_a_run_that_has_just_begun_is_shown_as_far_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").write_text("name: one\n")
    show_run(tmp_path, step=None, num_trajectories=2)
    assert str(tmp_path.name) in capsys.readouterr().out.replace("\n", "")


def test_a_run_in_its_warm_start_is_passed_over_or_named_for_what_it_is(run: Path, tmp_path: Path):
    warming = tmp_path / "runs" / "two"
    warming.mkdir()
    (warming / "status.json").write_text(json.dumps({"state": "running", "phase": "warm start"}))
    assert newest_run(tmp_path / "runs") == run
    (run / "metrics.jsonl").unlink()
    with pytest.raises(RecipeError, match="two is still in its warm start"):
        newest_run(tmp_path / "runs")
    with pytest.raises(RecipeError, match="two is still in its warm start"):
        aim_data(warming, stream=io.StringIO())
    (warming / "status.json").write_text(json.dumps({"state": "interrupted"}))
    with pytest.raises(RecipeError, match=r"ended before its first step \(interrupted\)"):
        aim_data(warming, stream=io.StringIO())


@pytest.mark.parametrize("width", [80, 100])
def test_curves_fit_the_terminal_with_whole_metric_names(width: int):
    rows = [
        {"step": step, "eval/success_frac_sampled": step / 100, "train/loss": -0.001234 * step, "time/train_s": 9.87654}
        for step in range(1, 101)
    ]
    stream = io.StringIO()
    Console(file=stream, width=width).print(curves_table(rows, width=width))
    text = stream.getvalue()
    assert "eval/success_frac_sampled" in text and "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "█ │" in text


def test_a_step_that_is_not_there_is_refused(run: Path):
    with pytest.raises(RecipeError, match="no trajectories of step 4"):
        show_run(run, step=4, num_trajectories=1)


def test_the_newest_run_is_found_and_none_is_an_error(run: Path, tmp_path: Path):
    assert newest_run(tmp_path / "runs") == run
    with pytest.raises(RecipeError, match="quintain train RECIPE"):
        newest_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 1.0], "▁█"), ([float("nan"), 0.0, 1.0], "▁█")],
)
def test_a_curve_runs_from_its_lowest_to_its_highest_value(values: list[float], bars: str):
    assert sparkline(values) == bars


def test_a_long_curve_is_averaged_down():
    assert sparkline([float(i // 10) for i in range(80)], width=8) == "▁▂▃▄▅▆▇█"
