"""A process killed while it saves, at random moments: the last checkpoint that it had finished is always loadable."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quintain.trainer.checkpoint import Checkpoints

NUM_KILLS = int(os.environ.get("QUINTAIN_KILLS", "4"))

SAVE_FOR_EVER = """
import sys
from pathlib import Path
from quintain.trainer.checkpoint import Checkpoints

class Files:
    def save(self, folder):
        (folder / "model").mkdir()
        for name in ("model/a", "model/b", "learner.pt"):
            (folder / name).write_bytes(bytes(1 << 20))
    def checkpoint_bytes(self):
        return 3 << 20

checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
good = checkpoints.latest_good()
step = good.state["step"] if good else 0
print(step, flush=True)
while True:
    if step % 5:
        step += 1  # now and then the same step again: replacing is the harder case
    checkpoints.save(step, Files(), {"step": step})
    print(step, flush=True)
    step += step % 5 == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill", range(NUM_KILLS))
def test_a_kill_while_saving_leaves_the_last_finished_checkpoint_loadable(tmp_path: Path, kill: int) -> None:
    """F01: SIGKILL at a random moment, then resume, three times over the same folder."""
    rng = random.Random(kill)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        child.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        reported = [int(line) for line in child.stdout.read().split()]
        assert child.wait() == -signal.SIGKILL
        good = Checkpoints(tmp_path, keep=1).latest_good()
        assert good is not None and good.state["step"] == good.step
        assert good.step >= max(reported, default=0)
        assert not list(tmp_path.glob(".tmp-*"))
