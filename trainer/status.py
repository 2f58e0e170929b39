"""`RUN/status.json`: what a run is doing now, readable by anyone, also after its death."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class StatusFile:
    """Rewrites one small JSON file atomically at every change."""

    def __init__(self, run_dir: Path, *, steps: int) -> None:
        self._path = run_dir / "status.json"
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
        self._content |= changes
        self._content["updated_unix_s"] = round(time.time(), 3)
        beside = self._path.with_name(".status.json.tmp")
        beside.write_text(json.dumps(self._content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, self._path)
