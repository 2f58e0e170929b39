"""The Triton kernels of `triton_logprobs.py` and their launches. Imports Triton: load it only where it is installed.

Both kernels compute a tile of ``z = (hidden weight' + bias) / temperature``, BLOCK_N tokens by BLOCK_V entries, in
steps of BLOCK_D. `forward_kernel` walks over the vocabulary within a program; `backward_kernel` has a program a tile.

Invariants: products accumulate in fp32 (``tf32`` is off, as in `torch.matmul`'s default); entries of -inf have
probability 0 and gradient 0; offsets are 64-bit, since tokens x vocabulary exceeds 2**31.
"""

# Launch and compile-time arguments of kernels are Triton's own: a type checker sees plain functions.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false

# Triton reads annotations of kernels as types, so they are evaluated here.

import torch
import triton
import triton.language as tl

from quintain.trainer.chunked_logprobs import LOWEST

BLOCK_N, BLOCK_V, BLOCK_D = 32, 64, 32


@triton.jit
def logits_tile(
    hidden_ptr, weight_ptr, bias_ptr, rows, columns, num_tokens, num_entries, width, inverse_temperature,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`z` of the tokens `rows` and the entries `columns`; -inf behind the last entry."""
    tile = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start in range(0, width, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        hidden = tl.load(
            hidden_ptr + rows[:, None] * width + depth[None, :],
            mask=(rows[:, None] < num_tokens) & (depth[None, :] < width),
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + columns[:, None] * width + depth[None, :],
            mask=(columns[:, None] < num_entries) & (depth[None, :] < width),
            other=0.0,
        )
        tile += tl.dot(hidden, tl.trans(weight), input_precision="ieee")
    if HAS_BIAS:
        tile += tl.load(bias_ptr + columns, mask=columns < num_entries, other=0.0).to(tl.float32)[None, :]
    return tl.where(columns[None, :] < num_entries, tile * inverse_temperature, float("-inf"))


@triton.jit
def forward_kernel(
    hidden_ptr, weight_ptr, bias_ptr, target_ptr, logprob_ptr, entropy_ptr, lse_ptr,
    num_tokens, num_entries, width, inverse_temperature, lowest,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < num_tokens
    target = tl.load(target_ptr + rows, mask=valid, other=0)
    largest = tl.full((BLOCK_N,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_N,), dtype=tl.float32)
    of_target = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, num_entries, BLOCK_V):
        columns = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        z = logits_tile(
            hidden_ptr, weight_ptr, bias_ptr, rows, columns, num_tokens, num_entries, width, inverse_temperature,
            HAS_BIAS, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(z, axis=1))
        shrink = tl.exp(largest - new_largest)
        d = tl.maximum(z - new_largest[:, None], lowest)
        p = tl.exp(d)
        weighted = (weighted + total * (largest - new_largest)) * shrink + tl.sum(p * d, axis=1)
        total = total * shrink + tl.sum(p, axis=1)
        largest = new_largest
        of_target += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), axis=1)
    lse = largest + tl.log(total)
    tl.store(logprob_ptr + rows, of_target - lse, mask=valid)
    tl.store(entropy_ptr + rows, tl.log(total) - weighted / total, mask=valid)
    tl.store(lse_ptr + rows, lse, mask=valid)


@triton.jit
def backward_kernel(
    hidden_ptr, weight_ptr, bias_ptr, target_ptr, lse_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, grad_ptr,
    num_tokens, num_entries, width, inverse_temperature, lowest,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = rows < num_tokens
    z = logits_tile(
        hidden_ptr, weight_ptr, bias_ptr, rows, columns, num_tokens, num_entries, width, inverse_temperature,
        HAS_BIAS, BLOCK_N, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    target = tl.load(target_ptr + rows, mask=valid, other=-1)
    lse = tl.load(lse_ptr + rows, mask=valid, other=0.0)
    entropy = tl.load(entropy_ptr + rows, mask=valid, other=0.0)
    grad_logprob = tl.load(grad_logprob_ptr + rows, mask=valid, other=0.0).to(tl.float32)
    grad_entropy = tl.load(grad_entropy_ptr + rows, mask=valid, other=0.0).to(tl.float32)
    logp = tl.maximum(z - lse[:, None], lowest)
    p = tl.exp(logp)
    grad = tl.where(columns[None, :] == target[:, None], grad_logprob[:, None], 0.0)
    grad -= p * (grad_logprob[:, None] + grad_entropy[:, None] * (logp + entropy[:, None]))
    tl.store(
        grad_ptr + rows[:, None] * num_entries + columns[None, :],
        (grad * inverse_temperature).to(grad_ptr.dtype.element_ty),
        mask=valid[:, None] & (columns[None, :] < num_entries),
    )


def forward_kernel_call(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_N: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy and log-sum-exp, fp32 `[N]`."""
    num_tokens, width = hidden_ND.shape
    results = [torch.empty(num_tokens, dtype=torch.float32, device=hidden_ND.device) for _ in range(3)]
    if num_tokens:
        forward_kernel[(triton.cdiv(num_tokens, BLOCK_N),)](
            hidden_ND, weight_VD, bias_V if bias_V is not None else weight_VD, target_N, *results,
            num_tokens, len(weight_VD), width, 1.0 / temperature, LOWEST,
            HAS_BIAS=bias_V is not None, BLOCK_N=BLOCK_N, BLOCK_V=BLOCK_V, BLOCK_D=BLOCK_D,
        )  # fmt: skip
    return results[0], results[1], results[2]


def backward_kernel_call(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_N: torch.Tensor,
    lse_N: torch.Tensor,
    entropy_N: torch.Tensor,
    grad_logprob_N: torch.Tensor,
    grad_entropy_N: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Gradient with respect to ``hidden weight' + bias``, `[N, V]` for the V entries given, in their dtype."""
    num_tokens, width = hidden_ND.shape
    grad_NV = torch.empty((num_tokens, len(weight_VD)), dtype=hidden_ND.dtype, device=hidden_ND.device)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, BLOCK_N), triton.cdiv(len(weight_VD), BLOCK_V))
        backward_kernel[grid](
            hidden_ND, weight_VD, bias_V if bias_V is not None else weight_VD, target_N, lse_N, entropy_N,
            grad_logprob_N, grad_entropy_N, grad_NV, num_tokens, len(weight_VD), width, 1.0 / temperature, LOWEST,
            HAS_BIAS=bias_V is not None, BLOCK_N=BLOCK_N, BLOCK_V=BLOCK_V, BLOCK_D=BLOCK_D,
        )  # fmt: skip
    return grad_NV
