"""status.json tells the living from the dead."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from quintain.trainer.status import StatusFile


def test_the_heartbeat_keeps_the_time_fresh_during_a_long_phase_and_ends_with_its_block(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, steps=3)
    status.update(phase="warm start")
    before = json.loads((tmp_path / "status.json").read_text())
    with pytest.raises(ValueError, match="stop"), status.heartbeat(every_s=0.02):
        deadline = time.monotonic() + 30
        while json.loads((tmp_path / "status.json").read_text())["updated_unix_s"] == before["updated_unix_s"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise ValueError("stop")
    after = json.loads((tmp_path / "status.json").read_text())
    assert after["updated_unix_s"] > before["updated_unix_s"] and after["phase"] == "warm start"
    assert not any(thread.name == "status-heartbeat" for thread in threading.enumerate())


def test_a_heartbeat_outlives_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    status = StatusFile(tmp_path / "gone", steps=3)
    with status.heartbeat(every_s=0.01):
        time.sleep(0.1)
        assert any(thread.name == "status-heartbeat" for thread in threading.enumerate())
