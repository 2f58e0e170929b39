"""Two processes never train in one run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintain.recipes.loader import RecipeError
from quintain.recipes.run_lock import locked, make_run_folder

HOLDER = """
import sys, time
from pathlib import Path
from quintain.recipes.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_trains_in_is_refused_and_free_after_its_death(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(RecipeError, match=f"process {process.pid} is training in it"), locked(tmp_path):
        pass
    process.kill()
    process.communicate()
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = [make_run_folder("small", "20260102-030405").name for _ in range(3)]
    assert names == ["small-20260102-030405", "small-20260102-030405-2", "small-20260102-030405-3"]
