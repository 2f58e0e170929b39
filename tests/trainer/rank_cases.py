"""What several learner processes do, case by case: run by `test_ranks.py` through the launcher, once a rank.

    python rank_cases.py OUT     rank 0 writes OUT/<case>-<number of ranks>.pt, and OUT/checkpoint-<number of ranks>/

The same functions run in the test's own process with one rank: what they return there is what is compared with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from trainer_data import make_sample, mixed_samples, tiny_model

from quintain.trainer.config import AlgorithmConfig, LoraConfig, ParallelismConfig, TrainerConfig
from quintain.trainer.follower import follow, obey, start_followers
from quintain.trainer.learner import DivergedError, Learner
from quintain.trainer.parallel import WrappingError, check_wrapping, wrapping_of
from quintain.trainer.ranks import STOP, Ranks
from quintain.trainer.whole_weights import whole

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"kl_coef": 0.1, "minibatches_per_step": 2},
    "lora": {"kl_coef": 0.1},
}
LORA = LoraConfig(rank=4, alpha=8)


def uneven_samples(seed: int = 0) -> list[Any]:
    """Rows of many lengths; one group has nothing to teach, so its forward pass has no backward one."""
    samples = mixed_samples(num_draws=5, seed=seed)
    return [
        replace(s, advantages=tuple(0.0 if m else a for a, m in zip(s.advantages, s.loss_mask, strict=True)))
        if s.draw == 4
        else s
        for s in samples
    ]


def learner_on(
    ranks: Ranks | None, setting: str = "plain", *, dtype: torch.dtype = torch.float32, seed: int = 3
) -> Any:
    algorithm = AlgorithmConfig(learning_rate=1e-2, max_grad_norm=0.5, **SETTINGS[setting])
    trainer = TrainerConfig(micro_batch_tokens=100)
    lora = LORA if setting == "lora" else None
    return Learner(tiny_model(seed=seed).to(dtype), algorithm, trainer, temperature=0.9, ranks=ranks, lora=lora)


def led(ranks: Ranks | None, learner: Any, body: Callable[[Any], Any]) -> Any:
    """`body` on rank 0 while the others obey; its result, None on the others."""
    if ranks is None or ranks.is_main:
        result = body(learner)
        if ranks is not None:
            ranks.announce(STOP)
        return result
    return obey(learner)


def gradients(ranks: Ranks | None, setting: str, dtype: torch.dtype, samples: Any = None) -> Any:
    """The clipped gradients of every optimizer step of one batch, and the batch's metrics."""
    learner = learner_on(ranks, setting, dtype=dtype)
    seen: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        step = learner.policy_version
        parameters = learner.accelerator.unwrap_model(learner.model).named_parameters()
        seen.update({f"{step}/{n}": whole(p.grad).clone() for n, p in parameters if p.grad is not None})

    learner.optimizer.optimizer.register_step_pre_hook(keep)
    metrics = led(ranks, learner, lambda learner: learner.train_on(samples or uneven_samples()))
    return {"gradients": seen, "metrics": metrics, "wrapping": wrapping_of(learner.model), "kinds": kinds(learner)}


def kinds(learner: Any) -> set[str]:
    return {type(p).__name__ for p in learner.model.parameters()}


def six_tokens() -> list[Any]:
    """C02: five tokens of loss 1 in one row, one of loss 7 in another."""
    return [make_sample(30, range(5, 10), advantage=-1.0), make_sample(12, [6], advantage=-7.0, member=1)]


def train_save_go_on(ranks: Ranks | None, folder: Path, setting: str = "kl") -> Any:
    """Two batches, a checkpoint, three more: their metrics and the weights at the end."""

    def body(learner: Any) -> Any:
        for seed in range(2):
            learner.train_on(uneven_samples(seed))
        folder.mkdir()
        learner.save(folder)
        return go_on(learner)

    return led(ranks, learner_on(ranks, setting), body)


def load_go_on(ranks: Ranks | None, folder: Path, setting: str = "kl") -> Any:
    """The same three batches, from the checkpoint, by a learner that began with other weights."""

    def body(learner: Any) -> Any:
        learner.load(folder)
        return go_on(learner)

    return led(ranks, learner_on(ranks, setting, seed=8), body)


