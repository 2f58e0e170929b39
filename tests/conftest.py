"""What every test runs under, and the count of tests that really met a Docker engine and a browser.

Under `CI=true` a session in which either count is zero, or in which such a test was skipped, fails: a suite that
quietly leaves its real parts out proves nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

REAL_PARTS = {"docker": "against a Docker engine", "browser": "in a browser"}
_RAN = pytest.StashKey[Counter]()
_SKIPPED = pytest.StashKey[Counter]()


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
