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
    text = stream.getvalue()
    assert "3/3" in text and "2/2" in text and "ETA" in text
    assert "reward 0.2 [not markup]" in text
    assert "sandbox: [local]" in text
    assert len(progress.bars.tasks) == 2  # one bar a name, however often the phase comes


def test_a_phase_of_unknown_length_comes_to_rest_and_an_error_passes_through(shown: tuple[RichProgress, io.StringIO]):
    progress, _ = shown
    with pytest.raises(ValueError, match="stop"), progress, progress.phase("save"):
        raise ValueError("stop")
    assert progress.bars.finished


def test_without_a_terminal_lines_are_printed():
    with make_progress() as progress:
        assert isinstance(progress, PlainProgress)
