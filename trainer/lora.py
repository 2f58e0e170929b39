"""Low-rank adapters by PEFT, and the base model as the reference that the adapters are measured against.

Invariants: only the adapters are trained; the frozen weights are the run's first, so the model with its adapters
switched off *is* the reference model, without a copy.

Does not do: merging (`trainer/whole_weights.py`), several adapters, quantised bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from quintain.trainer.config import LoraConfig


def with_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int = 0) -> peft.PeftModel:
    """Put adapters into `model`, in place, and freeze the rest. The same seed gives the same adapters on every rank.

    Raises ValueError where no module has a name of `model.lora.target_modules`.
    """
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted: Any = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ValueError(f"model.lora.target_modules = {targets!r}: {error}") from error
    return adapted.eval()


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block the model is its base: the reference."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        # Not `enable_adapters`: it also flips requires_grad, which sharded and reduced parameters must not meet.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapters(model: peft.PeftModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`) from whole tensors."""
    model.save_pretrained(str(folder), state_dict=weights)
