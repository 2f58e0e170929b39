"""What the tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def warm_start_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all runs: the first makes the warm start, the others take it."""
    return tmp_path_factory.mktemp("warm_start")
