"""The life of the ranks other than 0: get the model, make the same learner, carry out what rank 0 announces.

    rank 0:  ... warm start ... start_followers -> Learner(...) -> train_on, save, load, ... -> ranks.close
    others:  follow: wait -> model's shape, weights -> Learner(...) -> the same, one by one -> end

Invariants: rank 0 alone samples, decides and writes metrics; an error that every rank meets (a diverged model, a
checkpoint that can't be written) is rank 0's to report, and the others go on waiting for its decision.

Does not do: restarting a rank. One that dies ends the run, which then goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from quintain.trainer import learner_files
from quintain.trainer.checkpoint import CheckpointError
from quintain.trainer.config import AlgorithmConfig, LoraConfig, TrainerConfig
from quintain.trainer.learner import DivergedError, Learner
from quintain.trainer.ranks import STOP, RankError, Ranks

logger = logging.getLogger("quintain")
START = "start"


def start_followers(ranks: Ranks, model: PreTrainedModel) -> None:
    """Rank 0: give the others the model; to be called right before `Learner` is made."""
    if ranks.size > 1:
        ranks.announce(START, type(model), model.config, model.dtype)
        ranks.share_weights(model)


def follow(
    ranks: Ranks, config: AlgorithmConfig, trainer: TrainerConfig, *, temperature: float, lora: LoraConfig | None = None
) -> None:
    """The other ranks: until rank 0 says stop. Raises RankError where rank 0 is gone or silent for too long."""
    name, arguments = ranks.next_command()
    if name == STOP:
        return
    model = _received(ranks, *arguments)
    learner = Learner(model, config, trainer, temperature=temperature, ranks=ranks, lora=lora)
    obey(learner)


def obey(learner: Learner) -> None:
    """Carry out rank 0's commands on this rank's learner until it says stop."""
    while True:
        name, arguments = learner.ranks.next_command()
        if name == STOP:
            return
        try:
            if name == "train_on":
                learner.update()
            elif name == "save":
                learner_files.save(learner, *arguments)
            elif name == "load":
                learner_files.load(learner, *arguments)
            else:
                raise RankError(f"rank {learner.ranks.rank} does not know rank 0's command {name!r}")
        except (CheckpointError, DivergedError) as error:
            logger.warning("rank %d: %s: %s", learner.ranks.rank, name, error)


def _received(ranks: Ranks, model_class: Any, model_config: Any, dtype: Any) -> PreTrainedModel:
    model = model_class(model_config).to(dtype)
    ranks.share_weights(model)
    return model
