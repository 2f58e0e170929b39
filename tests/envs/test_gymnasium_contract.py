"""Shipped environments under Gymnasium's own checks, alone and in a vector."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from small_envs import Desk, call, say

from quintain.envs import ToolEnv
from quintain.envs.calculator import CalculatorEnv
from quintain.envs.shell import ShellEnv
from quintain.sandbox import SandboxPool


@pytest.mark.parametrize("cls", [CalculatorEnv, ShellEnv])
def test_check_env_passes_with_the_pool_of_a_run(cls: type[ToolEnv], pool: SandboxPool) -> None:
    """J01"""
    env = cls(pool=pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("name", ["quintain/Calculator-v0", "quintain/Shell-v0"])
def test_check_env_passes_when_made_by_gymnasium(name: str) -> None:
    """J01: the environment opens a pool of its own where it needs a box."""
    env = gymnasium.make(name, sandbox={"type": "local"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*isolat")
        check_env(env.unwrapped)
    env.close()


def test_an_own_local_pool_says_that_it_isolates_nothing() -> None:
    env = ShellEnv(sandbox={"type": "local"})
    with pytest.warns(UserWarning, match="isolat"):
        env.reset(seed=0)
    env.close()


def test_in_a_vector_without_autoreset_every_recorded_step_was_really_taken() -> None:
    """J03"""
    vector = SyncVectorEnv([Desk, Desk], autoreset_mode=AutoresetMode.DISABLED)
    vector.reset(seed=[1, 2])
    _, _, terminated, _, _ = vector.step((call(("today", "{}")), say("x")))
    assert terminated.tolist() == [False, True]
    turns = [env.unwrapped.num_turns for env in vector.envs]  # type: ignore[attr-defined]
    assert turns == [1, 1] and vector.envs[1].unwrapped.answer == "x"  # type: ignore[attr-defined]
    vector.reset(seed=[1, 2], options={"reset_mask": np.array([False, True])})
    observation, _, terminated, _, _ = vector.step((say("x"), call(("today", "{}"))))
    assert terminated.tolist() == [True, False] and observation[1][0].content == "2025-06-15"
