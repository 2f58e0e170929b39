"""Boxes with `network=proxy`: what the allow-list names is reached through the relay, nothing else is."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import docker
import pytest

from quintain.sandbox import SandboxPool, open_pool
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.audit import failures

pytestmark = pytest.mark.docker
LARGE_BYTES = 64 * 2**20


class Page(BaseHTTPRequestHandler):
    """`/large` is 64 MiB of zeros, all else says its path and its Host field."""

    def do_GET(self) -> None:
        size = LARGE_BYTES if self.path == "/large" else 0
        text = f"{self.path} of {self.headers['Host']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(size or len(text)))
        self.end_headers()
        if not size:
            self.wfile.write(text)
        for _ in range(size // 2**16):
            self.wfile.write(bytes(2**16))

    def do_POST(self) -> None:
        left = size = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 2**16)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(size).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: stderr is the test's."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of a server on this machine's loopback."""
    found = Server(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield f"127.0.0.1:{found.server_address[1]}"
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture(scope="module")
def pool(engine_url: str, server: str) -> Iterator[SandboxPool]:
    allowed = (server, "*.listed.invalid")
    config = SandboxConfig(type="docker", pool_size=1, network="proxy", allowed_hosts=allowed, exec_timeout_s=60)
    with open_pool(config, needs_isolation=True, owner="tests") as found:
        yield found


def python(box, source: str, **settings) -> str:
    result = box.exec(["python3", "-c", source], **settings)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def get(server: str, path: str = "/page") -> str:
    return f"import urllib.request as u; print(len(u.urlopen('http://{server}{path}', timeout=30).read()))"


def status_of(target: str) -> str:
    return (
        "import http.client as h\n"
        "c = h.HTTPConnection('127.0.0.1', 3128, timeout=30)\n"
        f"c.request('GET', 'http://{target}/')\nr = c.getresponse(); print(r.status, r.read().decode())"
    )


def test_a_listed_server_is_reached_by_absolute_urls_and_by_connect(pool: SandboxPool, server: str):
    with pool.lease() as box:
        source = f"import urllib.request as u; print(u.urlopen('http://{server}/a?b=c').read().decode())"
        assert python(box, source) == f"/a?b=c of {server}\n"
        tunnel = (
            "import http.client as h\nc = h.HTTPConnection('127.0.0.1', 3128)\n"
            f"c.set_tunnel('{server}')\nc.request('GET', '/t'); print(c.getresponse().read().decode())"
        )
        assert "/t of" in python(box, tunnel)
        post = f"import urllib.request as u; print(u.urlopen('http://{server}/', bytes({2**20})).read().decode())"
        assert python(box, post) == f"{2**20}\n"
    allowed = [access for access in pool.network_log.entries() if access.allowed]
    assert f"{allowed[0].host}:{allowed[0].port}" == server and allowed[0].num_requests == 3
    assert allowed[0].sent_bytes > 2**20


def test_what_is_not_listed_is_refused_with_the_reason(pool: SandboxPool, server: str):
    with pool.lease() as box:
        assert "403 quintain: example.org:80 is not in sandbox.allowed_hosts" in python(box, status_of("example.org"))
        assert "403" in python(box, status_of("169.254.169.254"))
        assert "403" in python(box, status_of("127.0.0.1:1"))
        assert "403" in python(box, status_of(f"localhost:{server.partition(':')[2]}"))
        assert "502 quintain: a.listed.invalid:80 can't be reached" in python(box, status_of("a.listed.invalid"))
        assert "502" in python(box, status_of("a..listed.invalid"))
        assert "400" in python(box, status_of("x:99999"))
    refused = {(access.host, access.port) for access in pool.network_log.entries() if not access.allowed}
    assert {("example.org", 80), ("169.254.169.254", 80), ("127.0.0.1", 1)} <= refused


def test_a_box_has_no_way_out_beside_the_proxy(pool: SandboxPool, server: str, engine: docker.APIClient):
    host, _, port = server.partition(":")
    with pool.lease() as box:
        found = engine.inspect_container(box.id)
        assert found["HostConfig"]["NetworkMode"] == "none"
        assert found["Config"]["Labels"]["quintain.network"] == "proxy"
        connect = "import socket; print(socket.socket().connect_ex(('192.0.2.1', 80)))"
        assert python(box, connect) == "101\n"  # ENETUNREACH
        assert python(box, connect.replace("192.0.2.1", host).replace("80", port)) == "111\n"  # its own loopback
    rows = {row["name"] for row in pool.audit}
    assert "169.254.169.254 by the proxy" in rows and "routes" in rows and not failures(pool.audit)


def test_fifty_connections_at_once(pool: SandboxPool, server: str):
    source = (
        "import concurrent.futures as f, urllib.request as u\n"
        f"def get(n): return u.urlopen('http://{server}/%d' % n, timeout=50).read().decode().split()[0]\n"
        "with f.ThreadPoolExecutor(50) as e: print(list(e.map(get, range(100))) == ['/%d' % n for n in range(100)])"
    )
    with pool.lease() as box:
        assert python(box, source) == "True\n"


def test_a_large_download_costs_its_owner_no_memory(pool: SandboxPool, server: str):
    """A client that reads slowly at first fills the windows, and nothing beyond them."""
    source = (
        f"import time, urllib.request as u\nr = u.urlopen('http://{server}/large', timeout=30); time.sleep(1); n = 0\n"
        "while True:\n  d = r.read(65536)\n  n += len(d)\n  if not d: break\nprint(n)"
    )
    with pool.lease() as box:
        python(box, get(server))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert python(box, source) == f"{LARGE_BYTES}\n"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024


def test_the_relay_is_started_again_where_a_job_ended_it_or_holds_it(pool: SandboxPool, server: str):
    with pool.lease() as box:
        assert python(box, get(server))
        box.exec("kill -9 -1")
        assert python(box, get(server))
        assert box.exec("sleep 60", timeout_s=0.3).timed_out  # the deadline ends every process
        assert python(box, get(server))


def test_a_job_that_takes_the_port_spoils_only_its_own_way_out(pool: SandboxPool, server: str):
    squat = (
        "import os, signal, socket, time\n"
        "for pid in (int(p) for p in os.listdir('/proc') if p.isdigit()):\n"
        "  if pid not in (1, os.getpid()): os.kill(pid, signal.SIGKILL)\n"
        "time.sleep(0.2); s = socket.create_server(('127.0.0.1', 3128))\n"
        "if os.fork() == 0: os.setsid(); time.sleep(99)\n"
    )
    with pool.lease() as box:
        first = box.id
        assert box.exec(["python3", "-c", squat], timeout_s=5).exit_code == 0
        assert box.exec("echo on").stdout == "on\n"
    with pool.lease() as box:
        assert box.id == first and python(box, get(server))


def test_a_reset_ends_the_relay_and_the_next_user_of_the_box_has_another(pool: SandboxPool, server: str):
    with pool.lease() as box:
        first = box.id
        assert python(box, get(server))
    with pool.lease() as box:
        assert box.id == first and python(box, get(server))
    assert pool.num_replaced == 0
