"""Many calls to the engine at once: the client's connections are as many as its callers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from quintain.sandbox import SandboxPool


@pytest.mark.docker
def test_thirty_engine_execs_at_once_are_all_right_and_the_log_stays_quiet(
    make_pool: Callable[..., SandboxPool], caplog: pytest.LogCaptureFixture
):
    """E07: another user's commands go through the engine's own exec, the path that needs a connection each."""
    pool = make_pool("docker", pool_size=2)
    with caplog.at_level(logging.WARNING), pool.lease() as one, pool.lease() as two, ThreadPoolExecutor(30) as threads:
        results = threads.map(
            lambda n: (one, two)[n % 2].exec(["echo", str(n)], user="65534", timeout_s=60).stdout, range(30)
        )
        assert list(results) == [f"{n}\n" for n in range(30)]
    assert "pool is full" not in caplog.text
