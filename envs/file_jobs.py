"""The jobs of the shell environment: a prompt, files to start from, files that must be left, a command that does it.

Which split a job belongs to is decided by a hash of its prompt, so that no prompt is in both.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

_WORDS = ("ash", "bay", "cod", "dew", "elm", "fig", "gum", "hay", "jam", "kelp", "lime", "moss", "nut", "oak", "pear")
_NAMES = ("notes", "list", "items", "data", "words", "lines", "names", "rows")
_EVAL_IN = 8  # one prompt in this many is held out
KINDS = ("create", "sort", "count", "find", "rename", "join")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job.

    Example: ``Job(prompt="Sort the lines of notes.txt into list.txt.", files={"notes.txt": "fig\\nash\\n"},
    expected={"list.txt": "ash\\nfig"}, command="sort notes.txt > list.txt")``
    """

    prompt: str
    files: Mapping[str, str]
    """Written before the first turn: path in the work folder -> text."""
    expected: Mapping[str, str | None]
    """Read at the end: path -> text without blank ends, None where the file must be gone."""
    command: str
    """Prints nothing and leaves what is expected."""


def generate_jobs(split: Literal["train", "eval"], count: int, seed: int) -> list[Job]:
    """`count` different jobs of one split; equal arguments give equal jobs."""
    found: dict[str, Job] = {}
    for job in _stream(seed):
        key = f"{job.prompt}\n{json.dumps(dict(job.files))}"
        if (zlib.crc32(job.prompt.encode()) % _EVAL_IN == 0) == (split == "eval"):
            found.setdefault(key, job)
        if len(found) == count:
            break
    return list(found.values())


def _stream(seed: int) -> Iterator[Job]:
    rng = np.random.default_rng(seed)
    while True:
        kind = KINDS[int(rng.integers(len(KINDS)))]
        source, target = (f"{_NAMES[int(i)]}.txt" for i in rng.permutation(len(_NAMES))[:2])
        words = [_WORDS[int(i)] for i in rng.permutation(len(_WORDS))[: int(rng.integers(2, 7))]]
        yield make_job(kind, source, target, words)


def make_job(kind: str, source: str, target: str, words: list[str]) -> Job:
    """One job of a kind. Raises ValueError for a kind that is none of `KINDS`."""
    text, word = "".join(f"{w}\n" for w in words), words[0]
    have = {source: text}
    if kind == "create":
        prompt, have, want = f"Write {word} into {target}.", {}, {target: word}
        command = f"echo {word} > {target}"
    elif kind == "sort":
        prompt, want = f"Sort the lines of {source} into {target}.", {target: "\n".join(sorted(words))}
        command = f"sort {source} > {target}"
    elif kind == "count":
        prompt, want = f"Write how many lines {source} has into {target}.", {target: str(len(words))}
        command = f"wc -l < {source} > {target}"
    elif kind == "find":
        hits = [w for w in words if word[0] in w]
        prompt, want = f"Write the lines of {source} with {word[0]} into {target}.", {target: "\n".join(hits)}
        command = f"grep {word[0]} {source} > {target}"
    elif kind == "rename":
        prompt, want = f"Rename {source} to {target}.", {target: text.strip(), source: None}
        command = f"mv {source} {target}"
    elif kind == "join":
        have = {source: text, target: f"{word}\n"}
        prompt, want = f"Append {source} to {target}.", {target: f"{word}\n{text}".strip()}
        command = f"cat {source} >> {target}"
    else:
        raise ValueError(f"job kind {kind!r}: choose from {', '.join(KINDS)}")
    return Job(prompt=prompt, files=have, expected=want, command=command)
