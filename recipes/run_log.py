"""`RUN/logs/run.log`: what the user was told while the run lasted, and everything that was logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintain.trainer.progress import PhaseProgress, Progress

logger = logging.getLogger("quintain")


class LoggedProgress:
    """Shows as the progress it wraps does; messages and the ends of phases are logged too."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown

    @contextmanager
    def phase(self, name: str, total: int | None = None, *, at_most: bool = False) -> Iterator[PhaseProgress]:
        started = time.monotonic()
        with self._shown.phase(name, total, at_most=at_most) as phase:
            yield phase
        logger.info("%s: done in %.1f s", name, time.monotonic() - started)

    def message(self, text: str) -> None:
        self._shown.message(text)
        logger.info("%s", text)


@contextmanager
def log_file(run_dir: Path) -> Iterator[None]:
    """What is logged inside the block (ours from INFO, others' from WARNING) is appended to RUN/logs/run.log."""
    (run_dir / "logs").mkdir(exist_ok=True)
    handler = logging.FileHandler(run_dir / "logs" / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, level = logging.getLogger(), logger.level
    root.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        root.removeHandler(handler)
        handler.close()
