"""The training loop when something goes wrong: what is reported and what is kept."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_data import tiny_model

from quintain.agents.local_policy import LocalPolicy
from quintain.trainer.checkpoint import Checkpoints
from quintain.trainer.config import AlgorithmConfig, CheckpointConfig, EvalConfig, TrainerConfig
from quintain.trainer.learner import Learner
from quintain.trainer.loop import LoopConfig, LoopState, TrainingLoop
from quintain.trainer.progress import PlainProgress
from quintain.trainer.status import StatusFile
from quintain.trainer.weights import InProcessDelivery

NOT_REACHED: Any = None


@pytest.mark.parametrize("diverged", [False, True])
def test_what_ended_the_run_is_what_is_raised_also_where_the_last_save_fails(tmp_path: Path, diverged: bool) -> None:
    algorithm, trainer = AlgorithmConfig(), TrainerConfig(steps=1)
    learner = Learner(tiny_model(), algorithm, trainer, temperature=1.0)
    if diverged:
        with torch.no_grad():
            learner.model.model.norm.weight[0] = torch.nan

    def evaluate(**_: Any) -> Any:
        raise KeyboardInterrupt("while evaluating")

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    loop = TrainingLoop(
        LoopConfig(algorithm=algorithm, trainer=trainer, evaluation=EvalConfig(), checkpoint=CheckpointConfig()),
        runner=NOT_REACHED,
        learner=learner,
        weights=InProcessDelivery(LocalPolicy(learner.model)),
        evaluate=evaluate,
        task_at=NOT_REACHED,
        order=NOT_REACHED,
        store=NOT_REACHED,
        trackers=NOT_REACHED,
        checkpoints=checkpoints,
        status=StatusFile(tmp_path, steps=1),
        progress=PlainProgress(io.StringIO()),
        state=LoopState(),
    )
    with pytest.raises(KeyboardInterrupt, match="while evaluating") as caught:
        loop.run()
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    assert ("no checkpoint of step 0 was written" in notes and "model diverged" in notes) == diverged
    assert (checkpoints.latest_good() is None) == diverged
