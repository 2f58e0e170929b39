"""Nothing is left behind: owners and engines killed at any moment, leases that run out, boxes that are proved clean.

QUINTAIN_KILLS sets how often owners are killed (engines: a quarter of that); the default is small.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import docker
import pytest
from private_engine import PrivateEngine

from quintain.sandbox import SandboxError, SandboxPool
from quintain.sandbox.docker.engine import Engine
from quintain.sandbox.docker.owner import POOL, labels_of_this_process
from quintain.sandbox.docker.reaper import reap

pytestmark = pytest.mark.docker
NUM_KILLS = int(os.environ.get("QUINTAIN_KILLS", "4"))
OURS = f"quintain.pid={os.getpid()}"
OWNER = """
import ctypes, os, signal, sys, threading
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no owner goes on without its test
if os.getppid() != int(sys.argv[4]):
    sys.exit("the test is gone")
from quintain.sandbox import SandboxError, open_pool
from quintain.sandbox.config import SandboxConfig
print("go", flush=True)
config = SandboxConfig(type="docker", pool_size=3, network=sys.argv[1], reuse=sys.argv[2], lease_s=float(sys.argv[3]))
with open_pool(config, needs_isolation=True, owner="victim") as pool:
    print("open", flush=True)
    def work():
        while True:
            try:
                with pool.lease() as box:
                    box.exec("setsid sleep 1000 & echo x > f; sleep 0.05", timeout_s=5)
                    print(box.id, flush=True)
            except SandboxError:
                pass
    for _ in range(3):
        threading.Thread(target=work).start()
    threading.Event().wait()
"""


def start_owner(url: str, network: str = "none", reuse: str = "never", lease_s: float = 120) -> subprocess.Popen[str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, network, reuse, str(lease_s), str(os.getpid())],
        env={**os.environ, "DOCKER_HOST": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None and owner.stdout.readline() == "go\n"
    return owner


def left(client: docker.APIClient, label: str = "quintain.run=victim") -> list[str]:
    """Everything with a label on the engine, by name."""
    wanted = {"label": label}
    found = [name for container in client.containers(all=True, filters=wanted) for name in container["Names"]]
    found += [network["Name"] for network in client.networks(filters=wanted)]
    return found + [volume["Name"] for volume in client.volumes(filters=wanted)["Volumes"] or []]


def wait_until(condition, seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def own_engine(engine_url: str) -> Iterator[PrivateEngine]:
    engine = PrivateEngine("k")
    try:
        engine.start()
        yield engine
    finally:
        engine.purge()


def test_an_owner_killed_at_any_moment_leaves_nothing_after_the_next_start(make_pool, engine, engine_url: str):
    """E15; a second owner that lives keeps its boxes, its network and its volume."""
    others = left(engine, OURS)  # pools that other tests of this session hold
    survivor = make_pool("docker", network="internal")
    mine = survivor.acquire()
    labels = {**labels_of_this_process("tests"), POOL: "another"}
    engine.create_volume("quintain-test-kept", labels=labels)
    chance = random.Random(7)
    try:
        for number in range(NUM_KILLS):
            owner = start_owner(engine_url, network=("internal", "none")[number % 2])
            time.sleep(chance.uniform(0, 3))
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            time.sleep(0.3)  # a call that was on its way when its maker died comes to its end
            make_pool("docker").close()
            assert wait_until(lambda: not left(engine), 5), left(engine)
            assert mine.exec("echo ok").stdout == "ok\n"
        kept = sorted(set(left(engine, OURS)) - set(others))
        assert kept == sorted([f"/{mine.id}", survivor_network(engine), "quintain-test-kept"])
    finally:
        engine.remove_volume("quintain-test-kept")


def survivor_network(engine: docker.APIClient) -> str:
    (network,) = engine.networks(filters={"label": OURS})
    return network["Name"]


def test_an_engine_killed_at_any_moment_leaves_nothing_after_the_next_start(own_engine: PrivateEngine, make_pool):
    """The owner lives on through it and goes on working; its boxes of before are not among what is there then."""
    client = docker.APIClient(own_engine.url, version="1.41")
    chance = random.Random(11)
    for _ in range(max(1, NUM_KILLS // 4)):
        owner = start_owner(own_engine.url, network="internal", reuse="reset")
        assert owner.stdout is not None and owner.stdout.readline() == "open\n"
        time.sleep(chance.uniform(0, 2))
        before = set(left(client))
        own_engine.kill()
        own_engine.start()
        boxes_before = {name for name in before if name.startswith("/")}
        assert wait_until(lambda boxes=boxes_before: not boxes & set(left(client)), 30)
        owner.send_signal(signal.SIGTERM)
        owner.kill()
        owner.wait()
        host = {"url": own_engine.url}
        make_pool("docker", hosts=[host]).close()
        assert wait_until(lambda: not left(client), 15), left(client)


def test_a_box_removes_itself_when_its_owner_goes_silent(engine, engine_url: str):
    """The owner is stopped, not killed: its end of the stream stays open, and only the lease can tell."""
    owner = start_owner(engine_url, reuse="reset", lease_s=2)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "open\n"
        owner.stdout.readline()
        time.sleep(4)  # as long as it lives, it keeps its boxes past the lease
        assert left(engine)
        owner.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: not left(engine), 20), left(engine)
    finally:
        owner.kill()
        owner.wait()


def test_an_idle_box_in_use_keeps_its_lease(make_pool):
    with make_pool("docker", lease_s=1).lease() as box:
        box.exec("sleep 2.5", timeout_s=5)
        time.sleep(2.5)
        assert box.exec("echo ok").stdout == "ok\n"


@pytest.mark.parametrize(
    ("what", "command"),
    [
        ("limit", "prlimit --pid 1 --nofile=64:64"),
        ("priority", "renice 15 1"),
        ("CPUs", "taskset -p 1 1"),
        ("I/O priority", "ionice -c 3 -p 1"),
        ("mode of a folder", "mkdir /tmp/a && chmod 0 /work && setfattr -n user.note -v x /work"),
    ],
)
def test_a_box_is_handed_on_only_as_it_was_at_its_start(make_pool, what: str, command: str):
    """Where it can't be put back, the box is replaced; either way the next user finds nothing changed."""
    pool: SandboxPool = make_pool("docker")
    seen = (
        "prlimit --pid 1 --raw --noheadings; ps -o ni= -p 1; taskset -p 1; ionice -p 1; stat -c '%a %u' /work /tmp; "
        "ls -A /work /tmp /dev/shm"
    )
    with pool.lease() as box:
        before = box.exec(seen).stdout
        box.exec(command)
    with pool.lease() as box:
        assert box.exec(seen).stdout == before


