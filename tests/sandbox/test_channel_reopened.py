"""A channel whose stream breaks is opened anew once; no command runs twice, and no answer is taken for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import docker
import pytest
from cut_engine import CutEngine

from quintain.sandbox import BlockingSandbox, SandboxDied, SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig

pytestmark = pytest.mark.docker


@pytest.fixture
def proxy(engine_url: str) -> Iterator[CutEngine]:
    proxy = CutEngine(engine_url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def image(engine: docker.APIClient) -> str:
    """The default image, which quintain makes for engines of this machine only."""
    with open_pool(SandboxConfig(type="docker", pool_size=1), needs_isolation=True, owner="tests") as pool:
        return engine.inspect_container(pool.acquire().id)["Config"]["Image"]


@pytest.fixture
def open_far(make_pool, proxy: CutEngine, image: str) -> Callable[..., SandboxPool]:
    """Opens pools on the engine behind the proxy."""
    return lambda **settings: make_pool("docker", hosts=[{"url": proxy.url}], image=image, **settings)


@pytest.fixture
def pool(open_far: Callable[..., SandboxPool]) -> SandboxPool:
    return open_far(lease_s=20)


@pytest.fixture
def box(pool: SandboxPool) -> Iterator[BlockingSandbox]:
    with pool.lease() as box:
        yield box


def test_between_commands_nothing_is_noticed(box: BlockingSandbox, proxy: CutEngine):
    box.write_file("kept", b"x")
    box.exec("sleep 300 &")
    for number in range(3):
        attached = proxy.num_attached
        proxy.cut()
        assert box.exec(f"echo {number}; ls; ps -e | grep -c sleep").stdout == f"{number}\nkept\n1\n"
        assert proxy.num_attached == attached + 1


def test_a_command_under_way_runs_once_and_its_result_arrives(box: BlockingSandbox, proxy: CutEngine):
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(box.exec, "echo run >> runs; sleep 1; seq 9000; exit 7")
        time.sleep(0.4)
        proxy.cut()
        result = running.result(10)
    assert result.exit_code == 7 and result.stdout.endswith("\n9000\n")
    assert box.read_file("runs") == b"run\n"


def test_an_answer_cut_in_the_middle_is_had_again(open_far, proxy: CutEngine):
    pool = open_far(max_output_bytes=16 * 2**20, memory_bytes=2**29)
    with pool.lease() as box:
        expected = "".join(f"{number}\n" for number in range(1, 1_000_001))
        for number in range(12):
            cut = threading.Timer(number * 0.03, proxy.cut)  # at most once in a request, at another moment each time
            cut.start()
            assert box.exec(f"echo {number} >> runs; seq 1000000").stdout == expected
            cut.cancel()
            cut.join()
            box.exec("true")  # takes a cut that came after the whole answer: the next request has its own
        assert box.read_file("runs").decode().split() == [str(number) for number in range(12)]
        assert proxy.num_attached > 1


def test_files_survive_a_cut_too(box: BlockingSandbox, proxy: CutEngine):
    data = bytes(range(256)) * 40_000
    with ThreadPoolExecutor(1) as thread:
        box.write_file("big", data)
        proxy.cut()
        reading = thread.submit(box.read_file, "big", max_bytes=len(data))
        assert reading.result(20) == data
        proxy.cut()
        box.write_file("other", b"y")
    assert box.read_file("other") == b"y"


def test_a_dead_box_behind_a_broken_stream_is_dead(box: BlockingSandbox, engine: docker.APIClient):
    """E13"""
    engine.kill(box.id)
    with pytest.raises(SandboxDied, match=box.id):
        box.exec("true")
    with pytest.raises(SandboxDied, match="gone"):
        box.exec("true")


def test_an_engine_that_cannot_be_reached_any_more_is_a_dead_box(box: BlockingSandbox, proxy: CutEngine):
    proxy.close()
    proxy.cut()
    started = time.monotonic()
    with pytest.raises(SandboxDied, match=box.id):
        box.exec("true")
    assert time.monotonic() - started < 10


def test_a_box_whose_owner_was_cut_off_ends_with_its_lease(open_far, proxy: CutEngine, engine: docker.APIClient):
    """E15: over a network the end of the stream ends no box, so the lease does."""
    pool: SandboxPool = open_far(lease_s=2)
    name = pool.acquire().id
    proxy.close()
    proxy.cut()
    deadline = time.monotonic() + 15
    while engine.containers(all=True, filters={"name": name}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not engine.containers(all=True, filters={"name": name})
