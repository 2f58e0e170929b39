"""Quick backend for Llama-shaped models: Llama, Mistral, Qwen2 and Qwen3, read from the transformers modules.

The forward pass is written out once: pre-norm blocks, rotary positions, grouped-query attention, SwiGLU. Linear layers
are called as modules, so biases and adapters inside them count; weights are read live and never copied.

Keys and values lie in one buffer a layer, `[B, T, kv_heads * head_dim]`, row `b` holding the tokens of request `b` from
position 0; there is no padding on the left, and what lies behind a row's end is masked. After a batch the buffers stay
as `_Kept` pieces: in the next batch a row whose trajectory is known, and whose prompt starts with exactly the ids that
were fed, runs only the rest of its prompt. Pieces not in the next batch are dropped, so memory is bounded by one batch.
Equal prompts (the members of a group) are run once and copied.

It does not do scaled rotary positions, sliding windows or mixed layer types: `supports` sends those to the generic one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quintain.agents.completion import GenerateRequest

MODEL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PREFILL_TOKENS = 8192  # most tokens, padding included, of one prompt pass
GROWTH = 64  # positions added to the buffers when they are full

TrajectoryKey = tuple[int, int, int]


@dataclass(slots=True, kw_only=True)
class _Kept:
    """Keys and values of some rows of an earlier batch."""

    requests: list[int]  # [n] which request of that batch each row was
    layers: list[tuple[Tensor, Tensor]]  # per layer: keys, values [n, T, kv_heads * head_dim]


def trajectory_key(request: GenerateRequest) -> TrajectoryKey:
    """What a row's keys and values are remembered under: the trajectory, whatever the turn."""
    return (request.key.draw, request.key.member, request.key.attempt)


