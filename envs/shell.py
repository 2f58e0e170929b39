"""`quintain/Shell-v0`: small jobs with files, done by shell commands, judged by the files that are left.

Each trajectory has a box of its own: set-up files are written at reset, and the reward reads files from the box. What
the model says does not count, only what it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from quintain.envs.file_jobs import generate_jobs
from quintain.envs.message import Message, Task
from quintain.envs.rewards import reward
from quintain.envs.task_counts import check_task_counts
from quintain.envs.tool_env import ToolEnv
from quintain.envs.tools import tool
from quintain.sandbox import BlockingSandbox

_UNREADABLE = object()
"""Something stands there that is no readable text file: it equals no text, and it is not gone either."""


class ShellEnv(ToolEnv):
    """Jobs with files, to be done with a shell."""

    max_turns = 6
    needs_isolation = True
    sandbox_scope = "trajectory"

    def __init__(self, *, num_train: int = 4_000, num_eval: int = 500, task_seed: int = 0, **kwargs: Any) -> None:
        """How many tasks each split has, and the seed they are made from. Raises EnvironmentArgumentsError."""
        check_task_counts(num_train=num_train, num_eval=num_eval, task_seed=task_seed)
        super().__init__(**kwargs)
        self._sizes = {"train": num_train, "eval": num_eval}
        self._task_seed = task_seed

    def rows(self, split: Literal["train", "eval"]) -> Iterable[Mapping[str, Any]]:
        """Columns `files` (set up), `expected` (left at the end; None = gone) and `command` (one that does it)."""
        jobs = generate_jobs(split, self._sizes[split], self._task_seed)
        return [{"prompt": j.prompt, "files": j.files, "expected": j.expected, "command": j.command} for j in jobs]

    def prepare(self) -> None:
        for path, text in self.task.data["files"].items():
            self.box.write_file(path, text.encode())

    @tool
    def shell(self, command: str, sandbox: BlockingSandbox) -> str:
        """Run a shell command in the work folder.

        Args:
            command: The command line.
        """
        result = sandbox.exec(command)
        parts = [text.rstrip("\n") for text in (result.stdout, result.stderr) if text.strip()]
        if result.timed_out:
            parts.append("[stopped: it took too long]")
        elif result.exit_code or not parts:
            parts.append(f"[exit code {result.exit_code}]")
        return "\n".join(parts)

    @reward
    def files_right(self) -> float:
        """1 where every expected file holds what it should (blank ends of text apart) and the others are gone."""
        return float(all(self._read(path) == text for path, text in self.task.data["expected"].items()))

    @reward(weight=0.0)
    def files_right_frac(self) -> float:
        """Share of the expected files that are right, in [0, 1]."""
        expected = self.task.data["expected"]
        return sum(self._read(path) == text for path, text in expected.items()) / len(expected)

    def demonstrate(self, task: Task, *, clean: bool, rng: np.random.Generator) -> tuple[Message, ...]:
        """Clean: the command, then a word. Otherwise a bad habit: only looking, or claiming to be done."""
        if clean:
            return self.dialogue(("shell", {"command": task.data["command"]}, "[exit code 0]"), "Done.")
        if rng.random() < 0.5:
            return self.dialogue("Done.")
        return self.dialogue(("shell", {"command": "true"}, "[exit code 0]"), "Done.")

    def _read(self, path: str) -> object:
        """The file's text without blank ends; None only where nothing is there; `_UNREADABLE` for a folder, a pipe, a
        loop of links, a file too large: whatever the model left must get a reward, never an error."""
        try:
            return self.box.read_file(path).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return _UNREADABLE
