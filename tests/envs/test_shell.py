"""The shell: jobs, the box each trajectory has, the judge that reads files, and demonstrations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from small_envs import call, say

from quintain.envs import Task
from quintain.envs.calculator import CalculatorEnv
from quintain.envs.errors import EnvironmentArgumentsError
from quintain.envs.file_jobs import KINDS, generate_jobs, make_job
from quintain.envs.shell import ShellEnv
from quintain.sandbox import SandboxPool


@pytest.fixture
def env(pool: SandboxPool) -> Iterator[ShellEnv]:
    made = ShellEnv(pool=pool)
    yield made
    made.close()


def start(env: ShellEnv, kind: str = "sort") -> None:
    job = make_job(kind, "notes.txt", "list.txt", ["fig", "ash", "bay"])
    data = {"files": job.files, "expected": job.expected, "command": job.command}
    env.reset(options={"task": Task(id=kind, prompt=job.prompt, data=data)})


def run(env: ShellEnv, command: str) -> str:
    return env.step(call(("shell", json.dumps({"command": command}))))[0][0].content


def test_jobs_are_plentiful_reproducible_and_disjoint_between_splits() -> None:
    train, held_out = generate_jobs("train", 4_000, 0), generate_jobs("eval", 500, 0)
    assert (len(train), len(held_out)) == (4_000, 500) and generate_jobs("eval", 500, 0) == held_out
    assert not {job.prompt for job in train} & {job.prompt for job in held_out}
    with pytest.raises(ValueError, match="create"):
        make_job("juggle", "a", "b", ["c"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_command_leaves_the_right_files(env: ShellEnv, kind: str) -> None:
    start(env, kind)
    assert run(env, env.task.data["command"]) == "[exit code 0]"
    _, value, _, _, info = env.step(say("Done."))
    assert value == 1.0 and info["metrics"] == {"files_right_frac": 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_saying_done_counts_for_nothing(env: ShellEnv, kind: str) -> None:
    start(env, kind)
    assert env.step(say("Done. I wrote the file."))[1] == 0.0


@pytest.mark.parametrize(
    "command",
    [
        "cp notes.txt list.txt",
        "sort notes.txt",
        "mkdir list.txt",
        "sort notes.txt > list.txt; rm list.txt",
        "head -c 3000000 /dev/zero > list.txt",
        "printf '\\377\\376' > list.txt",
        "mkfifo list.txt",
        "ln -s list.txt list.txt",
        "ln -s /dev/zero list.txt",
        "ln -s $(printf 'a%.0s' $(seq 3000)) list.txt",
    ],
)
def test_other_files_are_wrong_and_never_an_error(env: ShellEnv, command: str) -> None:
    start(env)
    run(env, command)
    assert env.step(say("Done."))[1] == 0.0


def test_a_renamed_file_must_be_gone(env: ShellEnv) -> None:
    start(env, "rename")
    run(env, "cp notes.txt list.txt")
    _, value, _, _, info = env.step(say("Done."))
    assert value == 0.0 and info["metrics"] == {"files_right_frac": 0.5}


@pytest.mark.parametrize("leave", ["mkdir notes.txt", "mkfifo notes.txt", "ln -s notes.txt notes.txt"])
def test_what_cannot_be_read_is_not_gone(env: ShellEnv, leave: str) -> None:
    start(env, "rename")
    run(env, f"cp notes.txt list.txt; rm notes.txt; {leave}")
    assert env.step(say("Done."))[1] == 0.0


@pytest.mark.parametrize("kwargs", [{"num_eval": 400_000}, {"num_train": 0}, {"num_eval": "5"}, {"task_seed": -1}])
def test_more_tasks_than_there_are_is_refused_at_once(kwargs: dict[str, Any]) -> None:
    for cls in (ShellEnv, CalculatorEnv):
        with pytest.raises(EnvironmentArgumentsError, match=next(iter(kwargs))):
            cls(**kwargs)


def test_output_errors_and_exit_codes_are_shown(env: ShellEnv) -> None:
    start(env)
    assert run(env, "cat notes.txt") == "fig\nash\nbay"
    assert run(env, "echo out; echo err >&2; exit 3") == "out\nerr\n[exit code 3]"
    assert "[exit code 127]" in run(env, "no_such_program")
    assert "[exit code" in run(env, "if")


def test_files_stay_from_call_to_call_and_go_with_the_trajectory(env: ShellEnv) -> None:
    """J06"""
    start(env)
    run(env, "echo kept > extra.txt")
    assert run(env, "cat extra.txt") == "kept"
    start(env)
    assert run(env, "ls") == "notes.txt"


def test_demonstrations_say_what_the_real_tool_answers(env: ShellEnv) -> None:
    rng = np.random.default_rng(0)
    for index in range(24):
        task, clean = env.task_at(index), index < 16
        messages = env.demonstrate(task, clean=clean, rng=rng)
        env.reset(options={"task": task})
        seen, info = [], {}
        for message in messages:
            if message.role == "assistant":
                observation, _, _, _, info = env.step(message)
                seen += observation
        assert seen == [message for message in messages if message.role == "tool"]
        assert info["success"] is clean