def go_on(learner: Any) -> Any:
    metrics = [learner.train_on(uneven_samples(seed)) for seed in range(2, 5)]
    return {"metrics": metrics, "weights": {n: p.detach().clone() for n, p in learner.full_model.named_parameters()}}


def non_finite(ranks: Ranks) -> Any:
    """The last rank's gradient is NaN three times: every rank skips, none is left waiting, a save is still possible."""
    learner = learner_on(ranks)
    if ranks.rank == ranks.size - 1:
        output_layer = learner.accelerator.unwrap_model(learner.model).get_output_embeddings()
        output_layer.register_forward_hook(lambda _module, _args, logits: logits * torch.nan)

    def body(learner: Any) -> Any:
        skipped = [learner.train_on(uneven_samples())["train/num_skipped_steps"] for _ in range(2)]
        try:
            learner.train_on(uneven_samples())
        except DivergedError as error:
            return {"skipped": skipped, "version": learner.policy_version, "error": str(error)}
        return None

    return led(ranks, learner, body)


def exports(ranks: Ranks | None, folder: Path) -> Any:
    """D13: what is exported before and after each of two steps, and the adapters' own log of it."""
    learner = learner_on(ranks, "lora")

    def body(learner: Any) -> Any:
        for step in range(3):
            learner.export_model(folder / f"export-{step}")
            if step < 2:
                learner.train_on(uneven_samples(step))
        (folder / "lora").mkdir()
        learner.save(folder / "lora")

    return led(ranks, learner, body)


def received_model(ranks: Ranks) -> Any:
    """The way a run starts: only rank 0 has the model that counts."""
    algorithm, trainer = AlgorithmConfig(learning_rate=1e-2), TrainerConfig(micro_batch_tokens=100)
    if not ranks.is_main:
        return follow(ranks, algorithm, trainer, temperature=0.9)
    model = tiny_model(seed=5)
    start_followers(ranks, model)
    learner = Learner(model, algorithm, trainer, temperature=0.9, ranks=ranks)
    metrics = learner.train_on(uneven_samples())
    ranks.announce(STOP)
    return metrics


def wrong_wrapping(model: torch.nn.Module, asked: str) -> str:
    try:
        check_wrapping(model, ParallelismConfig(strategy=asked, num_processes=2))  # pyright: ignore[reportArgumentType]
    except WrappingError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {}
    ranks = None
    for strategy in ("ddp", "fsdp2"):
        ranks = Ranks(ParallelismConfig(strategy=strategy, num_processes=size))  # pyright: ignore[reportArgumentType]
        for setting in SETTINGS:
            for dtype in (torch.float32, torch.float64):
                results[f"{strategy}/{setting}/{dtype}"] = gradients(ranks, setting, dtype)
        results[f"{strategy}/C02"] = gradients(ranks, "plain", torch.float32, six_tokens())
        results[f"{strategy}/one row"] = gradients(ranks, "plain", torch.float32, six_tokens()[:1])
        results[f"{strategy}/unbroken"] = train_save_go_on(ranks, out / f"{strategy}-{size}")
        results[f"{strategy}/resumed"] = load_go_on(ranks, out / f"{strategy}-{size}")
        results[f"{strategy}/from single"] = load_go_on(ranks, out / "single")
        if size == 3:
            results[f"{strategy}/from 2"] = load_go_on(ranks, out / f"{strategy}-2")
        results[f"{strategy}/received"] = received_model(ranks)
        results[f"{strategy}/non-finite"] = non_finite(ranks)
        model = learner_on(ranks).model
        results[f"{strategy}/wrong"] = wrong_wrapping(model, "ddp" if strategy == "fsdp2" else "fsdp2")
    assert ranks is not None
    if size == 2:
        exports(ranks, out)
        results["lora/unbroken"] = train_save_go_on(ranks, out / "lora-2", "lora")
        results["lora/resumed"] = load_go_on(ranks, out / "lora-2", "lora")
    if ranks.is_main:
        torch.save(results, out / f"results-{size}.pt")
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
