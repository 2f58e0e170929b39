"""Backends for any transformers causal language model, through its own forward pass.

`GenericBackend`: left padding and the model's own cache of keys and values. `RecomputingBackend`: for models that have
no such cache, or whose state is recurrent and would take in the padding; rows of equal length run together, unpadded,
and whole at every step.

Correct, not quick: nothing is kept between batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintain.agents.completion import GenerateRequest

# transformers renamed the argument and the output field within its major version 5.
_CACHE_NAMES = frozenset({"cache", "past_key_values"})


def has_cache(model: Any) -> bool:
    """Whether the model's whole state is keys and values that its forward pass takes and gives back."""
    layers = getattr(model.config, "layer_types", None) or ()
    # `_is_stateful` is transformers' own mark of recurrent models; some hybrid ones only name their layers.
    recurrent = getattr(model, "_is_stateful", False) or any(
        kind == "linear_attention" or "attention" not in kind for kind in layers
    )
    return not recurrent and bool(_CACHE_NAMES & set(_parameters(model)))


class GenericBackend:
    """Decoding through `model(...)`. Life: any number of begin, (step | keep)*, end."""

    def __init__(self, model: Any) -> None:
        self._model = model
        if not has_cache(model):
            raise ValueError(f"{type(model).__name__} has no cache of keys and values: use RecomputingBackend")
        accepted = _parameters(model)
        self._takes_positions = "position_ids" in accepted
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._mask_BT = torch.empty(0, dtype=torch.long)
        self._cache: Any = None

    def begin(self, requests: Sequence[GenerateRequest], *, retain: bool) -> Tensor:
        del retain
        device = self._model.get_input_embeddings().weight.device
        width = max(len(request.prompt_ids) for request in requests)
        pads = [width - len(request.prompt_ids) for request in requests]
        ids = torch.tensor([[0] * pad + list(r.prompt_ids) for pad, r in zip(pads, requests, strict=True)])
        self._mask_BT = (torch.arange(width) >= torch.tensor(pads)[:, None]).long().to(device)
        self._cache = None
        positions = (self._mask_BT.cumsum(dim=1) - 1).clamp_(min=0)
        return self._forward(ids.to(device), positions)

    def step(self, tokens_B: Tensor, growing_B: Tensor) -> Tensor:
        del growing_B
        positions = self._mask_BT.sum(dim=1, keepdim=True)
        self._mask_BT = torch.nn.functional.pad(self._mask_BT, (0, 1), value=1)
        return self._forward(tokens_B[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        rows = rows.to(self._mask_BT.device)
        self._cache.batch_select_indices(rows)
        self._mask_BT = self._mask_BT[rows]

    def end(self, fed_ids: Sequence[tuple[int, ...]]) -> None:
        del fed_ids
        self._cache = None

    def forget(self) -> None:
        self._cache = None

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        extra = {"position_ids": positions} if self._takes_positions else {}
        extra[self._cache_name] = self._cache
        output = self._model(input_ids=ids, attention_mask=self._mask_BT, use_cache=True, **extra)
        self._cache = output[self._cache_name]
        return output.logits[:, -1]


class RecomputingBackend:
    """Decoding without a cache: each step runs every unfinished row from its start."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._extra = {"use_cache": False} if "use_cache" in _parameters(model) else {}
        self._rows: list[list[int]] = []

    def begin(self, requests: Sequence[GenerateRequest], *, retain: bool) -> Tensor:
        del retain
        self._rows = [list(request.prompt_ids) for request in requests]
        return self._forward()

    def step(self, tokens_B: Tensor, growing_B: Tensor) -> Tensor:
        del growing_B
        for row, token in zip(self._rows, tokens_B.tolist(), strict=True):
            row.append(token)
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]

    def end(self, fed_ids: Sequence[tuple[int, ...]]) -> None:
        del fed_ids
        self._rows = []

    def forget(self) -> None:
        self._rows = []

    def _forward(self) -> Tensor:
        device = self._model.get_input_embeddings().weight.device
        by_length: dict[int, list[int]] = {}
        for index, row in enumerate(self._rows):
            by_length.setdefault(len(row), []).append(index)
        logits_of_row: dict[int, Tensor] = {}
        for members in by_length.values():
            ids = torch.tensor([self._rows[index] for index in members], device=device)
            last = self._model(input_ids=ids, **self._extra).logits[:, -1]
            logits_of_row.update(zip(members, last, strict=True))
        return torch.stack([logits_of_row[index] for index in range(len(self._rows))])


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters
