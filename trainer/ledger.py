"""The batch ledger: what must hold before an optimizer step, checked, and batches on disk.

    samples --check--> trained on
                 └── a rule is broken: RUN/refused/step_000012.jsonl, and BatchRefusedError names sample, token, rule

A file is JSON lines: a header (settings, version, the broken rule), then one sample a line. `read_batch` gives back
equal samples, so that `quintain replay-batch` computes the same loss and gradient elsewhere.

Invariants: a refused batch has touched no weight; the file is written before the error is raised; "no log-prob" is NaN
in memory and null on disk.

Does not do: repairing or leaving out samples. A broken rule is an error in what made the batch, not bad luck.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quintain.trainer.sample import Sample

FORMAT_VERSION = 1


class BatchRefusedError(ValueError):
    """A batch breaks a rule; the message names sample, token and rule, and where the batch was written."""


class BatchFileError(ValueError):
    """A file holds no batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The first broken rule."""

    rule: str
    sample: str
    """`draw/member`, or empty where the rule is about the batch."""
    token: int | None
    found: str

    def __str__(self) -> str:
        where = f"sample {self.sample}: " if self.sample else ""
        return f"{where}{'' if self.token is None else f'token {self.token}: '}{self.rule}: {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """What a file holds."""

    samples: list[Sample]
    policy_version: int
    settings: dict[str, Any]
    """`algorithm`, `trainer` (dumps of their config classes) and `temperature`."""
    violation: str | None


def first_violation(
    samples: Sequence[Sample],
    *,
    policy_version: int,
    group_size: int,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
) -> Violation | None:
    """The first rule that the samples break, None where all hold."""
    members: dict[int, set[int]] = {}
    for sample in samples:
        found = _sample_violation(sample, policy_version, vocab_size, max_tokens)
        if found is not None:
            return found
        members.setdefault(sample.draw, set()).add(sample.member)
    for draw, group in members.items():
        if len(group) > group_size:
            return _of_batch("a group has at most group_size members", f"draw {draw} has {len(group)} > {group_size}")
    same = Counter((s.draw, s.member, s.token_ids) for s in samples)
    (key, count), *_ = same.most_common(1) or [((0, 0, ()), 0)]
    if count > 1:
        return _of_batch("every row is there once", f"a row of {key[0]}/{key[1]} is there {count} times")
    if samples and not any(any(sample.loss_mask) for sample in samples):
        return _of_batch("some token is trained", f"none of {len(samples)} samples has one")
    return None


def _of_batch(rule: str, found: str) -> Violation:
    return Violation(rule=rule, sample="", token=None, found=found)


def _sample_violation(
    sample: Sample, policy_version: int, vocab_size: int | None, max_tokens: int | None
) -> Violation | None:
    name = f"{sample.draw}/{sample.member}"
    length = len(sample.token_ids)
    if max_tokens is not None and length > max_tokens:
        rule = "a row fits the model's context"
        return Violation(rule=rule, sample=name, token=None, found=f"{length} tokens > {max_tokens}")
    for t, token_id in enumerate(sample.token_ids):
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            rule = "token ids are in the vocabulary"
            return Violation(rule=rule, sample=name, token=t, found=f"id {token_id}, vocabulary of {vocab_size}")
        if not sample.loss_mask[t]:
            continue
        logprob, advantage, version = sample.rollout_logprobs[t], sample.advantages[t], sample.policy_versions[t]
        checks = (
            ("a trained token has a finite sampler log-prob", math.isfinite(logprob), logprob),
            ("a log-prob is at most 0", logprob <= 1e-3, logprob),
            ("a trained token has a finite advantage", math.isfinite(advantage), advantage),
            ("a trained token was sampled by a known version", version >= 0, version),
            (f"no version is above the learner's {policy_version}", version <= policy_version, version),
        )
        for rule, holds, value in checks:
            if not holds:
                return Violation(rule=rule, sample=name, token=t, found=f"it is {value} (token id {token_id})")
    return None


class BatchLedger:
    """Checks every batch of a run and keeps those that are refused; with `keep_all` the good ones, too."""

    def __init__(
        self, run_dir: Path, *, settings: dict[str, Any], group_size: int, vocab_size: int | None, keep_all: bool
    ) -> None:
        self._run_dir, self._settings, self._keep_all = run_dir, settings, keep_all
        self._group_size, self._vocab_size = group_size, vocab_size

    def admit(self, step: int, samples: Sequence[Sample], *, policy_version: int) -> None:
        """Let the batch of `step` through.

        Raises:
            BatchRefusedError: a rule is broken; the batch was written to `RUN/refused`.
        """
        violation = first_violation(
            samples, policy_version=policy_version, group_size=self._group_size, vocab_size=self._vocab_size
        )
        if violation is None and not self._keep_all:
            return
        folder = self._run_dir / ("batches" if violation is None else "refused")
        path = folder / f"step_{step:06d}.jsonl"
        saved = SavedBatch(
            samples=list(samples),
            policy_version=policy_version,
            settings=self._settings,
            violation=None if violation is None else str(violation),
        )
        write_batch(path, saved)
        if violation is not None:
            raise BatchRefusedError(
                f"the batch of step {step} is refused, no weight was changed: {violation}. It is in {path}; look at "
                f"it with: quintain replay-batch {path}"
            )


def write_batch(path: Path, batch: SavedBatch) -> None:
    """Write a batch file, its folder, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = asdict(batch) | {"format": FORMAT_VERSION, "num_samples": len(batch.samples)}
    del header["samples"]
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for sample in batch.samples:
            fields = asdict(sample)
            for name in ("rollout_logprobs", "advantages"):
                fields[name] = [None if math.isnan(value) else value for value in fields[name]]
            file.write(json.dumps(fields) + "\n")


def read_batch(path: Path) -> SavedBatch:
    """What `write_batch` wrote.

    Raises:
        BatchFileError: the file is no batch, is cut off, or is of another format.
    """
    try:
        header, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        if header["format"] != FORMAT_VERSION or header["num_samples"] != len(rows):
            raise ValueError(f"format {header['format']}, {len(rows)} of {header['num_samples']} samples")
        samples = []
        for row in rows:
            for name in ("rollout_logprobs", "advantages"):
                row[name] = [math.nan if value is None else value for value in row[name]]
            arrays: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
            samples.append(Sample(**arrays))
        return SavedBatch(
            samples=samples,
            policy_version=header["policy_version"],
            settings=header["settings"],
            violation=header["violation"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BatchFileError(f"{path} holds no batch that this version can read: {error}") from error
