"""The audit sees from inside what an engine really does, and no run starts on one that protects too little."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import pytest
from flaky_engine import FlakyEngine

from quintain.sandbox import SandboxUnavailable, open_pool
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.audit import failures, judge

pytestmark = pytest.mark.docker
Body = dict[str, Any]


class WeakEngine(FlakyEngine):
    """A real engine that gives boxes less protection than it was asked for, and says nothing about it."""

    def __init__(self, path: Path, target: str, weaken: Callable[[Body], object]) -> None:
        self._weaken = weaken
        super().__init__(path, target, every=10**9)

    def rewrite(self, head: bytes, rest: bytes) -> tuple[bytes, bytes]:
        if b"/containers/create" not in head.split(b"\r\n")[0]:
            return head, rest
        body = json.loads(rest)
        self._weaken(body)
        text = json.dumps(body).encode()
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length:")]
        return b"\r\n".join([*lines, b"Content-Length: %d" % len(text)]), text


def host(**settings: Any) -> Callable[[Body], object]:
    return lambda body: body["HostConfig"].update(settings)


WEAKENINGS = {
    "user": lambda body: body.update(User="0:0"),
    "capabilities": lambda body: body.update(User="0:0") or body["HostConfig"].update(CapDrop=[]),
    "no new privileges": host(SecurityOpt=[]),
    "seccomp": host(SecurityOpt=["no-new-privileges:true", "seccomp=unconfined"]),
    "root": host(ReadonlyRootfs=False),
    "mounts": host(Binds=["/usr/share:/mnt:rw"]),
    "/work": lambda body: body["HostConfig"]["Tmpfs"].update({"/work": "rw,exec,uid=1000,gid=1000"}),
    "interfaces": host(NetworkMode="host"),
    "memory limit": host(Memory=0, MemorySwap=0),
    "pids limit": host(PidsLimit=0),
    "CPU limit": host(NanoCpus=0),
    "open files": host(Ulimits=[{"Name": "nofile", "Soft": 8192, "Hard": 8192}]),
    "environment": lambda body: body["Env"].append("SECRET_TOKEN=x"),
    "engine's socket": host(Binds=["/run/quintain-test/docker.sock:/run/docker.sock"]),
}


@pytest.mark.parametrize("name", WEAKENINGS)
def test_no_run_starts_where_the_engine_leaves_out_a_protection(
    name: str, engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weaken = WEAKENINGS[name]
    if name == "engine's socket":
        weaken = host(Binds=[f"{engine_url.removeprefix('unix://')}:/run/docker.sock"])
    weak = WeakEngine(tmp_path / "s", engine_url, weaken)
    monkeypatch.setenv("DOCKER_HOST", weak.url)
    with pytest.raises(SandboxUnavailable, match=rf"does not protect what it should.*{name}: expected"):
        open_pool(SandboxConfig(type="docker"), needs_isolation=True, owner="weak")
    weak.close()


def test_every_check_passes_for_a_hardened_box(make_pool):
    for settings in ({}, {"noexec": True}, {"network": "internal"}, {"profile": "relaxed"}):
        pool = make_pool("docker", **settings)
        assert len(pool.audit) >= 20 and not failures(pool.audit)
        pool.close()


def test_a_fact_that_is_missing_counts_against_the_box():
    names = {row["name"] for row in failures(judge({}, SandboxConfig()))}
    assert names >= {"user", "capabilities", "seccomp", "root", "mounts", "memory limit", "interfaces", "environment"}


def test_a_proxy_that_lets_through_what_is_not_listed_fails_the_audit():
    config = SandboxConfig(network="proxy", allowed_hosts=("a.org",))
    for said, expected in (("200", True), ("nothing", True), ("403", False)):
        rows = failures(judge({"probe": f"proxy-unlisted {said}\nproxy-metadata {said}"}, config))
        assert (
            {"169.254.169.254 by the proxy", "unlisted.quintain.invalid by the proxy"} <= {r["name"] for r in rows}
        ) == (expected)


def test_programs_run_from_the_writable_folders_only_where_they_may(make_pool):
    script = "printf '#!/bin/sh\\necho ran' > f; chmod 755 f; ./f"
    with make_pool("docker").lease() as box:
        assert box.exec(script).stdout == "ran\n"
    with make_pool("docker", noexec=True).lease() as box:
        assert "Permission denied" in box.exec(script).stderr


def test_an_internal_network_joins_the_boxes_of_a_pool_and_nothing_else(make_pool, engine: docker.APIClient):
    """E11: the choice is in the labels; the network goes with the pool."""
    pool = make_pool("docker", network="internal", pool_size=2)
    with pool.lease() as server, pool.lease() as client:
        found = engine.inspect_container(server.id)
        assert found["Config"]["Labels"]["quintain.network"] == "internal"
        (network,) = found["NetworkSettings"]["Networks"].values()
        server.exec("echo hello > page; setsid python3 -m http.server 8000 >/dev/null 2>&1 &")
        fetch = (
            "import time, urllib.request as u\nfor _ in range(50):\n  try: print(u.urlopen("
            f"'http://{network['IPAddress']}:8000/page', timeout=3).read()); break\n  except OSError: time.sleep(0.1)"
        )
        assert "hello" in client.exec(["python3", "-c", fetch]).stdout
        assert client.exec(["python3", "-c", "import socket; socket.getaddrinfo('example.org', 80)"]).exit_code == 1
        assert engine.inspect_network(network["NetworkID"])["Internal"]
    pool.close()
    assert network["NetworkID"] not in {found["Id"] for found in engine.networks()}


def test_a_runtime_that_the_engine_does_not_have_is_named(make_pool):
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.runtime=runsc: it knows .*runc"):
        make_pool("docker", runtime="runsc")


def test_a_relaxed_box_is_never_used_twice_and_cannot_be_asked_to(make_pool):
    pool = make_pool("docker", profile="relaxed")
    with pool.lease() as box:
        first = box.id
        assert box.exec("touch /etc/x && id -u").stdout == "0\n"
    with pool.lease() as box:
        assert box.id != first and box.exec("ls /etc/x").exit_code != 0
    with pytest.raises(ValueError, match="reuse=reset needs profile=hardened"):
        SandboxConfig(profile="relaxed", reuse="reset")


def test_writable_folders_must_leave_memory_for_the_commands():
    with pytest.raises(ValueError, match=r"memory_bytes \(67108864\) is too small for work_bytes"):
        SandboxConfig(memory_bytes=64 * 2**20)
