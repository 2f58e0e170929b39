"""Setting a run up says truly how far it is."""

from __future__ import annotations

import io

from quintain.recipes.assemble import start_boxes
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
