"""Log-prob and entropy from hidden states by Triton kernels: same contract as `chunked_logprobs.linear_logprobs`.

Forward: a program takes a block of tokens through all of the vocabulary and keeps four numbers a token (running
maximum ``m``, ``s = sum exp(z - m)``, ``u = sum exp(z - m) (z - m)``, the target's ``z``); logits live in registers::

    lse = m + log s        logprob = z_target - lse        entropy = log s - u / s

Backward: a kernel computes the gradient of the logits of all tokens for a part of the vocabulary, in the products' own
precision; two ordinary matrix products turn it into gradients of hidden states and weight. The part is chosen so that
it takes `chunk_bytes`.

Invariants: importable without Triton; the kernels (`triton_kernels.py`) are loaded at the first use. Sums are fp32:
inputs in fp64 are refused.

Does not do: anything on a CPU, but in Triton's interpreter (``TRITON_INTERPRET=1``), which is how it is tested.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from quintain.trainer.chunked_logprobs import CHUNK_BYTES, product_dtype


def triton_can_run(tensor: torch.Tensor) -> bool:
    """Whether Triton is installed and compiles for the device that `tensor` is on."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


def linear_logprobs_triton(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_N: torch.Tensor,
    *,
    temperature: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy, fp32 `[N]`, of ``F.linear(hidden, weight, bias) / temperature``; gradients for all three.

    Raises:
        ImportError: Triton is not installed.
        ValueError: the inputs are fp64.
    """
    if hidden_ND.dtype == torch.float64:
        raise ValueError("the Triton kernel adds in float32; use trainer.logprob_kernel = torch for float64")
    return _TritonLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_ND, weight_VD, bias_V, target_N, temperature, chunk_bytes
    )


class _TritonLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_N: torch.Tensor,
        temperature: float,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from quintain.trainer.triton_kernels import forward_kernel_call

        ctx.dtype, ctx.temperature, ctx.chunk_bytes = product_dtype(hidden_ND), temperature, chunk_bytes
        logprob_N, entropy_N, lse_N = forward_kernel_call(
            hidden_ND.to(ctx.dtype).contiguous(), weight_VD.to(ctx.dtype).contiguous(), bias_V, target_N, temperature
        )
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N)
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from quintain.trainer.triton_kernels import backward_kernel_call

        hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N = ctx.saved_tensors
        grad_logprob_N, grad_entropy_N = (torch.zeros_like(lse_N) if g is None else g.contiguous() for g in grads)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden, weight = hidden_ND.to(ctx.dtype).contiguous(), weight_VD.to(ctx.dtype).contiguous()
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wants_hidden else None
        grad_weight = torch.empty_like(weight_VD) if wants_weight else None
        grad_bias = torch.empty_like(bias_V) if bias_V is not None and wants_bias else None
        num_entries = max(1, ctx.chunk_bytes // (hidden.element_size() * max(1, len(hidden))))
        for start in range(0, len(weight), num_entries):
            part = slice(start, min(start + num_entries, len(weight)))
            grad_NC = backward_kernel_call(
                hidden,
                weight[part],
                None if bias_V is None else bias_V[part],
                target_N - start,
                lse_N,
                entropy_N,
                grad_logprob_N,
                grad_entropy_N,
                ctx.temperature,
            )
            if grad_bias is not None:
                grad_bias[part] = grad_NC.sum(dim=0, dtype=torch.float32)
            if grad_hidden is not None:
                grad_hidden += grad_NC @ weight[part]
            if grad_weight is not None:
                grad_weight[part] = grad_NC.T @ hidden
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_ND.dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )
