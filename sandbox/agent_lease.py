"""The agent's end without its owner: a box that hears nothing for the length of its lease removes itself.

The end of the request stream says the same sooner; the lease is for an owner that hangs, or is cut off from the engine,
while the stream stays open. A timer of the kernel's interrupts whatever the agent waits for, a blocked answer included.
A job may send the timer's signal too; only the clock decides.

Standard library only, Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import signal
import time


class Lease:
    """Counts down from the last `renew`; `on_expiry` runs in the main thread, between two of its steps."""

    def __init__(self, seconds, on_expiry):
        self.seconds = seconds
        self.on_expiry = on_expiry
        self.expires = 0.0
        if seconds:
            signal.signal(signal.SIGALRM, self._ring)
            self.renew()

    def renew(self, busy_s=0.0):
        """Start anew; `busy_s` is how long the agent may be at work before it listens again."""
        if self.seconds:
            self.expires = time.monotonic() + self.seconds + busy_s
            signal.setitimer(signal.ITIMER_REAL, self.seconds + busy_s)

    def _ring(self, *_):
        left_s = self.expires - time.monotonic()
        if left_s <= 0:
            self.on_expiry()
        else:
            signal.setitimer(signal.ITIMER_REAL, left_s)
