"""AdamW's state on disk: one file of whole tensors, or shards that any number of ranks can read.

A run whose moments are whole (one process, DDP) keeps them in `learner.pt`, by position. A sharded one writes a folder
with torch's distributed checkpoint, by parameter name; it is read back by 1, 2, 3, … ranks, sharded or whole, and so is
the other form.

Invariants: `step` is part of it; nothing is gathered in one place while saving.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor


def save_sharded(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every rank writes its shards into `folder`, which all of them see."""
    state_dict_saver.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder, no_dist=_alone()
    )


def load_sharded(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read what `save_sharded` wrote, in whatever number of ranks."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    state_dict_loader.load(state, checkpoint_id=folder, no_dist=_alone())
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def load_whole(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Set an `optimizer.state_dict()` of whole tensors; sharded parameters take their part of them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for position, entry in saved["state"].items():
        state[position] = {key: _placed_like(parameters[position], value) for key, value in entry.items()}
    optimizer.load_state_dict(saved | {"state": state})


def _placed_like(parameter: torch.Tensor, value: Any) -> Any:
    if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.dim():
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())
