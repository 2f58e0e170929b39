"""Weights to and from a Hugging Face folder, without the bars that transformers draws across ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


def save_model(model: PreTrainedModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write `config.json` and the weights (other ones where given); the folder is usable as `model.path`."""
    with _no_foreign_bars():
        model.save_pretrained(folder, state_dict=dict(weights) if weights is not None else None)


def read_weights(model_class: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The folder's parameters by name, in memory that torch allocated for them."""
    with _no_foreign_bars():
        loaded = model_class.from_pretrained(folder, dtype=dtype)
    return {name: parameter.detach().clone() for name, parameter in loaded.named_parameters()}


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Put the folder's weights into `model`. Raises RuntimeError where they are of another architecture."""
    with _no_foreign_bars():
        loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())


def own_memory(model: PreTrainedModel) -> None:
    """Move every parameter and buffer, in place, to memory that torch allocated for it.

    What was read from a file may lie at any address, and some kernels add in another order where it is not aligned: the
    same weights would give other bits than in the process that made them.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


@contextmanager
def _no_foreign_bars() -> Iterator[None]:
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
