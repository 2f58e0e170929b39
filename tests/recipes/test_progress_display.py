"""Bars for people, on stderr: phases may be nested, repeated, of unknown length, and end by an error."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from quintain.recipes.progress import RichProgress, make_progress
from quintain.trainer.progress import PlainProgress


@pytest.fixture
def shown() -> tuple[RichProgress, io.StringIO]:
    progress = RichProgress()
    stream = io.StringIO()
    progress.bars.live.console = Console(file=stream, force_terminal=True, width=120)
    return progress, stream


def rows(progress: RichProgress, width: int = 80) -> list[str]:
    """The bars as they stand, on a terminal of this width."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with screen.capture() as capture:
        screen.print(progress.bars.get_renderable())
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


def test_each_phase_has_a_bar_with_count_and_eta(shown: tuple[RichProgress, io.StringIO]):
    progress, stream = shown
    with progress, progress.phase("steps", total=3) as steps:
        for step in range(3):
            with progress.phase("rollouts", total=2) as rollouts:
                rollouts.advance()
                rollouts.advance(1)
            steps.advance()
            steps.note(f"reward 0.{step} [not markup]")
        progress.message("sandbox: [local]")
        assert len(progress.bars.tasks) == 2  # one bar a name, however often the phase comes
    text = stream.getvalue()
    assert "3/3" in text and "2/2" in text and "ETA" in text
    assert "reward 0.2 [not markup]" in text
    assert "sandbox: [local]" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut_however_narrow_the_terminal(width: int):
    progress = RichProgress()
    with (
        progress.phase("warm start", total=1500, at_most=True) as outer,
        progress.phase("eval (sampled)", total=1024) as inner,
    ):
        outer.advance(1234)
        outer.note("greedy success 0.91, loss 0.123")
        inner.advance(1000)
        lines = rows(progress, width)
    assert len(lines) == 2
    assert "1234/1500" in lines[0] and "0:00" in lines[0] and "at most -:--" in lines[0]
    assert "1000/1024" in lines[1] and "ETA -:--" in lines[1]
    assert all(len(line) <= width for line in lines)
    assert ("…" in lines[0]) == (width == 60)
    assert ("━" in lines[1]) == (width == 120)


def test_eighty_columns_have_room_for_the_bar_of_a_usual_step():
    progress = RichProgress()
    with progress.phase("steps", total=40) as steps, progress.phase("rollouts", total=128):
        steps.advance(12)
        steps.note("reward 0.713 success 0.75")
        line = rows(progress)[0]
    assert "━" in line and line.endswith("reward 0.713 success 0.75")


def test_a_phase_that_ends_before_its_cap_has_a_full_bar_and_no_eta():
    progress = RichProgress()
    with progress.phase("warm start", total=1500, at_most=True) as bar:
        bar.advance(260)
    (line,) = rows(progress)
    assert "260/260" in line and "at most" not in line and progress.bars.finished


def test_bars_of_phases_that_ended_do_not_pile_up():
    progress = RichProgress()
    for name in ("sandboxes (docker)", "model from scratch", "warm start"):
        with progress.phase(name):
            assert len(rows(progress)) == 1
    with progress, progress.phase("steps", total=2) as steps:
        for _ in range(2):
            for name in ("rollouts", "eval (sampled)", "eval (greedy)", "save"):
                with progress.phase(name, total=1) as bar:
                    bar.advance()
                    lines = rows(progress)
                    assert [line.split()[0] for line in lines] == ["steps", name.split()[0]]
            steps.advance()
    assert [line.split()[0] for line in rows(progress)] == ["steps"]
    bar.advance()  # a straggler


def test_a_phase_of_unknown_length_comes_to_rest_and_an_error_passes_through(shown: tuple[RichProgress, io.StringIO]):
    progress, _ = shown
    with progress.phase("save"):
        pass
    assert progress.bars.finished and "1/1" not in rows(progress)[0]
    with pytest.raises(ValueError, match="stop"), progress.phase("steps", total=3) as bar:
        bar.advance()
        raise ValueError("stop")
    (line,) = rows(progress)
    assert "1/3" in line and "ETA" not in line


def test_without_a_terminal_lines_are_printed():
    with make_progress() as progress:
        assert isinstance(progress, PlainProgress)
