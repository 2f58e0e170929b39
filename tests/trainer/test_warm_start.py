"""The warm start on a small environment: it reaches its target or says why not, and its result is cached by content."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quintain.agents.completion import GenerateRequest, RequestKey, SamplingParams
from quintain.agents.local_policy import LocalPolicy
from quintain.agents.renderer import ChatRenderer
from quintain.envs import Message, Task, ToolEnv, reward
from quintain.recipes.build_model import build_scratch
from quintain.recipes.config import ScratchModelConfig
from quintain.trainer.config import WarmStartConfig
from quintain.trainer.progress import PlainProgress
from quintain.trainer.warm_start import WarmStartError, demonstrations, warm_start
from quintain.trainer.warm_start_cache import REPORT_FILE, WarmStartReport

COLOURS = ("red", "blue", "green", "pink")


class ColourEnv(ToolEnv):
    """Name the colour that was asked for; bad habit: always say "none"."""

    system_prompt = "Colours."

    def rows(self, split: str) -> Iterable[Mapping[str, Any]]:
        return [{"prompt": f"{number} {colour}?", "answer": colour} for number in range(5) for colour in COLOURS]

    @reward
    def named(self) -> float:
        """1 where the answer is the colour."""
        return float(self.answer == self.task.data["answer"])

    def demonstrate(self, task: Task, *, clean: bool, rng: np.random.Generator) -> tuple[Message, ...] | None:
        return self.dialogue(task.data["answer"] if clean else "none")


class SilentEnv(ColourEnv):
    """The same without demonstrations."""

    def demonstrate(self, task: Task, *, clean: bool, rng: np.random.Generator) -> tuple[Message, ...] | None:
        return None


class Bench:
    """A tiny model, its renderer and the environment; `run` is one warm start."""

    def __init__(self, cache: Path, env: ToolEnv | None = None) -> None:
        self.cache = cache
        self.env = env or ColourEnv()
        sizes = ScratchModelConfig(
            vocab_size=300, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32
        )
        texts = [
            text for task in map(self.env.task_at, range(20)) for text in (task.prompt, task.data["answer"], "none")
        ]
        self.model, self.tokenizer = build_scratch(sizes, texts, seed=3)
        self.renderer = ChatRenderer(self.tokenizer)
        self.checks: list[tuple[bool, float]] = []
        self.said = io.StringIO()

    def evaluate(self, *, greedy: bool, num_tasks: int) -> float:
        policy, tasks = LocalPolicy(self.model), [self.env.task_at(i) for i in range(num_tasks)]
        sampling = SamplingParams(
            temperature=0.0 if greedy else 1.0, max_new_tokens=12, stop_token_ids=tuple(self.renderer.stop_token_ids)
        )

        async def run() -> list[bool]:
            opening = [self.env.reset(options={"task": task})[0] for task in tasks]
            requests = [
                GenerateRequest(
                    key=RequestKey(draw=i, member=0, attempt=0, turn=0),
                    prompt_ids=self.renderer.prompt_ids(messages, self.env.tool_specs),
                    sampling=sampling,
                    seed=i,
                )
                for i, messages in enumerate(opening)
            ]
            completions = await asyncio.gather(*(policy.generate(request) for request in requests))
            await policy.close()
            texts = [self.renderer.parse(c.token_ids, c.finish_reason, call_id_prefix="t") for c in completions]
            return [t.message.content == task.data["answer"] for t, task in zip(texts, tasks, strict=True)]

        success = float(np.mean(asyncio.run(run())))
        self.checks.append((greedy, success))
        return success

    def run(self, *, seed: int = 0, **settings: Any) -> WarmStartReport:
        config = WarmStartConfig(
            **{
                "enabled": True,
                "max_steps": 200,
                "check_every_steps": 10,
                "first_check_step": 20,
                "cooldown_steps": 10,
                "warmup_steps": 5,
                "num_check_tasks": 20,
                "batch_size": 8,
                "learning_rate": 1e-2,
                "num_demonstrations": 40,
                "cache_dir": str(self.cache),
                **settings,
            }
        )
        return warm_start(
            self.model,
            self.tokenizer,
            self.renderer,
            self.env,
            config,
            seed=seed,
            evaluate=self.evaluate,
            progress=PlainProgress(self.said),
        )

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.model.parameters()])


def test_the_clean_stage_ends_at_the_target_after_a_cool_down(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    report = bench.run()
    assert report.greedy_success >= 0.95 and report.sampled_success is None and not report.from_cache
    assert report.num_steps < 200 and bench.checks[-1] == (True, report.greedy_success)
    assert bench.evaluate(greedy=True, num_tasks=20) == report.greedy_success


def test_the_mixed_stage_leaves_a_model_that_can_but_often_does_not(tmp_path: Path) -> None:
    report = Bench(tmp_path).run(mixed_steps=40, mixed_bad_frac=0.6, mixed_learning_rate=5e-3)
    assert report.greedy_success >= 0.95
    assert report.sampled_success is not None and 0.15 <= report.sampled_success <= 0.65


def test_what_was_reached_and_why_success_then_drops_is_said(tmp_path: Path) -> None:
    first, second = Bench(tmp_path), Bench(tmp_path)
    first.run(mixed_steps=5)
    said = [line for line in first.said.getvalue().splitlines() if line.startswith("warm start: ")]
    assert re.fullmatch(r"warm start: greedy success (1\.00|0\.9\d) on held-out tasks after \d+ steps", said[0])
    assert "5 more steps, with bad habits mixed in on purpose" in said[1] and "success drops" in said[1]
    assert re.search(r"warm start \d+ of at most 200 in ", first.said.getvalue())
    second.run(mixed_steps=5)
    assert re.search(r"taken from .*bad habits were mixed in on purpose.*: [01]\.\d\d sampled", second.said.getvalue())


def test_a_missed_target_is_an_error_that_says_how_far_it_came_and_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(WarmStartError, match=r"reached 0\.\d\d in 6 steps.*Raise warm_start\.max_steps"):
        Bench(tmp_path).run(max_steps=6)
    assert not list(tmp_path.iterdir())


def test_an_environment_without_demonstrations_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WarmStartError, match=r"SilentEnv offers no demonstration.*model\.path"):
        Bench(tmp_path, SilentEnv()).run()


def test_the_same_seed_gives_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    first, second = Bench(tmp_path / "a"), Bench(tmp_path / "b")
    reports = [bench.run(mixed_steps=5) for bench in (first, second)]
    assert not any(report.from_cache for report in reports)
    assert torch.equal(first.weights(), second.weights())


def test_a_second_start_takes_the_result_from_the_cache_bit_for_bit(tmp_path: Path) -> None:
    first, second = Bench(tmp_path), Bench(tmp_path)
    built, loaded = first.run(mixed_steps=5), second.run(mixed_steps=5)
    assert not built.from_cache and loaded.from_cache and not second.checks
    assert loaded.greedy_success == built.greedy_success and loaded.path == built.path
    assert torch.equal(first.weights(), second.weights())


@pytest.mark.parametrize("change", ["seed", "settings", "model", "data", "template"])
def test_whatever_goes_into_the_warm_start_changes_the_cache_entry(tmp_path: Path, change: str) -> None:
    bench, other = Bench(tmp_path), Bench(tmp_path)
    bench.run()
    settings: dict[str, Any] = {}
    if change == "seed":
        settings["seed"] = 1
    elif change == "settings":
        settings["learning_rate"] = 9e-3
    elif change == "model":
        with torch.no_grad():
            other.model.model.norm.weight[0] += 0.5
    elif change == "data":
        other.env = ColourEnv(num_tasks=16)
        settings["num_check_tasks"] = 16
        bench.run(num_check_tasks=16)
    else:
        other.tokenizer.chat_template += "{# another #}"
    assert not other.run(**settings).from_cache


@pytest.mark.parametrize("damage", ["weights cut", "report cut", "report gone"])
def test_a_damaged_entry_is_built_anew(tmp_path: Path, damage: str) -> None:
    first, second = Bench(tmp_path), Bench(tmp_path)
    path = first.run().path
    if damage == "weights cut":
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "report cut":
        (path / REPORT_FILE).write_text('{"files": {', encoding="utf-8")
    else:
        (path / REPORT_FILE).unlink()
    assert not second.run().from_cache
    assert torch.equal(first.weights(), second.weights())
    assert json.loads((path / REPORT_FILE).read_text(encoding="utf-8"))["report"]["num_steps"] > 0
    assert Bench(tmp_path).run().from_cache and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_cache_that_cannot_be_written_is_a_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    bench = Bench(tmp_path / "file" / "cache")  # below a file no folder can be made, whoever tries
    report = bench.run()
    assert bench.evaluate(greedy=True, num_tasks=20) == report.greedy_success >= 0.95
    assert re.search(
        r"not kept for the next run \(.*\); this run goes on.*\n?.*warm_start\.cache_dir", bench.said.getvalue()
    )


def test_every_task_is_shown_once_before_any_is_shown_twice() -> None:
    shown = [c[1].content for c in demonstrations(ColourEnv(), 40, bad_frac=0.0, seed=1)]
    assert sorted(shown[:20]) == sorted(shown[20:]) == sorted(set(shown)) and shown[:20] != shown[20:]


def test_the_share_of_bad_demonstrations_is_as_asked() -> None:
    mixed = demonstrations(ColourEnv(), 1000, bad_frac=0.6, seed=1)
    assert abs(np.mean([c[-1].content == "none" for c in mixed]) - 0.6) < 0.05
