"""How late an event loop runs what is due: what blocks it delays every trajectory at once."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.05


class LoopLagMeter:
    """A timer that looks how late it wakes. `run` it as a task beside the work, cancel it at the end."""

    def __init__(self) -> None:
        self.max_s = 0.0
        """Longest delay so far."""

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL_S
            try:
                await asyncio.sleep(INTERVAL_S)
            finally:  # also where it is cancelled late
                self.max_s = max(self.max_s, loop.time() - due)
