"""`quintain sandbox …`: what people read and what programs read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import docker
import pytest

from quintain.sandbox.docker.owner import POOL, labels_of_this_process

MAIN = "from quintain.recipes.cli import main; main()"


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "sandbox", *arguments], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.docker
def test_audit_prints_a_row_for_each_check(engine_url: str):
    report = json.loads(run("audit", "--json").stdout)
    assert report["ok"] and report["digest"].startswith("sha256:") and report["network"] == "none"
    assert {"user", "capabilities", "seccomp", "uid map", "mounts", "routes", "metadata address", "memory limit"} <= {
        check["name"] for check in report["checks"] if check["ok"]
    }
    table = run("audit", "recipes/shell.yaml", "sandbox.network=internal").stdout
    assert "metadata address" in table and "network internal" in table.replace("\n", " ")


@pytest.mark.docker
def test_bench_measures_the_quick_way_beside_the_plain_one(engine_url: str):
    report = json.loads(run("bench", "--sizes", "1,2", "--json").stdout)
    for key in ("channel_p50_s", "docker_exec_p50_s", "pool_hit_p50_s", "cold_start_p50_s"):
        assert 0 < report[key] < 10
    assert report["channel_p50_s"] * 5 < report["docker_exec_p50_s"]
    assert report["pool_hit_p50_s"] * 5 < report["cold_start_p50_s"]
    assert [row["num_boxes"] for row in report["boxes"]] == [1, 2]
    assert all(row["execs_per_s"] > 1 and row["box_memory_bytes"] > 2**20 for row in report["boxes"])


@pytest.mark.docker
def test_build_names_the_image_and_builds_it_once(engine_url: str, tmp_path: Path):
    first, second = (json.loads(run("build", "--json").stdout) for _ in range(2))
    assert first["image"] == second["image"] and second["cached"]
    assert first["image"] in run("build").stdout
    assert "no such file" in run("build", str(tmp_path / "none"), code=2).stderr
    assert "NAME=VALUE" in run("build", str(tmp_path), "--build-arg", "x", code=2).stderr


@pytest.mark.docker
def test_list_and_cleanup_tell_the_dead_from_the_living(engine_url: str, engine: docker.APIClient):
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = {**labels_of_this_process("cli"), POOL: "cli"}
    engine.create_volume("quintain-test-cli-dead", labels={**mine, "quintain.pid": str(gone.pid)})
    engine.create_volume("quintain-test-cli-mine", labels=mine)
    try:
        owners = {thing["name"]: thing["owner"] for thing in json.loads(run("list", "--json").stdout)}
        assert owners["quintain-test-cli-dead"] == "dead" and owners["quintain-test-cli-mine"] == "alive"
        removed = json.loads(run("cleanup", "--json").stdout)
        assert removed["ok"] and "quintain-test-cli-dead" in {thing["name"] for thing in removed["removed"]}
        names = {thing["name"] for thing in json.loads(run("list", "--json").stdout)}
        assert "quintain-test-cli-mine" in names and "quintain-test-cli-dead" not in names
        assert "removed: " in run("cleanup").stdout  # how many is not ours to say: other runs may die at any time
    finally:
        engine.remove_volume("quintain-test-cli-mine")


def test_bad_settings_are_named_and_nothing_is_started():
    assert "did you mean sandbox.network" in run("audit", "sandbox.netwrok=none", code=2).stderr
    assert "isolates nothing" in run("audit", "sandbox.type=local", code=2).stderr
    assert "1,16,64,128" in run("bench", "--sizes", "0", code=2).stderr
    message = run("list", "sandbox.hosts=[{url: unix:///nowhere.sock}]", code=2).stderr
    assert "no Docker engine answers at unix:///nowhere.sock" in message


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom quintain.recipes.cli import cli\n"
        "cli.main(['sandbox', '--help'], standalone_mode=False)\n"
        "sys.exit(bool({'docker', 'torch', 'asyncio', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
