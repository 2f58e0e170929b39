"""What boxes reached, or were refused, through the proxy: added up, so that its size is bounded.

Refused and allowed accesses have a bound each: a flood of refusals can't push out what was allowed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

MAX_ENTRIES = 1000
OTHERS = "(others)"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAccess:
    """All requests of one kind. Example: ``NetworkAccess(host="pypi.org", port=443, allowed=True, reason="", …)``"""

    host: str
    """`(others)` for what came after the bound was reached."""
    port: int
    allowed: bool
    reason: str
    """Why it was refused or failed; empty where it went through."""
    num_requests: int
    sent_bytes: int
    received_bytes: int


class NetworkLog:
    """Thread-safe counts by host, port, decision and reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int, bool, str], list[int]] = {}
        self._num_entries = {True: 0, False: 0}

    def add(
        self, host: str, port: int, *, allowed: bool, reason: str = "", sent_bytes: int = 0, received_bytes: int = 0
    ) -> None:
        """Count one request."""
        key = (host, port, allowed, reason)
        with self._lock:
            if key not in self._counts:
                if self._num_entries[allowed] >= MAX_ENTRIES:
                    key = (OTHERS, 0, allowed, "")
                else:
                    self._num_entries[allowed] += 1
            counts = self._counts.setdefault(key, [0, 0, 0])
            for place, more in enumerate((1, sent_bytes, received_bytes)):
                counts[place] += more

    def entries(self) -> tuple[NetworkAccess, ...]:
        """Everything so far, what was allowed first, the most frequent first."""
        with self._lock:
            found = [
                NetworkAccess(
                    host=host,
                    port=port,
                    allowed=allowed,
                    reason=reason,
                    num_requests=counts[0],
                    sent_bytes=counts[1],
                    received_bytes=counts[2],
                )
                for (host, port, allowed, reason), counts in self._counts.items()
            ]
        return tuple(sorted(found, key=lambda entry: (not entry.allowed, -entry.num_requests, entry.host, entry.port)))
