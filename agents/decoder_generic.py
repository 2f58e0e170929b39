"""Backend for any transformers causal language model: its own forward pass, left padding and its own cache.

Correct, not quick: nothing is kept between batches, and the prompts are padded to the longest. Models whose state is
not made of keys and values (recurrent ones) depend on how well their own code handles left padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quintain.agents.completion import GenerateRequest


class GenericBackend:
    """Decoding through `model(...)`. Life: any number of begin, (step | keep)*, end."""

    def __init__(self, model: Any) -> None:
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        # transformers renamed the argument and the output field within its major version 5.
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
