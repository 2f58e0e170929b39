"""Checkpoints: whole or absent, ordered by number, refused with reasons; a resumed learner goes on bit for bit."""

from __future__ import annotations

import errno
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from trainer_data import mixed_samples, tiny_model

from quintain.trainer.checkpoint import CheckpointError, Checkpoints, find_problem, latest_good
from quintain.trainer.config import AlgorithmConfig, TrainerConfig
from quintain.trainer.learner import Learner

STATE = {"step": 10, "next_draw": 160, "seconds": {"rollout": 1.5}, "success_before": None}


class SmallFiles:
    """Saves a few small files, or fails half-way."""

    def __init__(self, content: str = "x", error: BaseException | None = None, num_bytes: int = 0) -> None:
        self.content, self.error, self.num_bytes = content, error, num_bytes

    def save(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(self.content * 100)
        if self.error is not None:
            raise self.error
        (folder / "learner.pt").write_text(self.content)

    def checkpoint_bytes(self) -> int:
        return self.num_bytes


def learner_of(seed: int = 3, **algorithm: Any) -> Learner:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "warmup_steps": 3} | algorithm
    return Learner(tiny_model(seed=seed), AlgorithmConfig(**settings), TrainerConfig(), temperature=1.0)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_newest_complete_checkpoint_is_found_with_the_loops_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    assert checkpoints.latest_good() is None
    checkpoints.save(5, SmallFiles(), STATE | {"step": 5})
    path = checkpoints.save(10, SmallFiles(), STATE)
    good = checkpoints.latest_good()
    assert good is not None and good.path == path == tmp_path / "checkpoints" / "step_000010"
    assert (good.step, good.state, good.passed_over) == (10, STATE, ())
    assert latest_good(tmp_path / "nowhere") is None


def test_a_checkpoint_with_a_missing_file_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    """F02"""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (20, 30):
        checkpoints.save(step, SmallFiles(), STATE)
    (tmp_path / "step_000030" / "learner.pt").unlink()
    good = checkpoints.latest_good()
    assert good is not None and good.step == 20
    assert good.passed_over == ("step_000030: learner.pt is missing",)


def test_each_missing_cut_or_changed_file_makes_a_checkpoint_incomplete(tmp_path: Path) -> None:
    """F08"""
    Checkpoints(tmp_path, keep=3).save(20, SmallFiles(), STATE)
    path = Checkpoints(tmp_path, keep=3).save(30, SmallFiles(), STATE)
    files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    assert len(files) == 4
    for file in files:
        for damage in ("delete", "cut", "change"):
            content = (path / file).read_bytes()
            if damage == "delete":
                (path / file).unlink()
            else:
                (path / file).write_bytes(content[:-3] if damage == "cut" else b"?" + content[1:])
            good = latest_good(tmp_path)
            assert good is not None and good.step == 20, (file, damage)
            assert "step_000030: " in good.passed_over[0] and file.name in good.passed_over[0]
            (path / file).write_bytes(content)
    assert find_problem(path) is None


def test_a_manifest_of_another_schema_is_passed_over(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=1).save(1, SmallFiles(), STATE)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema": 99}))
    assert find_problem(path) == "manifest.json is not readable (it has schema 99, this version reads 1)"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "[]",
        "3",
        "null",
        '{"schema": 1}',
        '{"schema": 1, "files": ["loop.json"]}',
        '{"schema": 1, "files": 3}',
        '{"schema": 1, "files": {"loop.json": 5}}',
        '{"schema": 1, "files": {"loop.json": {}}}',
    ],
)
def test_a_manifest_that_is_a_folder_or_of_another_shape_makes_a_checkpoint_incomplete(
    tmp_path: Path, text: str | None
) -> None:
    """F02, F08"""
    Checkpoints(tmp_path, keep=3).save(1, SmallFiles(), STATE)
    manifest = Checkpoints(tmp_path, keep=3).save(2, SmallFiles(), STATE) / "manifest.json"
    manifest.unlink()
    if text is None:
        manifest.mkdir()
    else:
        manifest.write_text(text)
    good = latest_good(tmp_path)
    assert good is not None and good.step == 1 and "manifest.json is not readable" in good.passed_over[0]


def test_a_run_resumed_from_before_broken_checkpoints_keeps_its_new_ones(tmp_path: Path) -> None:
    """F03, F08: broken newer folders neither take a place among those kept nor are taken for the newest."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20):
        checkpoints.save(step, SmallFiles(), STATE)
    shutil.copytree(tmp_path / "step_000020", tmp_path / "step_000030")
    for step in (20, 30):
        (tmp_path / f"step_0000{step}" / "learner.pt").write_text("")
    for step in (12, 14, 16):
        path = Checkpoints(tmp_path, keep=2).save(step, SmallFiles(), STATE)
        good = latest_good(tmp_path)
        assert good is not None and (good.step, good.path, good.passed_over) == (step, path, ())
        if step == 12:
            assert names(tmp_path) == ["step_000010", "step_000012", "superseded"]
    assert names(tmp_path) == ["step_000014", "step_000016", "superseded"]
    assert names(tmp_path / "superseded") == ["step_000020-1", "step_000030-1"]


def test_the_newest_by_number_are_kept(tmp_path: Path) -> None:
    """F03: as text, 900 is greater than 1100."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (900, 1000, 1100, 999_999, 1_000_000):
        checkpoints.save(step, SmallFiles(), STATE)
        if step == 1100:
            assert names(tmp_path) == ["step_001000", "step_001100"]
    assert names(tmp_path) == ["step_1000000", "step_999999"]
    good = checkpoints.latest_good()
    assert good is not None and good.step == 1_000_000


