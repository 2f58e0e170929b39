"""One batch in two precisions, and the trainer against what sampled it: the numbers of `quintain accuracy`.

Precisions: `fp32`, the weights as they are; `bf16`, products in bf16 by autocast over the same fp32 weights, log-probs
in fp32. The policy gradient of each is taken from the same batch; where no advantage differs from 0, from advantages
of 1 (which is said in the result).

Invariants: the model's weights do not change; comparisons are over trained tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from quintain.trainer.batch import Batch, make_batches
from quintain.trainer.logprobs import score_tokens
from quintain.trainer.mismatch import Mismatch, mismatch
from quintain.trainer.sample import Sample

Precision = Literal["fp32", "bf16", "fp8"]


class PrecisionUnavailableError(ValueError):
    """This machine can't compute in that precision; the message says why and what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The result; `engine`: trainer in fp32 against sampler, `precision`: the other precision against fp32."""

    engine: Mismatch
    precision: Mismatch
    gradient_cosine: float
    """Of the two precisions' gradients over all parameters, -1 to 1."""
    grad_norm_ratio: float
    """Norm of the other precision's gradient over that of fp32."""
    used_own_advantages: bool
    """False: every advantage was 0, so that 1 stood in."""


def refuse_unavailable(precision: str, device_type: str) -> None:
    """Raises PrecisionUnavailableError where `precision` can't be computed on such a device."""
    if precision == "fp8":
        reason = "a CPU has no fp8 products" if device_type == "cpu" else "fp8 training (torchao) was not run here yet"
        raise PrecisionUnavailableError(f"precision fp8: {reason}; use bf16 or fp32")


def compare(
    model: Any, samples: Sequence[Sample], *, precision: Precision, temperature: float, max_tokens: int
) -> Accuracy:
    """Measure on one batch.

    Raises:
        PrecisionUnavailableError: the model's device has no such precision.
        EmptyBatchError: nothing in the batch is trained.
    """
    device = next(model.parameters()).device
    refuse_unavailable(precision, device.type)
    model.eval()
    batches = [batch.to(device) for batch in make_batches(samples, max_tokens=max_tokens)]
    own = any(batch.has_signal for batch in batches)
    if not own:
        batches = [replace(b, advantages_BT=torch.ones_like(b.advantages_BT)) for b in batches]
    base_N, base = _logprobs_and_gradient(model, batches, "fp32", temperature)
    other_N, other = _logprobs_and_gradient(model, batches, precision, temperature)
    sampled_N = torch.cat([batch.rollout_logprobs_BT[batch.loss_mask_BT] for batch in batches])
    norms = base.norm(), other.norm()
    return Accuracy(
        engine=mismatch(sampled_N, base_N),
        precision=mismatch(base_N, other_N),
        gradient_cosine=(base @ other / (norms[0] * norms[1])).item(),
        grad_norm_ratio=(norms[1] / norms[0]).item(),
        used_own_advantages=own,
    )


def _logprobs_and_gradient(
    model: Any, batches: Sequence[Batch], precision: Precision, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the trained tokens and the flat gradient of ``-sum(A lp) / N``, fp64 on the host."""
    model.zero_grad()
    logprobs = []
    device_type = batches[0].token_ids_BT.device.type
    for batch in batches:
        with torch.autocast(device_type, torch.bfloat16) if precision == "bf16" else nullcontext():
            scores = score_tokens(model, batch, temperature=temperature)
        logprobs_N = scores.logprobs_BT[scores.trained_BT]
        (-(logprobs_N * batch.advantages_BT[scores.trained_BT]).sum() / batch.denominator).backward()
        logprobs.append(logprobs_N.detach())
    flat = [p.grad.flatten().to("cpu", torch.float64) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(logprobs), torch.cat(flat)
