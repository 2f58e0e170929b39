"""`RUN/status.json`: what a run is doing now, readable by anyone, also after its death."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HEARTBEAT_S = 10.0


class StatusFile:
    """Rewrites one small JSON file atomically at every change. Thread-safe."""

    def __init__(self, run_dir: Path, *, steps: int) -> None:
        self._path = run_dir / "status.json"
        self._lock = threading.Lock()
        self._content: dict[str, str | int | float | None] = {
            "state": "running",
            "phase": "start",
            "step": 0,
            "steps": steps,
            "pid": os.getpid(),
            "error": None,
        }

    def update(self, **changes: str | int | float | None) -> None:
        """Set fields and write the file."""
        with self._lock:
            self._content |= changes
            self._content["updated_unix_s"] = round(time.time(), 3)
            beside = self._path.with_name(".status.json.tmp")
            beside.write_text(json.dumps(self._content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(beside, self._path)

    @contextmanager
    def heartbeat(self, every_s: float = HEARTBEAT_S) -> Iterator[None]:
        """Rewrite the file every `every_s` seconds while the block runs: an old `updated_unix_s` then means death."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(every_s):
                with suppress(OSError):  # a full disk is for the run itself to report
                    self.update()

        thread = threading.Thread(target=beat, name="status-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
