"""The learner in two and three processes (gloo) against one: gradients, checkpoints, adapters, wrapping."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from rank_cases import exports, gradients, learner_on, load_go_on, six_tokens, train_save_go_on, uneven_samples

from quintain.trainer.launch import launch

STRATEGIES = ("ddp", "fsdp2")
SIZES = (2, 3)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def single(out: Path) -> dict[str, Any]:
    """One process' run over a checkpoint, which the ranks load too."""
    return train_save_go_on(None, out / "single")


@pytest.fixture(scope="module")
def results(out: Path, single: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Everything that two, then three processes found (three load what two saved)."""
    command = [sys.executable, str(Path(__file__).with_name("rank_cases.py")), str(out)]
    found = {}
    for size in SIZES:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        assert launch(command, num_processes=size, environment=environment) == 0
        found[size] = torch.load(out / f"results-{size}.pt", weights_only=False)
    return found


def assert_equal_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys() and found
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * max(1.0, largest), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("setting", ["plain", "kl", "lora"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_gradients_are_those_of_one_process(results, size, strategy, setting, dtype, tolerance):
    """C02: rows of unequal lengths, several micro-batches, some without a gradient, several optimizer steps."""
    found = results[size][f"{strategy}/{setting}/{dtype}"]
    alone = gradients(None, setting, dtype)
    assert_equal_gradients(found["gradients"], alone["gradients"], tolerance)
    assert found["metrics"].keys() == alone["metrics"].keys()
    for name, value in alone["metrics"].items():
        if name != "train/padding_frac":  # how rows are cut into micro-batches differs
            assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mean_over_ranks_with_unequal_token_counts_is_the_mean_over_tokens(results, size, strategy):
    """C02: (5 x 1 + 7) / 6 = 2, not (1 + 7) / 2 = 4."""
    found = results[size][f"{strategy}/C02"]
    assert found["metrics"]["train/loss"] == pytest.approx(2.0, abs=1e-6)
    alone = gradients(None, "plain", torch.float32, six_tokens())
    assert_equal_gradients(found["gradients"], alone["gradients"], 1e-6)
    one_row = gradients(None, "plain", torch.float32, six_tokens()[:1])
    assert_equal_gradients(results[size][f"{strategy}/one row"]["gradients"], one_row["gradients"], 1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_the_model_is_really_wrapped_as_asked_and_anything_else_is_refused(results, size):
    """F10"""
    for strategy, kind in (("ddp", "Parameter"), ("fsdp2", "DTensor")):
        found = results[size][f"{strategy}/plain/{torch.float32}"]
        assert (found["wrapping"], found["kinds"]) == (strategy, {kind})
        assert f"wrapped as '{strategy}'" in results[size][f"{strategy}/wrong"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_number_of_ranks_goes_on_bit_for_bit(results, size, strategy):
    """F06, F07: another learner of the same process, with other weights and an optimizer that never stepped."""
    unbroken, resumed = (results[size][f"{strategy}/{name}"] for name in ("unbroken", "resumed"))
    assert resumed["metrics"] == unbroken["metrics"]
    assert all(torch.equal(w, unbroken["weights"][name]) for name, w in resumed["weights"].items())


def assert_goes_on_like(found: dict[str, Any], unbroken: dict[str, Any]) -> None:
    for mine, other in zip(found["metrics"], unbroken["metrics"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl_reference", "policy/version"):
            assert mine[name] == pytest.approx(other[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_three(results, out, strategy):
    """F06"""
    unbroken = results[2][f"{strategy}/unbroken"]
    assert_goes_on_like(results[3][f"{strategy}/from 2"], unbroken)
    assert_goes_on_like(load_go_on(None, out / f"{strategy}-2"), unbroken)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_one_process_goes_on_with_several(results, single, size, strategy):
    assert_goes_on_like(results[size][f"{strategy}/from single"], single)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(results, size, strategy):
    found = results[size][f"{strategy}/non-finite"]
    assert (found["skipped"], found["version"]) == ([1, 1], 0)
    assert "3 optimizer steps in a row" in found["error"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_rank_0_needs_the_model_that_a_run_starts_from(results, size, strategy):
    learner = learner_on(None, seed=5)
    learner.config = learner.config.model_copy(update={"max_grad_norm": 1.0})

    expected = learner.train_on(uneven_samples())
    assert results[size][f"{strategy}/received"]["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_exported_is_the_merged_model_and_changes_with_each_step(results, out, tmp_path, num_ranks):
    """D13: against PEFT's own merge of the base and the adapters that the checkpoint holds."""
    folder = out if num_ranks == 2 else tmp_path
    if num_ranks == 1:
        exports(None, tmp_path)
    exported = [weights_in(folder / f"export-{step}") for step in range(3)]
    for before, after in itertools.pairwise(exported):
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert len([name for name in changed if "proj" in name]) == 14 and not any("embed" in name for name in changed)
    checkpoint = folder / "lora"
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint / "reference")
    assert all(torch.equal(p, exported[0][name]) for name, p in base.named_parameters())
    merged = peft.PeftModel.from_pretrained(base, str(checkpoint / "adapter")).merge_and_unload()  # pyright: ignore
    for name, weight in merged.named_parameters():
        assert torch.allclose(weight, exported[2][name], atol=1e-6), name
        assert torch.equal(weights_in(checkpoint / "model")[name], exported[2][name])


def test_adapters_go_on_bit_for_bit_and_with_one_process(results, out):
    unbroken, resumed = results[2]["lora/unbroken"], results[2]["lora/resumed"]
    assert resumed["metrics"] == unbroken["metrics"]
    assert all(torch.equal(w, unbroken["weights"][name]) for name, w in resumed["weights"].items())
    assert_goes_on_like(load_go_on(None, out / "lora-2", "lora"), unbroken)
