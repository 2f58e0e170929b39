"""How the learner's model is spread over processes: opens Accelerate, wraps, and says what the wrapping really is.

On a CPU Accelerate ignores an FSDP2 plugin without a word and keeps DDP. `open_accelerator` puts that right, in this
one place, and `check_wrapping` refuses a model that is wrapped in anything but what was asked.

Does not do: FSDP1 (its full gather crashes on a CPU), DeepSpeed, context and tensor parallelism, starting processes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from quintain.trainer.config import ParallelismConfig


class WrappingError(RuntimeError):
    """The model is not wrapped as the recipe's `parallelism.strategy` says."""


def open_accelerator(config: ParallelismConfig) -> Accelerator:
    """The Accelerator of this process, for the strategy asked for; joins the process group where there is one.

    Raises:
        WrappingError: the number of processes is not the one asked for, or the strategy needs GPUs.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    cpu = not torch.cuda.is_available() and config.strategy != "single"
    if config.cpu_offload and cpu:
        raise WrappingError("parallelism.cpu_offload = true moves weights off GPUs, and there is none: set it to false")
    if config.strategy == "fsdp2":
        accelerator = _with_fsdp2(config, cpu=cpu)
    else:
        accelerator = Accelerator(cpu=True) if cpu else Accelerator()
    if accelerator.num_processes != config.num_processes:
        raise WrappingError(
            f"parallelism.num_processes is {config.num_processes} and parallelism.strategy {config.strategy!r}, but "
            f"{accelerator.num_processes} processes were started: start with `quintain train`, which starts as many as "
            "the recipe says, or give the launcher the same number"
        )
    return accelerator


def _with_fsdp2(config: ParallelismConfig, *, cpu: bool) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        cpu_offload=config.cpu_offload,
    )
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin)
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate turns processes with GPUs into FSDP and leaves those on CPUs as DDP, without a word.
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
            state._shared_state["device"] = torch.device("cpu")
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def wrapping_of(model: torch.nn.Module) -> str:
    """What `model` is wrapped in, looked up on the object itself: a strategy's name, or the wrapper's type."""
    if isinstance(model, FSDPModule):
        return "fsdp2"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    return "single" if hasattr(model, "config") else type(model).__name__


def describe_wrapping(model: torch.nn.Module, num_processes: int) -> str:
    """One line: what the model is wrapped in, and how much of it this process holds and trains."""
    parameters = list(model.parameters())
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    trained, total = sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
    return (
        f"{wrapping_of(model)} over {num_processes} processes on {parameters[0].device.type}; rank 0 holds {local:,} "
        f"of {total:,} parameters, {trained:,} of them are trained"
    )


def check_wrapping(model: torch.nn.Module, config: ParallelismConfig) -> None:
    """Raise WrappingError unless `model` is wrapped in what the recipe asked for."""
    found = wrapping_of(model)
    if found != config.strategy:
        raise WrappingError(
            f"parallelism.strategy is {config.strategy!r}, but the model is wrapped as {found!r} "
            f"({type(model).__name__}): the two must agree, or a run measures something else than it says"
        )


def shard_like(accelerator: Accelerator, model: PreTrainedModel) -> Any:
    """A model that is not trained (the reference), sharded as the trained one is; whole where that one is whole."""
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    return model.to(accelerator.device)  # pyright: ignore[reportArgumentType]


def settle(model: torch.nn.Module) -> None:
    """Let DDP order its buckets now, by one backward pass of gradient 0; nothing for any other wrapping.

    It does so after its first backward pass, and with three ranks or more the order of a sum depends on the bucket: a
    resumed run's first step would differ in the last bits from the unbroken run's.
    """
    if isinstance(model, DistributedDataParallel):
        token_ids_BT = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
        (model(input_ids=token_ids_BT, use_cache=False).logits.sum() * 0).backward()
        model.zero_grad(set_to_none=True)


def reshard(model: torch.nn.Module | None) -> None:
    """Give back what a forward pass without a backward one leaves gathered under FSDP2.

    The module's parameters are then the trained shards again. Without this a gradient norm would leave out the output
    layer, and the next pass would run on that layer's weights from before the optimizer step.
    """
    for module in model.modules() if model is not None else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def checkpoint_activations(model: torch.nn.Module) -> int:
    """Let each decoder layer run again in the backward pass; returns how many layers that are.

    The layers' own switch in transformers works in train mode only, and the learner's model is in eval mode.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)
