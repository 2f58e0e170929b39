"""The session's own count of tests that met a Docker engine, SGLang and a browser, and what CI makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ALL = """
import pytest

@pytest.mark.docker
def test_engine(): pass

@pytest.mark.sglang
def test_server(): pass

@pytest.mark.browser
def test_browser(): pass
"""
ONE_SKIPPED = (
    ALL
    + """
@pytest.mark.docker
@pytest.mark.skip(reason="no engine")
def test_another(): pass
"""
)
NO_BROWSER = ALL.replace("@pytest.mark.browser", "")
NO_SGLANG = ALL.replace("@pytest.mark.sglang", "")


@pytest.mark.parametrize(
    ("content", "ci", "code", "told"),
    [
        (
            ALL,
            "true",
            0,
            "1 tests ran against a Docker engine (0 skipped), 1 tests ran with SGLang (0 skipped), 1 tests ran in a",
        ),
        (ONE_SKIPPED, "true", 1, "CI: 1 tests that run against a Docker engine were skipped: the session fails"),
        (NO_BROWSER, "true", 1, "CI: no test ran in a browser: the session fails"),
        (NO_SGLANG, "true", 1, "CI: no test ran with SGLang: the session fails"),
        (NO_BROWSER, "", 0, "0 tests ran in a browser"),
        (ALL + "\ndef test_red():\n    assert 0\n", "true", 1, "1 failed"),
    ],
)
def test_under_ci_the_session_fails_where_a_real_part_is_missing(
    tmp_path: Path, content: str, ci: str, code: int, told: str
):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  docker: x\n  sglang: x\n  browser: x\n")
    (tmp_path / "test_it.py").write_text(content)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert told in result.stdout
