"""Setting a run up says truly how far it is."""

from __future__ import annotations

import io
from typing import Any

import pytest

from quintain.envs import ToolEnv, reward
from quintain.recipes.assemble import open_sandboxes, start_boxes
from quintain.recipes.config import RecipeConfig
from quintain.sandbox import open_pool
from quintain.sandbox.config import SandboxConfig
from quintain.trainer.progress import PlainProgress


def test_boxes_that_ran_already_are_counted_too() -> None:
    pool = open_pool(SandboxConfig(type="local", pool_size=3), needs_isolation=False, owner="test")
    stream = io.StringIO()
    try:
        pool.warm(1)
        start_boxes(pool, PlainProgress(stream))
    finally:
        pool.close()
    assert stream.getvalue().startswith("sandboxes (local) 3/3 in ")


class Boxed(ToolEnv):
    """Needs a box."""

    needs_isolation = False
    sandbox_scope = "call"

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": "p"}]

    @reward
    def right(self) -> float:
        return 1.0


@pytest.mark.parametrize(("threads", "warned"), [(None, False), (2, True), (3, False)])
def test_fewer_threads_than_boxes_are_told_of(threads: int | None, warned: bool) -> None:
    stream = io.StringIO()
    config = RecipeConfig.model_validate(
        {
            "name": "boxes",
            "environment": {"id": f"{__file__}:Boxed"},
            "sandbox": {"type": "local", "pool_size": 3},
            "rollout": {"env_threads": threads},
        }
    )
    pool = open_sandboxes(config, "test", PlainProgress(stream))
    assert pool is not None
    pool.close()
    assert ("rollout.env_threads = 2 uses at most 2 of the 3 boxes" in stream.getvalue()) == warned
