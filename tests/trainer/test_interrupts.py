"""Ctrl-C in the middle of an update waits for its end; a second one does not."""

from __future__ import annotations

import signal

import pytest

from quintain.trainer.interrupts import interrupts_held


def test_the_block_is_finished_before_an_interrupt_takes_effect():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        done.append("update")
    assert done == ["update"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_takes_effect_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("update")
    assert done == []


def test_an_error_in_the_block_passes_and_handlers_are_restored():
    with pytest.raises(ValueError, match="loss"), interrupts_held():
        raise ValueError("loss")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
