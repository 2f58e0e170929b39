"""Several engines: boxes are spread over them, and a dead one takes only its own boxes with it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from private_engine import PrivateEngine
from pydantic import ValidationError

from quintain.sandbox import SandboxDied, SandboxError, SandboxUnavailable, open_pool
from quintain.sandbox.config import HostConfig, SandboxConfig
from quintain.sandbox.docker.address import Address
from quintain.sandbox.docker.build import build
from quintain.sandbox.docker.engine import Engine

LABEL = "quintain.pid"


def names(url: str) -> set[str]:
    found = docker.APIClient(url, version="auto").containers(all=True, filters={"label": LABEL})
    return {container["Names"][0].lstrip("/") for container in found}


def config(*hosts: tuple[str, float], **settings) -> SandboxConfig:
    listed = tuple(HostConfig(url=url, weight=weight) for url, weight in hosts)
    return SandboxConfig(type="docker", hosts=listed, acquire_timeout_s=30, **settings)


@pytest.fixture(scope="module")
def engines(engine_url: str) -> Iterator[tuple[PrivateEngine, PrivateEngine]]:
    """Two engines on this machine that belong to nobody else."""
    pair = PrivateEngine("a"), PrivateEngine("b")
    try:
        for engine in pair:
            engine.start()
        yield pair
    finally:
        for engine in pair:
            engine.purge()


@pytest.mark.docker
def test_boxes_are_spread_by_weight_and_removed_from_both(engines):
    first, second = engines
    with open_pool(config((first.url, 2), (second.url, 1), pool_size=6), needs_isolation=True, owner="spread") as pool:
        pool.warm(6)
        assert (len(names(first.url)), len(names(second.url))) == (4, 2)
        boxes = [pool.acquire() for _ in range(6)]
        assert [box.exec("echo ok").stdout for box in boxes] == ["ok\n"] * 6
    assert not names(first.url) | names(second.url)


@pytest.mark.docker
def test_a_dead_engine_is_taken_out_and_its_boxes_die_as_infrastructure(engines):
    """A trajectory on the dead engine gets SandboxDied, which is an infrastructure outcome; later ones are not hurt."""
    first, second = engines
    with open_pool(config((first.url, 1), (second.url, 1), pool_size=4), needs_isolation=True, owner="dying") as pool:
        pool.warm(4)
        boxes = [pool.acquire() for _ in range(4)]
        lost = names(second.url)
        second.kill()
        outcomes = Counter()
        for box in boxes:
            try:
                outcomes[box.exec("echo ok").stdout] += 1
            except SandboxDied:
                assert box.id in lost
                outcomes["died"] += 1
            pool.release(box)
        assert outcomes == {"ok\n": 2, "died": 2}
        started = time.monotonic()
        for _ in range(8):
            with pool.lease() as box:
                assert box.exec("echo ok").stdout == "ok\n" and box.id not in lost
        assert time.monotonic() - started < 15
        second.start()
        deadline = time.monotonic() + 40
        while not names(second.url) - lost and time.monotonic() < deadline:  # it is taken in again
            held = [pool.acquire() for _ in range(4)]
            for box in held:
                pool.release(box)
            with pool.lease(), pool.lease(), pool.lease(), pool.lease():
                time.sleep(0.2)
        assert not names(second.url) & lost
    assert not names(first.url) | names(second.url)


@pytest.mark.docker
def test_an_engine_that_is_dead_at_the_start_is_left_out_with_a_notice(engines, tmp_path):
    first, _ = engines
    nowhere = f"unix://{tmp_path}/none.sock"
    with open_pool(config((nowhere, 9), (first.url, 1), pool_size=1), needs_isolation=True, owner="half") as pool:
        assert pool.notice is not None and nowhere in pool.notice and "left out" in pool.notice
        with pool.lease() as box:
            assert box.exec("echo ok").stdout == "ok\n"
    with pytest.raises(SandboxUnavailable, match=r"none\.sock.*other\.sock"):
        open_pool(config((nowhere, 1), (f"unix://{tmp_path}/other.sock", 1)), needs_isolation=True, owner="none")


@pytest.mark.docker
def test_an_only_engine_that_dies_ends_every_box_and_is_used_again_when_it_is_back(engines):
    """The breaker opens meanwhile, so that a thousand trajectories do not each try four starts."""
    _, second = engines
    settings = {"pool_size": 2, "breaker_failures": 1, "breaker_pause_s": 1.0}
    with open_pool(config((second.url, 1), **settings), needs_isolation=True, owner="alone") as pool:
        with pool.lease() as box:
            second.kill()
            with pytest.raises(SandboxError):
                box.exec("true")
        with pytest.raises(SandboxError):
            pool.acquire()
        started = time.monotonic()
        refusals = 0
        while time.monotonic() - started < 0.5:
            try:
                pool.acquire()
            except SandboxError as error:
                refusals += "in a row did not start" in str(error)
                time.sleep(0.01)
        assert refusals > 10 and pool.gate.num_opened >= 1
        second.start()
        deadline, answer = time.monotonic() + 30, ""
        while not answer and time.monotonic() < deadline:
            try:
                with pool.lease() as box:
                    answer = box.exec("echo ok").stdout
            except SandboxError:
                time.sleep(0.2)
        assert answer == "ok\n"
    assert not names(second.url)


@pytest.mark.parametrize("url", ["docker.sock", "http://x:1", ""])
def test_an_address_that_is_none_is_refused_when_the_recipe_is_read(url: str):
    with pytest.raises(ValidationError, match="no address of a Docker engine"):
        HostConfig(url=url)


def make_certificates(folder: Path) -> None:
    """`ca.pem`, and `cert.pem` and `key.pem` that serve for both ends, for 127.0.0.1."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=tests", "-days", "2")
    openssl("req", *key, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=both")
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2")
    openssl("x509", "-req", "-in", "request.pem", "-out", "cert.pem", *signing)


@pytest.mark.docker
def test_boxes_work_over_tls_and_not_without_the_key(engine_url: str, tmp_path: Path):
    make_certificates(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    files = f"--tlscacert {tmp_path}/ca.pem --tlscert {tmp_path}/cert.pem --tlskey {tmp_path}/key.pem"
    private = PrivateEngine("t", options=f"-H tcp://127.0.0.1:{port} --tlsverify {files}")
    try:
        private.start()
        image = build(Engine.connect(Address(private.url)), None).image.reference
        host = HostConfig(url=f"tcp://127.0.0.1:{port}", tls=str(tmp_path))
        settings = SandboxConfig(type="docker", hosts=(host,), image=image, pool_size=2)
        with open_pool(settings, needs_isolation=True, owner="tls") as pool, pool.lease() as box:
            assert box.exec("cat", stdin=b"x" * 2**20).stdout_bytes == 2**20
        assert not names(private.url)
        bare = settings.model_copy(update={"hosts": (HostConfig(url=host.url),)})
        with pytest.raises(SandboxUnavailable, match="no Docker engine answers"):
            open_pool(bare, needs_isolation=True, owner="tls")
    finally:
        private.purge()


def test_a_tls_folder_without_its_files_is_named(tmp_path):
    host = HostConfig(url="tcp://127.0.0.1:1", tls=str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"has no ca\.pem"):
        open_pool(SandboxConfig(type="docker", hosts=(host,)), needs_isolation=True, owner="tls")
