"""Warm-started models on disk, named by the content that made them.

    CACHE/<key>/  config.json, model.safetensors, tokenizer files (a Hugging Face folder, usable as `model.path`)
                  warm_start.json: the report and the checksum of every other file, written last

Invariants: an entry appears whole (written beside, then renamed) or not at all; one whose files do not fit its
checksums counts as absent and is replaced. Two processes that build the same entry end with one of the two, whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quintain.envs import Message, ToolSpec
from quintain.trainer.config import WarmStartConfig
from quintain.trainer.model_files import load_weights, save_model

FORMAT_VERSION = 1
"""Raised when the warm start itself changes: entries made by older code are then no longer found."""
REPORT_FILE = "warm_start.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """What a warm start did."""

    num_steps: int
    """Optimizer steps of the clean stage."""
    greedy_success: float
    """On the check tasks, after the clean stage, 0 to 1."""
    sampled_success: float | None
    """On the check tasks, after the mixed stage; None where there was none."""
    seconds: float
    """Wall time of the build, also where it now came from the cache."""
    path: Path
    """The cache entry, a Hugging Face folder; absent where the cache could not be written."""
    from_cache: bool


def cache_key(
    model: Any,
    tokenizer: Any,
    tools: Sequence[ToolSpec],
    conversations: Sequence[Sequence[Sequence[Message]]],
    config: WarmStartConfig,
    seed: int,
) -> str:
    """Digest of all that the result follows from: weights, tokenizer, template, data, settings, seed, threads."""
    digest = hashlib.blake2b(digest_size=10)
    settings = config.model_dump(exclude={"cache_dir", "enabled"})
    # Sums are ordered differently for each number of threads, so the weights differ in the last bits.
    facts = [FORMAT_VERSION, seed, torch.get_num_threads(), settings, model.config.to_dict()]
    facts += [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, [tool.to_openai() for tool in tools]]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for part in conversations:
        for conversation in part:
            digest.update(repr(conversation).encode())
    return digest.hexdigest()


class WarmStartCache:
    """The entries of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, key: str) -> Path:
        return self._folder / key

    def load(self, key: str, model: Any) -> WarmStartReport | None:
        """Put the entry's weights into `model`; None, with the model untouched, where there is no whole entry."""
        path = self.path_of(key)
        try:
            record = json.loads((path / REPORT_FILE).read_text(encoding="utf-8"))
            whole = all(_checksum(path / name) == value for name, value in record["files"].items())
            report = WarmStartReport(**record["report"], path=path, from_cache=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if not whole:
            return None
        load_weights(model, path)
        return report

    def store(self, key: str, model: Any, tokenizer: Any, report: WarmStartReport) -> None:
        """Write the entry, in place of a broken one if there is one.

        Raises OSError or SafetensorError where the folder cannot be written; nothing half-written is then left.
        """
        beside = self._folder / f".{key}-{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            save_model(model, beside)
            tokenizer.save_pretrained(beside)
            fields = dataclasses.asdict(report)
            del fields["path"], fields["from_cache"]
            files = {str(f.relative_to(beside)): _checksum(f) for f in sorted(beside.rglob("*")) if f.is_file()}
            record = {"format": FORMAT_VERSION, "report": fields, "files": files}
            (beside / REPORT_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
            shutil.rmtree(self.path_of(key), ignore_errors=True)
            try:
                beside.rename(self.path_of(key))
            except OSError:
                if not (self.path_of(key) / REPORT_FILE).exists():  # else another process was quicker: the same content
                    raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _checksum(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