def test_older_checkpoints_go_only_after_the_new_one_is_good(tmp_path: Path) -> None:
    """F03"""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, SmallFiles(), STATE)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, SmallFiles(error=KeyboardInterrupt()), STATE)
    assert names(tmp_path) == ["step_000001"]
    checkpoints.save(2, SmallFiles(), STATE)
    assert names(tmp_path) == ["step_000002"]


def test_a_full_disk_leaves_the_older_checkpoint_and_says_what_to_do(tmp_path: Path) -> None:
    """F09"""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, SmallFiles(), STATE)
    full = SmallFiles(error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be written .*No space left.* step 1 is kept; make room"
    ):
        checkpoints.save(2, full, STATE)
    assert names(tmp_path) == ["step_000001"]
    good = checkpoints.latest_good()
    assert good is not None and good.step == 1


def test_too_little_free_space_is_met_before_anything_is_written(tmp_path: Path) -> None:
    """F09"""
    free = shutil.disk_usage(tmp_path).free
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.check_free_space(SmallFiles())
    for attempt in (checkpoints.check_free_space, lambda learner: checkpoints.save(1, learner, STATE)):
        with pytest.raises(
            CheckpointError, match=r"MiB free, and a checkpoint takes about .* choose another run folder"
        ):
            attempt(SmallFiles(num_bytes=2 * free))
    assert names(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, SmallFiles("a"), STATE)
    path = checkpoints.save(3, SmallFiles("b"), STATE)
    assert (path / "learner.pt").read_text() == "b" and names(tmp_path) == ["step_000003"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    """F01"""
    path = Checkpoints(tmp_path, keep=2).save(3, SmallFiles("old"), STATE)
    shutil.copytree(path, tmp_path / ".tmp-replaced-step_000003")
    shutil.rmtree(path)
    (tmp_path / ".tmp-step_000004-77").mkdir()
    (tmp_path / ".tmp-step_000004-77" / "learner.pt").write_text("half")
    good = Checkpoints(tmp_path, keep=2).latest_good()
    assert good is not None and good.step == 3 and names(tmp_path) == ["step_000003"]


@pytest.mark.parametrize("algorithm", [{}, {"kl_coef": 0.1, "minibatches_per_step": 2}])
def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    batches = [mixed_samples(seed=seed) for seed in range(5)]
    unbroken = learner_of(**algorithm)
    for batch in batches[:3]:
        unbroken.train_on(batch)
    Checkpoints(tmp_path, keep=1).save(3, unbroken, STATE)
    draws = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    expected = [unbroken.train_on(batch) for batch in batches[3:]]

    resumed = learner_of(seed=8, **algorithm)  # other weights and another reference: both must come from the checkpoint
    good = Checkpoints(tmp_path, keep=1).latest_good()
    assert good is not None
    resumed.load(good.path)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == draws
    assert [resumed.train_on(batch) for batch in batches[3:]] == expected
    pairs = zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_never_becomes_a_checkpoint(tmp_path: Path, value: float) -> None:
    learner = learner_of()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, learner, STATE)
    with torch.no_grad():
        learner.model.model.norm.weight[0] = value
    with pytest.raises(
        CheckpointError, match=r"model diverged: 1 of .*model\.norm\.weight.*lower algorithm\.learning_rate"
    ):
        checkpoints.save(2, learner, STATE)
    good = checkpoints.latest_good()
    assert good is not None and good.step == 1 and names(tmp_path) == ["step_000001"]


def test_a_resumed_learners_weights_lie_aligned_in_memory_as_an_unbroken_ones(tmp_path: Path) -> None:
    """Kernels may add in another order at other addresses, which a bit-exact resume must not meet."""
    learner = learner_of(kl_coef=0.1)
    learner.train_on(mixed_samples())
    path = Checkpoints(tmp_path, keep=1).save(1, learner, STATE)
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "model")
    for tensor in model.parameters():  # one float off, as a file may place it
        shifted = torch.empty(tensor.numel() + 1)[1:].view_as(tensor)
        tensor.data = shifted.copy_(tensor.data)
    assert any(tensor.data_ptr() % 64 for tensor in model.parameters())
    algorithm = AlgorithmConfig(kl_coef=0.1)
    resumed = Learner(model, algorithm, TrainerConfig(), temperature=1.0)
    resumed.load(path)
    assert resumed.reference is not None
    moments = [value for state in resumed.optimizer.state.values() for value in state.values() if value.dim()]
    tensors = [*resumed.model.parameters(), *resumed.reference.parameters(), *moments]
    assert moments and all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_the_model_folder_of_a_checkpoint_loads_as_any_hugging_face_model(tmp_path: Path) -> None:
    learner = learner_of()
    learner.train_on(mixed_samples())
    path = Checkpoints(tmp_path, keep=1, tokenizer=tiny_tokenizer()).save(1, learner, STATE)
    good = latest_good(tmp_path)
    assert good is not None and good.model_path == path / "model"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(good.model_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), learner.model.parameters(), strict=True))
    assert transformers.AutoTokenizer.from_pretrained(good.model_path).encode("a b") == [0, 1]
    assert 0 < learner.checkpoint_bytes() < 2 * sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
