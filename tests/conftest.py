"""What every test runs under, and the count of tests that really met a Docker engine, SGLang and a browser.

Under `CI=true` a session in which one of the counts is zero, or in which such a test was skipped, fails: a suite that
quietly leaves its real parts out proves nothing.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from quintain.agents.sglang.server import ManagedServer

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ENGINE_SCRIPT = Path(__file__).parent / "testbed" / "engine.sh"
ROOT = Path(__file__).parents[1]
REAL_PARTS = {"docker": "against a Docker engine", "sglang": "with SGLang", "browser": "in a browser"}
_RAN = pytest.StashKey[Counter]()
_SKIPPED = pytest.StashKey[Counter]()


@pytest.fixture(scope="session")
def engine_url() -> str:
    """DOCKER_HOST of a real engine, set for the whole session. A test that finds none fails; it is never skipped."""
    started = subprocess.run([ENGINE_SCRIPT, "start"], capture_output=True, text=True, timeout=280)
    if started.returncode != 0:
        pytest.fail(f"this test needs a Docker engine: start one, or set DOCKER_HOST\n{started.stderr}")
    line = subprocess.run([ENGINE_SCRIPT, "env"], capture_output=True, text=True, check=True).stdout
    os.environ["DOCKER_HOST"] = line.strip().partition("=")[2]
    return os.environ["DOCKER_HOST"]


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter of the SGLang environment. A test that finds none fails; it is never skipped."""
    python = Path(os.environ.get("QUINTAIN_SGLANG_PYTHON") or ROOT / ".sglang" / "bin" / "python")
    if not python.is_file():
        pytest.fail(
            f"this test needs SGLang, and there is no {python}: run `make sglang`, or set QUINTAIN_SGLANG_PYTHON"
        )
    return python


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator recipe's model and tokenizer as they start: fp32, random weights, a Hugging Face folder."""
    from quintain.envs import make_env
    from quintain.recipes.assemble import starting_model
    from quintain.recipes.loader import load_recipe
    from quintain.trainer.model_files import save_model
    from quintain.trainer.progress import PlainProgress

    config = load_recipe(str(ROOT / "recipes" / "calculator.yaml")).config
    env = make_env(config.environment, split="train", pool=None)
    model, tokenizer = starting_model(config, env, progress=PlainProgress(io.StringIO()), folder=None)
    folder = tmp_path_factory.mktemp("tiny_model")
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_server(
    sglang_python: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedServer]:
    """One real server for all tests, with the weights of `tiny_model_dir` as version 0.

    A test that changes its weights takes `lent_sglang_url`.
    """
    from quintain.agents.config import LaunchConfig
    from quintain.agents.sglang.server import ManagedServer

    launch = LaunchConfig(python=str(sglang_python), device="cpu", dtype="float32")
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    server = ManagedServer(launch, model_dir=tiny_model_dir, log=log)
    asyncio.run(server.start())
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def lent_sglang_url(sglang_server: ManagedServer, tiny_model_dir: Path, tmp_path: Path) -> Iterator[str]:
    """The shared server, for a test that changes its weights: it gets its own back, as version 0."""
    import shutil

    from quintain.agents.sglang.policy import SGLangPolicy
    from quintain.trainer.weights import DiskDelivery

    yield sglang_server.url
    urls = [sglang_server.url]
    DiskDelivery(
        tmp_path / "own_weights",
        export=lambda folder: shutil.copytree(tiny_model_dir, folder, dirs_exist_ok=True),
        urls=urls,
        policy=SGLangPolicy(urls, vocab_size=1),
    ).deliver(0)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RAN] = Counter()
    config.stash[_SKIPPED] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for marker in REAL_PARTS:
        if item.get_closest_marker(marker) is None:
            continue
        if report.skipped:
            item.config.stash[_SKIPPED][marker] += 1
        elif call.when == "call":
            item.config.stash[_RAN][marker] += 1
    return report


def missing_parts(config: pytest.Config) -> list[str]:
    """What must not be missing under CI."""
    ran, skipped = config.stash[_RAN], config.stash[_SKIPPED]
    found = []
    for marker, where in REAL_PARTS.items():
        if not ran[marker]:
            found.append(f"no test ran {where}")
        if skipped[marker]:
            found.append(f"{skipped[marker]} tests that run {where} were skipped")
    return found


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    in_ci = os.environ.get("CI") == "true" and not session.config.option.collectonly
    if in_ci and exitstatus == pytest.ExitCode.OK and missing_parts(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran, skipped = config.stash[_RAN], config.stash[_SKIPPED]
    parts = [f"{ran[m]} tests ran {where} ({skipped[m]} skipped)" for m, where in REAL_PARTS.items()]
    terminalreporter.write_line("real parts: " + ", ".join(parts))
    if os.environ.get("CI") == "true":
        for problem in missing_parts(config):
            terminalreporter.write_line(f"CI: {problem}: the session fails", red=True)
