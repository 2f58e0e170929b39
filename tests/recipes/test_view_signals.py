"""Ctrl-C ends the page also where a script started it in the background (the shell then ignores SIGINT)."""

from __future__ import annotations

import signal
import time

import pytest

from quintain.recipes.view import _ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_was_ignored_at_the_start_ends_the_page(number: signal.Signals):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), _ended_by_signals():
            signal.raise_signal(number)
            time.sleep(5)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
