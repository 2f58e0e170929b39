"""The learner's files in a checkpoint's folder, written and read by any number of ranks.

    model/        the whole model, adapters merged: a Hugging Face folder, usable as `model.path`
    reference/    with a KL term or adapters: the model that the run started from
    adapter/      with adapters: a PEFT folder
    optimizer/    sharded runs: the moments, by torch's distributed checkpoint
    learner.pt    counters, random states; AdamW's state where the moments are whole; the adapters

Invariants: weights that are not finite are never saved, on whichever rank they are; all meetings of the ranks come
before rank 0 writes alone, so that a full disk leaves nobody waiting. Loaded weights get memory of their own, aligned
as in a run that was never broken, so that sums come out the same. What one number of ranks saved, any other loads; the
same number goes on bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from quintain.trainer import optimizer_state
from quintain.trainer.checkpoint import CheckpointError
from quintain.trainer.config import AlgorithmConfig, LoraConfig
from quintain.trainer.lora import save_adapters
from quintain.trainer.model_files import load_weights, own_memory, read_weights, save_model
from quintain.trainer.parallel import reshard, wrapping_of
from quintain.trainer.ranks import Ranks
from quintain.trainer.whole_weights import adapter_weights, put_weights, whole_weights

MODEL_FOLDER, REFERENCE_FOLDER, ADAPTER_FOLDER, OPTIMIZER_FOLDER = "model", "reference", "adapter", "optimizer"
STATE_FILE = "learner.pt"


class LearnerParts(Protocol):
    """What a `Learner` is made of, as far as its files are concerned (its own fields say more)."""

    config: AlgorithmConfig
    lora: LoraConfig | None
    ranks: Ranks
    accelerator: Accelerator
    model: Any
    optimizer: Any
    full_model: PreTrainedModel | None
    reference: PreTrainedModel | None
    in_place: bool
    model_class: type[PreTrainedModel]
    dtype: torch.dtype

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def refresh_full_model(self) -> None: ...


def save(learner: LearnerParts, folder: Path) -> None:
    """Every rank's part of `Learner.save`. Raises CheckpointError on all of them where a weight is not finite."""
    reshard(learner.reference)
    _refuse_non_finite(learner)
    state: dict[str, Any] = learner.state_dict()
    plain = learner.accelerator.unwrap_model(learner.model)
    if wrapping_of(learner.model) == "fsdp2":
        optimizer_state.save_sharded(plain, learner.optimizer.optimizer, folder / OPTIMIZER_FOLDER)
    else:
        state["optimizer"] = learner.optimizer.state_dict()
    reference: dict[str, torch.Tensor] | None = None
    source = plain if learner.lora is not None else learner.reference
    if source is not None:
        weights = whole_weights(source, merged=False)
        reference = {name: weight.cpu() for name, weight in weights}
    if learner.lora is not None:
        state["adapters"] = adapter_weights(plain)
    if learner.full_model is None:
        return
    save_model(learner.full_model, folder / MODEL_FOLDER)
    if reference is not None:
        save_model(learner.full_model, folder / REFERENCE_FOLDER, reference)
    if learner.lora is not None:
        save_adapters(plain, state["adapters"], folder / ADAPTER_FOLDER)
    torch.save(state, folder / STATE_FILE)


def load(learner: LearnerParts, folder: Path) -> None:
    """Every rank's part of `Learner.load`."""
    reshard(learner.model)
    reshard(learner.reference)
    plain = learner.accelerator.unwrap_model(learner.model)
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    if learner.in_place:
        load_weights(plain, folder / MODEL_FOLDER)
        own_memory(plain)  # also where the model came out of a file before this learner got it
    else:
        start = MODEL_FOLDER if learner.lora is None else REFERENCE_FOLDER
        put_weights(plain, read_weights(learner.model_class, folder / start, learner.dtype))
    if learner.lora is not None:
        put_weights(plain, state["adapters"], adapters=True)
    if learner.reference is not None:
        put_weights(learner.reference, read_weights(learner.model_class, folder / REFERENCE_FOLDER, learner.dtype))
        if learner.in_place:
            own_memory(learner.reference)
    if (folder / OPTIMIZER_FOLDER).is_dir():
        optimizer_state.load_sharded(plain, learner.optimizer.optimizer, folder / OPTIMIZER_FOLDER)
    else:
        optimizer_state.load_whole(learner.optimizer.optimizer, state["optimizer"])
    learner.load_state_dict(state)
    learner.refresh_full_model()


def _refuse_non_finite(learner: LearnerParts) -> None:
    def is_finite(tensor: torch.Tensor) -> bool:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return bool(local.isfinite().all())

    mine = [name for name, p in learner.model.named_parameters() if not is_finite(p)]
    broken = sorted({name for names in learner.ranks.gather(mine) for name in names})
    if broken:
        raise CheckpointError(
            f"the model diverged: {len(broken)} of its tensors hold NaN or infinity ({broken[0]}, ...), so it is not "
            f"saved and older checkpoints stay; lower algorithm.learning_rate ({learner.config.learning_rate}) or "
            f"algorithm.max_grad_norm ({learner.config.max_grad_norm}), and resume or start again"
        )
