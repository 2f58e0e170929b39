"""How an engine is reached: a unix socket, tcp, tcp with TLS, or a unix socket forwarded by ssh.

    unix:///run/docker.sock          tcp://name:2375          tcp://name:2376 + a folder with ca.pem, cert.pem, key.pem
    ssh://[user@]name[:port][/path/of/the/socket]             = a unix socket here, which `ssh -L` forwards

ssh asks nothing (BatchMode): keys and known hosts are the user's affair. The forwarding ends with this process, however
that ends, since a shell around ssh waits for the end of a pipe that we hold.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import docker
import docker.tls

from quintain.sandbox.base import SandboxUnavailable

SSH_TIMEOUT_S = 15.0
REOPEN_TIMEOUT_S = 5.0
REOPEN_PAUSE_S = 1.0
REMOTE_SOCKET = "/var/run/docker.sock"
SSH_OPTIONS = (
    "-nNT", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3",
)  # fmt: skip


class Address:
    """Where an engine is. Example: ``Address("tcp://box1:2376", tls="~/.docker")``; `open` before, `close` after."""

    def __init__(self, url: str, tls: str | None = None) -> None:
        if not url.startswith(("unix://", "tcp://", "http://", "ssh://")):
            raise SandboxUnavailable(
                f"{url}: quintain reaches Docker engines over unix://, tcp:// (with or without TLS) and ssh:// only"
            )
        self.given = url
        """What the user wrote; for messages."""
        self.url = url
        """What is connected to: unix:// or tcp://."""
        self.tls = Path(tls).expanduser() if tls else None
        self._folder: str | None = None
        self._tunnel: subprocess.Popen[bytes] | None = None
        self._tunnel_lock = threading.Lock()
        self._failure: tuple[float, SandboxUnavailable] | None = None
        if self.tls is not None:
            for name in ("ca.pem", "cert.pem", "key.pem"):
                if not (self.tls / name).is_file():
                    raise SandboxUnavailable(f"{url}: the TLS folder {self.tls} has no {name}")

    def open(self) -> None:
        """Forward the socket, where ssh is to. Raises SandboxUnavailable."""
        parts = urlsplit(self.given)
        if parts.scheme != "ssh":
            return
        if shutil.which("ssh") is None:
            raise SandboxUnavailable(f"{self.given}: there is no ssh on this machine; install openssh-client")
        self._folder = tempfile.mkdtemp(prefix="quintain-ssh-")
        try:
            self._forward(SSH_TIMEOUT_S)
        except SandboxUnavailable:
            self.close()
            raise

    def reopen(self) -> None:
        """Forward the socket anew where ssh has ended, at the same place. Raises SandboxUnavailable.

        Takes at most `REOPEN_TIMEOUT_S`; for `REOPEN_PAUSE_S` after a failure nobody tries, so that callers that waited
        for one attempt do not wait for an attempt each.
        """
        tunnel = self._tunnel  # once: `close` may come in between
        if tunnel is None or tunnel.poll() is None:
            return
        with self._tunnel_lock:
            if self._tunnel is not None and self._tunnel.poll() is not None:
                if self._failure is not None and time.monotonic() < self._failure[0] + REOPEN_PAUSE_S:
                    raise SandboxUnavailable(str(self._failure[1]))
                self._end_tunnel()
                try:
                    self._forward(REOPEN_TIMEOUT_S)
                except SandboxUnavailable as error:
                    self._failure = (time.monotonic(), error)
                    raise

    def _forward(self, timeout_s: float) -> None:
        assert self._folder is not None
        parts = urlsplit(self.given)
        socket = Path(self._folder) / "docker.sock"
        socket.unlink(missing_ok=True)
        target = f"{parts.username}@{parts.hostname}" if parts.username else str(parts.hostname)
        port = ["-p", str(parts.port)] if parts.port else []
        remote = parts.path if len(parts.path) > 1 else REMOTE_SOCKET
        command = shlex.join(["ssh", *SSH_OPTIONS, *port, "-L", f"{socket}:{remote}", "--", target])
        self._tunnel = subprocess.Popen(
            # Explicit redirections: a background job's stdin is /dev/null else, which ends at once.
            [
                "/bin/sh",
                "-c",
                f"exec 3<&0; {command} 3<&- & p=$!; (cat <&3 >/dev/null; kill $p) & c=$!; exec 3<&-; wait $p; kill $c",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for us; boxes are removed through it afterwards
        )
        deadline = time.monotonic() + timeout_s
        while not socket.exists():
            if self._tunnel.poll() is not None or time.monotonic() > deadline:
                words = self._said() or f"no answer in {timeout_s:g} s"
                self._end_tunnel()
                raise SandboxUnavailable(f"{self.given}: ssh does not forward the engine's socket: {words}")
            time.sleep(0.02)
        self.url = f"unix://{socket}"

    def _said(self) -> str:
        assert self._tunnel is not None and self._tunnel.stderr is not None
        if self._tunnel.poll() is None:
            return ""
        os.set_blocking(self._tunnel.stderr.fileno(), False)
        return (self._tunnel.stderr.read() or b"").decode("utf-8", "replace").strip()[-400:] or "it ended"

    def close(self) -> None:
        """End the forwarding. Idempotent."""
        with self._tunnel_lock:
            self._end_tunnel()
            self._tunnel = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _end_tunnel(self) -> None:
        tunnel = self._tunnel
        if tunnel is not None:
            assert tunnel.stdin is not None and tunnel.stderr is not None
            with contextlib.suppress(BrokenPipeError):
                tunnel.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                tunnel.wait(5)
            tunnel.stderr.close()

    def client(self, *, timeout_s: float, version: str) -> docker.APIClient:
        """A client of the SDK's. Raises what the SDK raises."""
        tls = None
        if self.tls is not None:
            pair = (str(self.tls / "cert.pem"), str(self.tls / "key.pem"))
            tls = docker.tls.TLSConfig(client_cert=pair, ca_cert=str(self.tls / "ca.pem"), verify=True)
        client = docker.APIClient(self.url, version=version, timeout=int(timeout_s), tls=tls or False)
        # Proxies and certificates that the environment names are for the web: REQUESTS_CA_BUNDLE would take the place
        # of the engine's own authority.
        client.trust_env = False
        return client

    def ssl_context(self) -> ssl.SSLContext | None:
        """For a stream of our own; None where the address has no TLS."""
        if self.tls is None:
            return None
        context = ssl.create_default_context(cafile=str(self.tls / "ca.pem"))
        context.load_cert_chain(str(self.tls / "cert.pem"), str(self.tls / "key.pem"))
        return context


def default_address() -> Address:
    """DOCKER_HOST, else the first usual socket that exists, else the default one. Raises SandboxUnavailable."""
    tls = None
    if os.environ.get("DOCKER_TLS_VERIFY"):
        tls = os.environ.get("DOCKER_CERT_PATH") or "~/.docker"
    given = os.environ.get("DOCKER_HOST")
    if given:
        return Address(given, tls if given.startswith("tcp://") else None)
    usual = "/var/run/docker.sock"
    own = os.path.join(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "docker.sock")
    return Address(f"unix://{own}" if os.path.exists(own) and not os.path.exists(usual) else f"unix://{usual}")
