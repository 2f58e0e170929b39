"""Lending, replacing and removing boxes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
from flaky_engine import FlakyEngine

from quintain.sandbox import SandboxError, SandboxPool, SandboxTimeout
from quintain.sandbox.docker.owner import labels_of_this_process

BOTH_KINDS = [pytest.param("local"), pytest.param("docker", marks=pytest.mark.docker)]
OWNER = """
import sys, time
from quintain.sandbox import open_pool
from quintain.sandbox.config import SandboxConfig
if __name__ == "__main__":
    pool = open_pool(SandboxConfig(type=sys.argv[1], pool_size=2), needs_isolation=False, owner="to-be-killed")
    box = pool.acquire()
    box.exec("setsid sleep 4321 &")
    print(box.id, box.exec("pwd").stdout.strip(), flush=True)
    if len(sys.argv) > 2:
        raise KeyboardInterrupt
    time.sleep(100)
"""


def start_owner(*arguments: str) -> tuple[subprocess.Popen[str], str, Path]:
    """Another process with a box: the process, the box's id and work folder."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    box, folder = owner.stdout.readline().split()
    return owner, box, Path(folder)


def wait_until(condition, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_many_threads_share_few_boxes_and_every_one_gets_a_clean_box(make_pool, kind: str):
    pool: SandboxPool = make_pool(kind, pool_size=3)

    def one(number: int) -> str:
        with pool.lease() as box:
            box.exec(f"echo {number} >> seen")
            return box.exec("cat seen").stdout

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(one, range(96))) == [f"{number}\n" for number in range(96)]
    assert pool.num_replaced == 0


def test_waiting_for_a_box_ends_with_an_error_that_says_what_to_do(make_pool):
    pool = make_pool("local", acquire_timeout_s=0.3)
    with pool.lease(), pytest.raises(SandboxTimeout, match=r"1 of 1 are in use.*pool_size"):
        pool.acquire()


def test_a_waiting_thread_gets_the_box_that_is_given_back(make_pool):
    pool = make_pool("local")
    box = pool.acquire()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.acquire)
        time.sleep(0.1)
        assert not waiting.done()
        pool.release(box)
        pool.release(box)  # twice is once
        assert waiting.result(5).exec("echo ok").stdout == "ok\n"


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_closing_removes_every_box_in_use_or_not(make_pool, kind: str):
    pool = make_pool(kind, pool_size=2)
    used, _ = pool.acquire(), pool.release(pool.acquire())
    folder = Path(used.exec("pwd").stdout.strip())
    pool.close()
    pool.close()
    for call in (lambda: used.exec("true"), pool.acquire):
        with pytest.raises(SandboxError, match=r"given back|closed"):
            call()
    if kind == "docker":
        client = docker.APIClient(os.environ["DOCKER_HOST"], version="auto")
        assert not client.containers(all=True, filters={"name": used.id})
    else:
        assert not folder.parent.exists()


def test_closing_wakes_those_who_wait(make_pool):
    pool = make_pool("local")
    pool.acquire()
    failures = []

    def wait() -> None:
        with pytest.raises(SandboxError, match="closed"):
            pool.acquire()
        failures.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    pool.close()
    thread.join(5)
    assert failures == [True]


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_an_interrupted_owner_leaves_nothing(engine_url: str, engine: docker.APIClient, kind: str):
    """Ctrl-C without any clean-up of the owner's: the interpreter's exit closes the pool."""
    owner, box, folder = start_owner(kind, "interrupt")
    owner.wait(30)
    if kind == "docker":
        assert not engine.containers(all=True, filters={"name": box})
    else:
        assert not folder.parent.exists()


@pytest.mark.docker
def test_boxes_of_a_killed_owner_go_and_those_of_a_live_one_stay(make_pool, engine: docker.APIClient):
    """E15"""
    killed, killed_box, _ = start_owner("docker")
    live, live_box, _ = start_owner("docker")
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        make_pool("docker")
        names = [name for found in engine.containers(all=True) for name in found["Names"]]
        assert f"/{killed_box}" not in names and f"/{live_box}" in names
    finally:
        live.kill()
        live.wait()
    assert wait_until(lambda: not engine.containers(all=True, filters={"name": live_box}))


@pytest.mark.docker
def test_a_container_that_outlived_its_owner_is_removed_at_the_next_start(make_pool, engine: docker.APIClient):
    """E15: one that never started (its owner died between create and start) has no agent that could end it."""
    image = engine.inspect_container(make_pool("docker").acquire().id)["Image"]
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = labels_of_this_process("earlier")
    dead = {**mine, "quintain.pid": str(gone.pid)}
    elsewhere = {**dead, "quintain.host": "another machine"}
    made = [engine.create_container(image, ["x"], labels=labels)["Id"] for labels in (dead, mine, elsewhere)]
    try:
        make_pool("docker")
        left = {found["Id"] for found in engine.containers(all=True)}
        assert [container in left for container in made] == [False, True, True]
    finally:
        for container in made[1:]:
            engine.remove_container(container, force=True)


def test_a_killed_owner_of_local_boxes_leaves_no_folder_and_no_process():
    owner, _, folder = start_owner("local")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert wait_until(lambda: not folder.parent.exists())


@pytest.mark.docker
def test_an_engine_that_fails_every_third_create_and_remove_ends_no_run(
    make_pool, engine: docker.APIClient, engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """E18"""
    flaky = FlakyEngine(tmp_path / "s", engine_url, every=3)
    monkeypatch.setenv("DOCKER_HOST", flaky.url)
    pool: SandboxPool = make_pool("docker", pool_size=4)
    monkeypatch.setenv("DOCKER_HOST", engine_url)
    pool.warm(4)
    names = []
    for _ in range(4):
        with pool.lease() as box:
            names.append(box.id)
            engine.kill(box.id)
        time.sleep(0.2)
    with pool.lease() as box:
        assert box.exec("echo ok").stdout == "ok\n"
    pool.close()
    assert flaky.num_failed["create"] >= 1 and pool.num_retries >= flaky.num_failed["create"]
    left = {name for found in engine.containers(all=True) for name in found["Names"]}
    assert not left & {f"/{name}" for name in names}
    flaky.close()
