"""Inspect AI's own sandbox self-check passes: an outside judge of what a sandbox must do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from adduser_image import make_image

from quintain.sandbox import open_pool
from quintain.sandbox.config import SandboxConfig

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NUM_CHECKS = 44
ADDUSER_IMAGE = "quintain-test-adduser"


@pytest.fixture(scope="session")
def inspect_python() -> Path:
    """Python of a virtual environment that holds Inspect AI; made at first use."""
    made = subprocess.run([HERE / "make_venv.sh", sys.executable], capture_output=True, text=True, timeout=280)
    assert made.returncode == 0, f"Inspect AI could not be installed:\n{made.stderr[-2000:]}"
    return ROOT / ".cache" / "inspect-venv" / "bin" / "python"


@pytest.fixture(scope="module")
def adduser_image(engine: docker.APIClient) -> Iterator[str]:
    with open_pool(SandboxConfig(type="docker", pool_size=1), needs_isolation=True, owner="tests") as pool:
        base = engine.inspect_container(pool.acquire().id)["Config"]["Image"]
    make_image(engine, base, ADDUSER_IMAGE)
    yield f"{ADDUSER_IMAGE}:1"
    engine.remove_image(f"{ADDUSER_IMAGE}:1", force=True)


def problems(python: Path, settings: dict[str, Any], record: Any) -> dict[str, str]:
    """The checks that failed, each with its reason; how many passed is recorded with the test's report."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / ".typing"), "PYTHONSAFEPATH": "1"}
    run = subprocess.run(
        [python, HERE / "self_check.py", json.dumps(settings)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    checks: dict[str, str | None] = json.loads(run.stdout.splitlines()[-1])
    assert len(checks) == NUM_CHECKS
    failed = {name: problem for name, problem in checks.items() if problem is not None}
    record("self_check", f"{NUM_CHECKS - len(failed)} of {NUM_CHECKS}")
    print(f"Inspect AI's self-check, {settings or 'hardened'}: {NUM_CHECKS - len(failed)} of {NUM_CHECKS} pass")
    return failed


def test_the_hardened_default_passes_all_but_adding_a_user(inspect_python: Path, engine_url: str, record_property):
    assert list(problems(inspect_python, {}, record_property)) in ([], ["test_exec_as_user"])


def test_a_relaxed_box_passes_everything(inspect_python: Path, adduser_image: str, record_property):
    settings = {"profile": "relaxed", "image": adduser_image}
    assert problems(inspect_python, settings, record_property) == {}
