"""Log-probs in chunks and by Triton against the plain computation: values, gradients, memory, every kind of layer."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_data import mixed_samples, tiny_model

from quintain.trainer.batch import make_batches
from quintain.trainer.chunked_logprobs import linear_logprobs, logprob_and_entropy, module_logprobs
from quintain.trainer.logprobs import score_tokens
from quintain.trainer.triton_logprobs import linear_logprobs_triton, triton_can_run

N, D, V = 13, 24, 157


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, bias (with an impossible entry) and targets."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64) / 3
    bias_V = torch.randn(V, generator=generator, dtype=torch.float64)
    bias_V[7] = -math.inf
    target = torch.randint(8, V, (N,), generator=generator)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, *([bias_V] if bias else []))]
    return (*leaves, target)


def plain(hidden, weight, bias, target, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    return logprob_and_entropy(torch.nn.functional.linear(hidden, weight, bias) / temperature, target)


def outcome(function: Any, *, dtype=torch.float64, bias=True, entropy=True, logprob=True, **arguments: Any):
    """Values and gradients of a weighted sum of log-probs and entropies."""
    hidden, weight, *rest, target = inputs(dtype, bias=bias)
    values = function(hidden, weight, rest[0] if bias else None, target, temperature=0.7, **arguments)
    weights = torch.linspace(-1, 2, N, dtype=values[0].dtype)
    total = torch.zeros((), dtype=values[0].dtype)
    total = total + (values[0] * weights).sum() if logprob else total
    total = total + (values[1] * weights.flip(0)).sum() if entropy else total
    total.backward()
    return *(v.detach() for v in values), *(x.grad for x in (hidden, weight, *rest))


def assert_close(found, expected, tolerance: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("logprob", "entropy"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [1, 4, 13, 100])
def test_chunks_of_any_size_give_the_values_and_gradients_of_full_logits(rows, logprob, entropy, bias) -> None:
    """C06: also with an entry of -inf."""
    kind = {"bias": bias, "logprob": logprob, "entropy": entropy}
    found = outcome(linear_logprobs, chunk_bytes=4 * V * rows, **kind)
    assert_close(found, outcome(plain, **kind), 1e-10)


def test_a_token_that_cannot_be_drawn_leaves_entropy_finite_and_gets_no_gradient() -> None:
    """C06: logits [0, 0, -inf]"""
    hidden = torch.zeros(1, 1, requires_grad=True)
    weight = torch.zeros(3, 1, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    for function in (linear_logprobs,):
        logprob, entropy = function(hidden, weight, bias, torch.tensor([0]), temperature=1.0)
        (gradient,) = torch.autograd.grad(entropy.sum() + logprob.sum(), bias)
        assert entropy.item() == pytest.approx(math.log(2)) and logprob.item() == pytest.approx(-math.log(2))
        assert gradient.tolist() == pytest.approx([0.5, -0.5, 0.0])


def test_an_output_layer_of_any_kind_is_called_in_chunks() -> None:
    def by_module(hidden, weight, bias, target, *, temperature: float):
        layer = lambda x: torch.nn.functional.linear(x, weight, bias)  # noqa: E731
        return module_logprobs(layer, hidden, target, temperature=temperature, num_chunk_tokens=4)

    assert_close(outcome(by_module), outcome(plain), 1e-10)


def test_bf16_products_are_those_of_autocast_and_sums_are_fp32() -> None:
    def under_autocast(function: Any, **arguments: Any):
        def call(*args: Any, **kwargs: Any):
            with torch.autocast("cpu", torch.bfloat16):
                return function(*args, **kwargs, **arguments)

        return call

    def reference(hidden, weight, bias, target, *, temperature: float):
        logits = torch.nn.functional.linear(hidden, weight, bias)
        assert logits.dtype == torch.bfloat16
        return logprob_and_entropy(logits.float() / temperature, target)

    found = outcome(under_autocast(linear_logprobs, chunk_bytes=4 * V * 4), dtype=torch.float32)
    expected = outcome(under_autocast(reference), dtype=torch.float32)
    assert all(value is not None and value.dtype == torch.float32 for value in found[:2])
    assert_close(found[:2], expected[:2], 1e-5)
    assert_close(found[2:], expected[2:], 2e-2)


def lora_model() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(tiny_model(), config)


def biased_model() -> Any:
    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, model.lm_head.out_features))
    return model


MODELS = {
    "untied": tiny_model,
    "tied": lambda: tiny_model("llama"),
    "bias": biased_model,
    "soft capping": lambda: tiny_model("gemma2"),
    "LoRA on the output layer": lora_model,
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_score_the_same_with_small_chunks_as_with_all_logits(kind: str) -> None:
    torch.manual_seed(0)
    # Gemma 2's padding sees nothing in its window, which its attention turns into NaN in fp64.
    double = kind != "soft capping"
    model = MODELS[kind]().to(torch.float64 if double else torch.float32).eval()
    (batch,) = make_batches(mixed_samples(num_draws=1), max_tokens=1000)
    results = []
    for chunk_bytes in (10**9, 1000):
        model.zero_grad()
        scores = score_tokens(model, batch, temperature=0.8, entropy_gradient=True, chunk_bytes=chunk_bytes)
        trained = scores.trained_BT
        (scores.logprobs_BT[trained].sum() + 0.3 * scores.entropy_BT[trained].square().sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([scores.logprobs_BT[trained].detach(), scores.entropy_BT[trained].detach(), *gradients])
    assert_close(results[1], results[0], 1e-10 if double else 1e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation gives."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.num_bytes = max(self.num_bytes, value.numel() * value.element_size())
        return result


def test_no_tensor_of_tokens_times_vocabulary_exists_in_either_direction() -> None:
    hidden = torch.randn(400, 8, requires_grad=True)
    weight = torch.randn(5000, 8, requires_grad=True)
    target = torch.randint(0, 5000, (400,))
    with LargestTensor() as seen:
        logprob, entropy = linear_logprobs(hidden, weight, None, target, temperature=1.0, chunk_bytes=400_000)
        torch.autograd.backward([logprob.sum(), entropy.sum()])
    assert seen.num_bytes <= 400_000
    with LargestTensor() as full:
        plain(hidden, weight, None, target, temperature=1.0)
    assert full.num_bytes == 400 * 5000 * 4


TRITON_CHECK = """
import sys, torch
sys.path.insert(0, {folder!r})
from test_chunked_logprobs import assert_close, linear_logprobs_triton, outcome, plain
for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 1e-2)):
    for bias in (True, False):
        for chunk_bytes in (2000, 10**6):
            found = outcome(linear_logprobs_triton, chunk_bytes=chunk_bytes, dtype=dtype, bias=bias)
            assert_close([x.double() for x in found], outcome(plain, bias=bias), tolerance)
print("equal")
"""


def test_triton_kernels_agree_with_the_reference_in_tritons_interpreter() -> None:
    """Forward and backward, with and without bias; C06: one of its entries is -inf.

    In fp32 and fp16: the interpreter has no products of bf16.
    """
    pytest.importorskip("triton", reason="no Triton for this platform")
    result = subprocess.run(
        [sys.executable, "-c", TRITON_CHECK.format(folder=os.path.dirname(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.strip() == "equal", result.stderr[-3000:]


def test_triton_is_chosen_on_a_gpu_only_and_refuses_fp64() -> None:
    assert not triton_can_run(torch.zeros(1))
    hidden, weight, bias, target = inputs()
    with pytest.raises(ValueError, match=r"trainer\.logprob_kernel = torch"):
        linear_logprobs_triton(hidden, weight, bias, target, temperature=1.0)
