"""The algorithm in one file computes what the library computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trainer_data import mixed_samples, tiny_model

from quintain.envs import make_env
from quintain.envs.config import EnvironmentConfig
from quintain.recipes.build_model import build_scratch
from quintain.recipes.config import ScratchModelConfig
from quintain.recipes.grpo_in_one_file import Row, group_advantages, grpo_loss, main, train_step
from quintain.trainer.advantages import grpo_advantages
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.learner import Learner


def test_loss_and_first_gradient_equal_the_librarys_on_the_same_rows() -> None:
    samples = mixed_samples()
    rows = [Row(list(s.token_ids), list(s.loss_mask)) for s in samples]
    advantages = [max(s.advantages, key=lambda a: abs(a) if a == a else 0.0) for s in samples]

    model = tiny_model().eval()
    loss = grpo_loss(model, rows, advantages, num_trained_tokens=sum(s.num_trained_tokens for s in samples))
    loss.backward()

    seen: dict[str, torch.Tensor] = {}
    learner = Learner(tiny_model(), AlgorithmConfig(max_grad_norm=1e9), TrainerConfig(), temperature=1.0)

    def keep(*_: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})

    learner.optimizer.optimizer.register_step_pre_hook(keep)
    metrics = learner.train_on(samples)
    assert abs(metrics["train/loss"] - loss.item()) < 1e-6
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(seen[name], parameter.grad, rtol=1e-4, atol=1e-6), name


def test_one_update_equals_the_librarys() -> None:
    samples = mixed_samples()
    rows = [Row(list(s.token_ids), list(s.loss_mask)) for s in samples]
    advantages = [next(a for a, m in zip(s.advantages, s.loss_mask, strict=True) if m) for s in samples]
    model = tiny_model().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    learner = Learner(tiny_model(), AlgorithmConfig(learning_rate=1e-3), TrainerConfig(), temperature=1.0)
    loss = train_step(model, optimizer, rows, advantages)
    assert abs(learner.train_on(samples)["train/loss"] - loss) < 1e-6
    for mine, theirs in zip(model.parameters(), learner.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_advantages_equal_the_librarys() -> None:
    for rewards in ([1.0, 0.0, 0.0, 1.0], [0.7] * 12, [0.2, 0.9, 0.4]):
        assert torch.allclose(torch.tensor(group_advantages(rewards)), torch.tensor(grpo_advantages(rewards)))


def test_it_runs_against_the_calculator_environment(tmp_path: Path, capsys) -> None:
    env = make_env(EnvironmentConfig(id="quintain/Calculator-v0"), split="train", pool=None)
    texts = [env.task_at(i).prompt for i in range(50)]
    config = ScratchModelConfig(hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
    model, tokenizer = build_scratch(config, texts, seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = ["--steps", "2", "--tasks", "2", "--group-size", "2", "--max-new-tokens", "8", "--sandbox", "local"]
    rewards = main(["--model", str(tmp_path), *settings])
    assert len(rewards) == 2
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["step", "1"], ["step", "2"]]
