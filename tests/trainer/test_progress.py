"""Plain progress: few lines, counts, an ETA, threads."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest

from quintain.trainer.progress import PlainProgress


def test_a_line_shows_count_share_time_left_and_the_note() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, every_s=0.0)
    with progress.phase("steps", total=4) as bar:
        bar.advance()
        time.sleep(0.05)
        bar.advance()
        bar.note("reward 0.71")
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"steps 2/4 \(50 %\), 0\.\d s, about 0\.\d s left, reward 0\.71", lines[-2])
    assert re.fullmatch(r"steps 2/4 in 0\.\d s, reward 0\.71", lines[-1])


def test_lines_are_seldom_and_only_the_outermost_phase_reports_its_end() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, every_s=60.0)
    with progress.phase("steps", total=2) as steps:
        for _ in range(2):
            with progress.phase("rollouts", total=100) as bar:
                for _ in range(100):
                    bar.advance()
            steps.advance()
    assert re.fullmatch(r"steps 2/2 in 0\.\d s\n", stream.getvalue())


def test_a_line_is_about_the_outermost_counted_phase_with_the_inner_one_behind() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, every_s=0.0)
    with progress.phase("training"), progress.phase("steps", total=4), progress.phase("rollouts", total=128) as bar:
        bar.advance(64)
    assert re.fullmatch(r"steps 0/4 \(0 %\), 0\.\d s; rollouts 64/128", stream.getvalue().splitlines()[0])


def test_a_total_that_is_a_cap_is_shown_as_one() -> None:
    stream = io.StringIO()
    with PlainProgress(stream, every_s=0.0).phase("warm start", total=1500, at_most=True) as bar:
        bar.advance()
        bar.advance()
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"warm start 2 of at most 1500, 0\.\d s, at most [\d.]+ s left", lines[1])
    assert re.fullmatch(r"warm start 2 of at most 1500 in 0\.\d s", lines[2])


def test_time_left_of_a_resumed_phase_ignores_what_was_done_before() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, every_s=0.0)
    with progress.phase("steps", total=102) as bar:
        bar.advance(100)
        time.sleep(0.2)
        bar.advance(1)
    left = re.search(r"steps 101/102 .* about ([\d.]+) s left", stream.getvalue())
    assert left is not None and float(left[1]) >= 0.2


def test_a_phase_of_unknown_length_and_messages_are_shown() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    with progress.phase("save"):
        progress.message("held-out success 0.9")
    assert stream.getvalue().splitlines()[0] == "held-out success 0.9"
    assert stream.getvalue().splitlines()[1].startswith("save in 0.")


def test_advancing_from_many_threads_loses_nothing() -> None:
    stream = io.StringIO()
    with PlainProgress(stream, every_s=0.0).phase("rollouts", total=800) as bar:
        threads = [threading.Thread(target=lambda: [bar.advance() for _ in range(100)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stream.getvalue().splitlines()[-1].startswith("rollouts 800/800 in ")


def test_a_phase_that_fails_reports_how_far_it_came_and_passes_the_error_on() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), PlainProgress(stream).phase("steps", total=3) as bar:
        bar.advance()
        raise RuntimeError
    assert stream.getvalue().startswith("steps 1/3 in ")
