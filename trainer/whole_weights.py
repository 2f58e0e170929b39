"""The trained model's weights as any Hugging Face model has them: gathered from the ranks, adapters merged.

    trained model (sharded, wrapped, with adapters) --whole_weights--> (name, tensor), one at a time --refresh--> copy

A sampler, an exported folder and a checkpoint's `model/` all read the copy, so none knows how the model was trained.

Invariants: names are those of the plain model; at most one tensor (and its adapter) is whole at a time beside the copy;
every rank takes part, since gathering is a meeting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

PEFT_PREFIX, BASE_MARK = "base_model.model.", ".base_layer."
"""How PEFT renames what it wraps: `base_model.model.<name>`, and `<layer>.base_layer.weight` beside an adapter."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, gathered from all ranks where it is sharded; without gradient."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into `target`, each rank its own part where that one is sharded."""
    with torch.no_grad():
        value = value.to(device=target.device, dtype=target.dtype)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements)
        target.copy_(value)


def plain_name(name: str) -> str:
    """The name that a parameter has in the plain model."""
    return name.removeprefix(PEFT_PREFIX).replace(BASE_MARK, ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, which the plain model does not have."""
    return ".lora_" in name


def whole_weights(model: torch.nn.Module, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain model's parameters and their names, one after the other; `merged`: with the adapters' part added.

    ``W + scaling * B A`` (LoRA, arXiv 2106.09685), in the weights' own precision.
    """
    layers = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        weight = whole(parameter)
        owner = name.rpartition(BASE_MARK)[0]
        if merged and owner and name.endswith(".weight"):
            layer = layers[owner]
            for adapter, scaling in layer.scaling.items():  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
                down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight  # pyright: ignore
                weight = weight + scaling * (whole(up) @ whole(down))
        yield plain_name(name), weight


def adapter_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> whole tensor, on the CPU, of the adapters."""
    return {name: whole(p).cpu() for name, p in model.named_parameters() if is_adapter(name)}


def refresh(copy: torch.nn.Module | None, model: torch.nn.Module, *, merged: bool = True) -> None:
    """Put the trained model's weights into `copy`, a plain one; None (ranks other than 0) only takes part."""
    targets = dict(copy.named_parameters()) if copy is not None else {}
    for name, weight in whole_weights(model, merged=merged):
        if copy is not None:
            put(targets[name], weight)


def put_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, adapters: bool = False) -> None:
    """Put a plain model's whole weights (or those of `adapter_weights`) into a trained one."""
    for name, parameter in model.named_parameters():
        if is_adapter(name) is adapters:
            put(parameter, weights[name if adapters else plain_name(name)])
