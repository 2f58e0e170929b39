"""An engine behind a real sshd: commands by channel, a connection that breaks, a server that goes and comes back."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quintain.sandbox import SandboxError, open_pool
from quintain.sandbox.config import HostConfig, SandboxConfig
from quintain.sandbox.docker.address import REOPEN_PAUSE_S, REOPEN_TIMEOUT_S, Address
from quintain.sandbox.docker.build import build
from quintain.sandbox.docker.engine import Engine

pytestmark = pytest.mark.docker
SSHD = "/usr/sbin/sshd"


class SshServer:
    """A server of the test's own on a free port of the loopback, for this user and one key; `start`, `stop`, `cut`."""

    def __init__(self, folder: Path) -> None:
        assert shutil.which("ssh") and Path(SSHD).exists(), "install openssh-client and openssh-server"
        for name in ("host", "user"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(make, check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._config = folder / "sshd_config"
        self._config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        )
        (folder / "known").write_text(f"[127.0.0.1]:{self.port} {(folder / 'host.pub').read_text()}")
        (folder / "bin").mkdir()
        client = folder / "bin" / "ssh"  # the real one, with this key and this known host
        options = f"-F none -i {folder}/user -o IdentitiesOnly=yes -o UserKnownHostsFile={folder}/known"
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
        client.chmod(0o755)
        self.path = f"{folder}/bin:{os.environ['PATH']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        self._process = subprocess.Popen([SSHD, "-D", "-f", str(self._config)], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("sshd does not listen")

    def cut(self) -> int:
        """Kill every connection; how many there were."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)
        return len(children)

    def stop(self) -> None:
        if self._process is not None:
            self.cut()
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    server = SshServer(tmp_path)
    monkeypatch.setenv("PATH", server.path)
    server.start()
    yield server
    server.stop()


def test_an_engine_behind_ssh_survives_a_broken_connection_and_comes_back(engine_url: str, server: SshServer):
    image = build(Engine.connect(Address(engine_url)), None).image.reference
    url = f"ssh://{getpass.getuser()}@127.0.0.1:{server.port}{engine_url.removeprefix('unix://')}"
    config = SandboxConfig(
        type="docker", hosts=(HostConfig(url=url),), image=image, pool_size=1, lease_s=20, breaker_pause_s=0.5
    )
    with open_pool(config, needs_isolation=True, owner="ssh") as pool, ThreadPoolExecutor(1) as thread:
        with pool.lease() as box:
            assert box.exec("wc -c", stdin=bytes(2**20)).stdout.strip() == str(2**20)
            for number in range(3):
                running = thread.submit(box.exec, f"echo run >> {number}; sleep 1; cat {number}", timeout_s=20)
                time.sleep(0.4)
                assert server.cut() >= 1
                assert running.result(timeout=30).stdout == "run\n"  # over a new connection, and run once
            running = thread.submit(box.exec, "sleep 20", timeout_s=25)
            time.sleep(0.3)
            server.stop()
            with pytest.raises(SandboxError):
                running.result(timeout=30)
        server.start()
        deadline, answer = time.monotonic() + 30, ""
        while not answer and time.monotonic() < deadline:
            try:
                with pool.lease() as box:
                    answer = box.exec("echo ok").stdout
            except SandboxError:
                time.sleep(0.2)
        assert answer == "ok\n"


def test_calls_to_an_engine_whose_server_is_gone_fail_soon_and_together(engine_url: str, server: SshServer):
    url = f"ssh://{getpass.getuser()}@127.0.0.1:{server.port}{engine_url.removeprefix('unix://')}"
    address = Address(url)
    address.open()
    server.stop()
    started = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(reopened, address) for _ in range(8)]
        assert all("does not forward" in call.result() for call in calls)
    assert time.monotonic() - started < REOPEN_TIMEOUT_S + 2
    server.start()
    time.sleep(REOPEN_PAUSE_S)
    address.reopen()
    address.close()


def reopened(address: Address) -> str:
    """What a caller hears; ssh may need a moment to see the end of its connection."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            address.reopen()
        except SandboxError as error:
            return str(error)
        time.sleep(0.05)
    return "no error"


def test_a_server_that_refuses_the_key_is_named(engine_url: str, server: SshServer, tmp_path: Path):
    (tmp_path / "user.pub").write_text("")
    with pytest.raises(SandboxError, match=r"does not forward the engine's socket.*Permission denied"):
        Engine.connect(Address(f"ssh://{getpass.getuser()}@127.0.0.1:{server.port}"))