class LlamaBackend:
    """Decoding with a cache that outlives the turn. Life: any number of begin, (step | keep)*, end, and `forget`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        config = model.config
        self._num_kv = config.num_key_value_heads
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._angles = (torch.empty(0), torch.empty(0))
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._live: list[int] = []  # request of each row in the buffers
        self._positions = torch.empty(0, dtype=torch.long)  # tokens fed so far, per row
        self._retain = False
        self._keys: list[TrajectoryKey] = []
        self._parked: list[_Kept] = []
        self._memory: dict[TrajectoryKey, tuple[_Kept, int, tuple[int, ...]]] = {}

    @staticmethod
    def supports(model: Any) -> bool:
        """Is this exactly one of the known architectures, with the plain form of every part?"""
        config = getattr(model, "config", None)
        if type(model).__name__ not in MODEL_CLASSES or config is None:
            return False
        rope = getattr(config, "rope_parameters", None) or {}
        layer_types = set(getattr(config, "layer_types", None) or ("full_attention",))
        windowed = type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (
            rope.get("rope_type", "default") == "default"
            and layer_types == {"full_attention"}
            and not windowed
            and config.hidden_act == "silu"
            and 2 * model.model.rotary_emb.inv_freq.shape[0] == head_dim
        )

    def begin(self, requests: Sequence[GenerateRequest], *, retain: bool) -> Tensor:
        self._retain, self._parked = retain, []
        self._keys = [trajectory_key(request) for request in requests]
        self._live = list(range(len(requests)))
        known = [self._find(request) for request in requests]
        starts = [0 if hit is None else len(hit[2]) for hit in known]
        prompts = [request.prompt_ids for request in requests]
        first_of: dict[tuple[int, ...], int] = {}
        for row, start in enumerate(starts):
            if start == 0:
                first_of.setdefault(prompts[row], row)
        passes = self._plan(list(first_of.values()), starts, prompts)
        passes += self._plan([row for row, start in enumerate(starts) if start > 0], starts, prompts)
        capacity = max(max(starts[row] for row in rows) + width for rows, width in passes) + GROWTH // 2
        self._allocate(len(requests), capacity)
        self._recall(known)
        self._memory = {}

        device = self._device
        logits_BV = torch.empty(0)
        for rows, width in passes:
            logits = self._prefill(rows, [starts[r] for r in rows], [prompts[r][starts[r] :] for r in rows], width)
            if logits_BV.numel() == 0:
                logits_BV = logits.new_empty(len(requests), logits.shape[1])
            logits_BV[torch.tensor(rows, device=device)] = logits
        twins = [row for row, start in enumerate(starts) if start == 0 and first_of[prompts[row]] != row]
        if twins:
            target = torch.tensor(twins, device=device)
            source = torch.tensor([first_of[prompts[row]] for row in twins], device=device)
            longest = max(len(prompts[row]) for row in twins)
            for keys, values in self._layers:
                keys[target, :longest], values[target, :longest] = keys[source, :longest], values[source, :longest]
            logits_BV[target] = logits_BV[source]
        self._positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
        return logits_BV

    def step(self, tokens_B: Tensor, growing_B: Tensor) -> Tensor:
        positions = self._positions
        length = int(positions.max()) + 1
        capacity = self._layers[0][0].shape[1]
        if length > capacity:
            self._layers = [
                (F.pad(keys, (0, 0, 0, GROWTH)), F.pad(values, (0, 0, 0, GROWTH))) for keys, values in self._layers
            ]
            capacity += GROWTH
        num_rows = len(positions)
        at = torch.arange(num_rows, device=positions.device) * capacity + positions
        visible = (torch.arange(length, device=positions.device) <= positions[:, None])[:, None, None]
        cos, sin = self._rotary(length)
        cos, sin = cos[positions, None], sin[positions, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._layers[layer]
            keys.view(num_rows * capacity, -1).index_copy_(0, at, k.flatten(1))
            values.view(num_rows * capacity, -1).index_copy_(0, at, v.flatten(1))
            shape = (num_rows, length, self._num_kv, self._head_dim)
            # The query heads that share a key head stand where a sequence would: no repeated keys.
            out = F.scaled_dot_product_attention(
                q.view(num_rows, self._num_kv, self._group, self._head_dim),
                keys[:, :length].view(shape).transpose(1, 2),
                values[:, :length].view(shape).transpose(1, 2),
                attn_mask=visible,
            )
            return out.reshape(num_rows, -1)

        hidden = self._run(tokens_B, cos, sin, attend)
        # A row that ended stays where it is: what it writes lies behind its last valid token.
        self._positions = positions + growing_B
        return self._model.lm_head(hidden)

    def keep(self, rows: Tensor) -> None:
        chosen = set(rows.tolist())
        ended = [row for row in range(len(self._live)) if row not in chosen]
        if self._retain:
            self._parked.append(self._cut(ended))
        index = rows.to(self._positions.device)
        self._layers = [(keys[index], values[index]) for keys, values in self._layers]
        self._live = [self._live[row] for row in rows.tolist()]
        self._positions = self._positions[index]

    def end(self, fed_ids: Sequence[tuple[int, ...]]) -> None:
        if self._retain:
            self._parked.append(_Kept(requests=self._live, layers=self._layers))
            for kept in self._parked:
                for row, request in enumerate(kept.requests):
                    self._memory[self._keys[request]] = (kept, row, fed_ids[request])
        self._layers, self._parked = [], []

    def forget(self) -> None:
        self._memory, self._layers, self._parked = {}, [], []

    @property
    def _device(self) -> torch.device:
        return self._model.model.embed_tokens.weight.device

    def _find(self, request: GenerateRequest) -> tuple[_Kept, int, tuple[int, ...]] | None:
        hit = self._memory.get(trajectory_key(request))
        if hit is None:
            return None
        fed = hit[2]
        return hit if len(fed) < len(request.prompt_ids) and request.prompt_ids[: len(fed)] == fed else None

    @staticmethod
    def _plan(rows: list[int], starts: list[int], prompts: list[tuple[int, ...]]) -> list[tuple[list[int], int]]:
        """Cut rows into passes of at most `PREFILL_TOKENS` padded tokens; each with its width."""
        passes: list[tuple[list[int], int]] = []
        for row in rows:
            width = len(prompts[row]) - starts[row]
            if passes and (len(passes[-1][0]) + 1) * max(passes[-1][1], width) <= PREFILL_TOKENS:
                passes[-1] = ([*passes[-1][0], row], max(passes[-1][1], width))
            else:
                passes.append(([row], width))
        return passes

    def _allocate(self, num_rows: int, capacity: int) -> None:
        # Zeros, not uninitialised memory: masked values are multiplied by 0, and 0 * NaN is NaN.
        weight = self._model.model.embed_tokens.weight
        shape = (num_rows, capacity, self._num_kv * self._head_dim)
        self._layers = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self._model.model.layers]

    def _recall(self, known: list[tuple[_Kept, int, tuple[int, ...]] | None]) -> None:
        """Copy the keys and values of known rows from where the last batch left them."""
        pieces: dict[int, tuple[_Kept, list[int], list[int], int]] = {}
        for row, hit in enumerate(known):
            if hit is not None:
                kept, source, fed = hit
                _, sources, targets, longest = pieces.get(id(kept), (kept, [], [], 0))
                pieces[id(kept)] = (kept, [*sources, source], [*targets, row], max(longest, len(fed)))
        for kept, sources, targets, longest in pieces.values():
            source = torch.tensor(sources, device=self._device)
            target = torch.tensor(targets, device=self._device)
            for (keys, values), (old_keys, old_values) in zip(self._layers, kept.layers, strict=True):
                keys[target, :longest] = old_keys[source, :longest]
                values[target, :longest] = old_values[source, :longest]

    def _cut(self, rows: list[int]) -> _Kept:
        index = torch.tensor(rows, device=self._device)
        longest = int(self._positions[index].max()) + 1
        layers = [(keys[index, :longest], values[index, :longest]) for keys, values in self._layers]
        return _Kept(requests=[self._live[row] for row in rows], layers=layers)

    def _prefill(self, rows: list[int], starts: list[int], tokens: list[tuple[int, ...]], width: int) -> Tensor:
        """Run `tokens` (padded on the right to `width`) behind each row's `start`; logits after each row's last."""
        device = self._device
        ids = torch.tensor([[*t, *[0] * (width - len(t))] for t in tokens], device=device)
        row_index = torch.tensor(rows, device=device)
        start = torch.tensor(starts, device=device)
        positions = start[:, None] + torch.arange(width, device=device)
        length = int(start.max()) + width
        cos, sin = self._rotary(length)
        cos, sin = cos[positions, None], sin[positions, None]
        fresh = max(starts) == 0
        visible = None if fresh else (torch.arange(length, device=device) <= positions[..., None])[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._layers[layer]
            keys[row_index[:, None], positions] = k.flatten(2)
            values[row_index[:, None], positions] = v.flatten(2)
            if not fresh:
                shape = (len(rows), length, self._num_kv, self._head_dim)
                k, v = keys[row_index, :length].view(shape), values[row_index, :length].view(shape)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2).repeat_interleave(self._group, dim=1),
                v.transpose(1, 2).repeat_interleave(self._group, dim=1),
                attn_mask=visible,
                is_causal=fresh,
            )
            return out.transpose(1, 2).flatten(2)

        hidden = self._run(ids, cos, sin, attend)
        last = torch.tensor([len(t) - 1 for t in tokens], device=device)
        return self._model.lm_head(hidden[torch.arange(len(rows), device=device), last])

    def _run(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:
        """All layers over `ids [...]`; cos/sin `[..., 1, head_dim]`; `attend(layer, q, k, v)` stores and attends."""
        model = self._model.model
        x = model.embed_tokens(ids)
        heads = (*ids.shape, -1, self._head_dim)
        for index, block in enumerate(model.layers):
            attention, mlp = block.self_attn, block.mlp
            y = _rms_norm(block.input_layernorm, x)
            q, k = attention.q_proj(y).view(heads), attention.k_proj(y).view(heads)
            v = attention.v_proj(y).view(heads)
            if hasattr(attention, "q_norm"):
                q, k = _rms_norm(attention.q_norm, q), _rms_norm(attention.k_norm, k)
            x = x + attention.o_proj(attend(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v))
            y = _rms_norm(block.post_attention_layernorm, x)
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        return _rms_norm(model.norm, x)

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary angles `[>= length, head_dim]`."""
        if self._angles[0].shape[0] < length or self._angles[0].device != self._device:
            inverse = self._model.model.rotary_emb.inv_freq
            size = max(256, 2 * length)
            angles = torch.arange(size, device=inverse.device).float()[:, None] * inverse.float()
            angles = torch.cat((angles, angles), dim=-1)
            dtype = self._model.model.embed_tokens.weight.dtype
            self._angles = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self._angles


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