def test_reuse_decides_who_gets_a_used_box(make_pool):
    def ids(pool: SandboxPool, *groups: str | None) -> list[str]:
        found = []
        for group in groups:
            with pool.lease(group=group) as box:
                found.append(box.id)
        return found

    first, second = ids(make_pool("docker", reuse="reset"), None, None)
    assert first == second
    first, second = ids(make_pool("docker", reuse="never"), None, None)
    assert first != second
    a1, a2, b1, none1, none2 = ids(make_pool("docker", reuse="group", pool_size=1), "a", "a", "b", None, None)
    assert a1 == a2 and len({a1, b1, none1, none2}) == 4


def test_a_warm_pool_replaces_what_it_removes_ahead_of_need(make_pool, engine):
    others = set(left(engine, OURS))
    pool: SandboxPool = make_pool("docker", reuse="never", pool_size=2)
    pool.warm(2)
    with pool.lease() as box:
        used = box.id

    def replaced() -> bool:
        names = set(left(engine, OURS)) - others
        return len(names) == 2 and f"/{used}" not in names

    assert wait_until(replaced)


def test_starts_are_bounded_in_rate(make_pool):
    pool: SandboxPool = make_pool("docker", pool_size=4, starts_per_s=1.0)
    started = time.monotonic()
    pool.warm(4)
    assert time.monotonic() - started >= 2.0


def test_a_breaker_stops_starting_and_says_when_it_goes_on(make_pool, engine, engine_url: str):
    """With its image gone no box starts: after some failures none is tried for a while."""
    pool: SandboxPool = make_pool("docker", breaker_failures=2, breaker_pause_s=30.0)
    with pool.lease() as box:
        image = engine.inspect_container(box.id)["Config"]["Image"]
        engine.tag(image, "quintain-test-breaker", "1")
    pool.close()
    pool = make_pool("docker", image="quintain-test-breaker:1", breaker_failures=2, breaker_pause_s=30.0)
    with pool.lease() as box:
        engine.remove_image("quintain-test-breaker:1")
        engine.kill(box.id)
    for _ in range(2):
        with pytest.raises(SandboxError, match="quintain-test-breaker"):
            pool.acquire()
    started = time.monotonic()
    with pytest.raises(SandboxError, match=r"2 boxes in a row did not start, so none is tried for \d+"):
        pool.acquire()
    assert time.monotonic() - started < 0.1 and pool.gate.num_opened == 1


def test_a_cancelled_start_leaves_no_container(engine_url: str, engine):
    import asyncio

    from quintain.sandbox.background import background_loop
    from quintain.sandbox.config import SandboxConfig
    from quintain.sandbox.docker.box import DockerSandbox
    from quintain.sandbox.docker.image import ensure_image

    docker_engine = Engine.connect()
    image = ensure_image(docker_engine, None).reference
    labels = labels_of_this_process("cancelled")

    async def cancel_after(seconds: float) -> None:
        box = DockerSandbox(SandboxConfig(), engine=docker_engine, image=image, labels=labels)
        start = asyncio.ensure_future(box.start())
        await asyncio.sleep(seconds)
        start.cancel()
        await asyncio.wait([start])
        if not start.cancelled():  # it was sooner than we
            await box.stop()

    for seconds in (0, 0.01, 0.05, 0.1, 0.2, 0.3):
        background_loop().run(cancel_after(seconds))
        assert wait_until(lambda: not left(engine, "quintain.run=cancelled"), 3)
    docker_engine.close()


def test_the_reaper_touches_nothing_but_what_is_doomed(engine_url: str, engine):
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = labels_of_this_process("reaped")
    dead = {**mine, "quintain.pid": str(gone.pid)}
    elsewhere = {**dead, "quintain.host": "another machine"}
    kinds = {"dead": dead, "mine": mine, "elsewhere": elsewhere, "plain": {}}
    for name, labels in kinds.items():
        engine.create_volume(f"quintain-test-{name}", labels=labels)
        engine.create_network(f"quintain-test-{name}", internal=True, labels=labels)
    connection = Engine.connect()
    try:
        removed, problems = reap(connection)
        assert {(thing.kind, thing.name) for thing in removed} >= {
            ("volume", "quintain-test-dead"),
            ("network", "quintain-test-dead"),
        }
        assert not problems
        volumes = {volume["Name"] for volume in engine.volumes()["Volumes"]}
        networks = {network["Name"] for network in engine.networks()}
        for name in ("mine", "elsewhere", "plain"):
            assert f"quintain-test-{name}" in volumes & networks
        assert "quintain-test-dead" not in volumes | networks
    finally:
        for name in ("mine", "elsewhere", "plain"):
            engine.remove_volume(f"quintain-test-{name}")
            engine.remove_network(f"quintain-test-{name}")
        connection.close()
