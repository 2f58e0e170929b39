"""Learner against plain PyTorch: tokens/s on one batch, peak memory of log-probs, padding with and without packing.

    PYTHONSAFEPATH=1 python benchmarks/learner.py [--json] [--pairs 5]

Pairs run in turn in one process. Peaks are resident memory of a fresh process each, over what it held before.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from quintain.trainer.batch import make_batches, padding_frac
from quintain.trainer.chunked_logprobs import linear_logprobs, logprob_and_entropy
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.learner import Learner
from quintain.trainer.sample import Sample

VOCAB, LARGE_VOCAB, NUM_TOKENS, WIDTH = 449, 151_936, 1024, 128


def make_samples(count: int) -> list[Sample]:
    rng = random.Random(0)
    samples = []
    for number in range(count):
        length = rng.randint(40, 190)
        mask = tuple(t >= 20 for t in range(length))
        samples.append(
            Sample(
                token_ids=tuple(rng.randrange(VOCAB) for _ in mask),
                loss_mask=mask,
                rollout_logprobs=tuple(-6.0 if m else math.nan for m in mask),
                advantages=tuple(rng.choice((-1.0, 1.0)) if m else 0.0 for m in mask),
                policy_versions=tuple(0 if m else -1 for m in mask),
                draw=number,
                member=0,
            )
        )
    return samples


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def plain_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, samples: list[Sample]) -> None:
    for batch in make_batches(samples, max_tokens=2048):
        logits = model(input_ids=batch.token_ids_BT, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, batch.token_ids_BT[:, 1:, None])[..., 0]
        mask = batch.loss_mask_BT[:, 1:]
        ratio = (logprobs - logprobs.detach())[mask].exp()
        (-(ratio * batch.advantages_BT[:, 1:][mask]).sum() / batch.denominator).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def tokens_per_second_ratio(samples: list[Sample], pairs: int) -> float:
    """Ours over the plain loop's, median of pairs; the first is warm-up."""
    learner = Learner(make_model(), AlgorithmConfig(), TrainerConfig(micro_batch_tokens=2048), temperature=1.0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ratios = []
    for _ in range(pairs + 1):
        start = time.perf_counter()
        learner.train_on(samples)
        middle = time.perf_counter()
        plain_step(model, optimizer, samples)
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return statistics.median(ratios[1:])


def peak_bytes(kind: str) -> int:
    """Of log-probs, entropies and gradients of NUM_TOKENS tokens, by this process."""
    hidden = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(LARGE_VOCAB, WIDTH, requires_grad=True)
    target = torch.randint(0, LARGE_VOCAB, (NUM_TOKENS,))
    weight.grad = torch.zeros_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "chunked":
        logprob, _ = linear_logprobs(hidden, weight, None, target, temperature=1.0)
    else:
        logprob, _ = logprob_and_entropy(torch.nn.functional.linear(hidden, weight), target)
    logprob.sum().backward()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    parser = argparse.ArgumentParser(description="the learner against plain PyTorch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--peak", choices=["chunked", "full"], help="internal: measure one peak and print it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print(peak_bytes(args.peak))
        return
    peaks = {
        kind: int(subprocess.check_output([sys.executable, __file__, "--peak", kind])) for kind in ("chunked", "full")
    }
    samples = make_samples(64)
    result = {
        "ratio": tokens_per_second_ratio(samples, args.pairs),
        "logprob_peak_ratio": peaks["chunked"] / peaks["full"],
        "logprob_peak_bytes": peaks,
        "padding_frac": padding_frac(make_batches(samples, max_tokens=2048)),
        "padding_frac_packed": padding_frac(make_batches(samples, max_tokens=2048, packed=True, row_tokens=512)),
    }
    print(json.dumps(result) if args.json else "\n".join(f"{name:<22}{value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
