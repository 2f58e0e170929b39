"""A proxy in front of a real engine that fails every n-th create and every n-th remove with status 500."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

FAILURE = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b'Content-Length: 27\r\n\r\n{"message": "flaky engine"}'
)


class FlakyEngine:
    """Listens on a unix socket; one request a connection, so that every request can be counted."""

    def __init__(self, path: Path, target: str, *, every: int) -> None:
        self.num_failed = {"create": 0, "remove": 0}
        self.url = f"unix://{path}"
        self._target = target
        self._every = every
        self._seen = {"create": 0, "remove": 0}
        self._lock = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _fails(self, head: bytes) -> bool:
        kind = None
        if re.match(rb"POST \S*/containers/create", head):
            kind = "create"
        elif head.startswith(b"DELETE "):
            kind = "remove"
        if kind is None:
            return False
        with self._lock:
            self._seen[kind] += 1
            failed = self._seen[kind] % self._every == 0
            self.num_failed[kind] += failed
            return failed

    def rewrite(self, head: bytes, rest: bytes) -> tuple[bytes, bytes]:
        """What the engine gets instead of a request's head and body."""
        return head, rest

    def _serve(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                data = client.recv(65536)
                if not data:
                    return
                head += data
            head, _, rest = head.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\nContent-Length: (\d+)", head)
            while len(rest) < (int(length[1]) if length else 0):
                rest += client.recv(65536)
            if self._fails(head):
                client.sendall(FAILURE)
                return
            head, rest = self.rewrite(head, rest)
            if b"Upgrade: tcp" not in head:
                head = re.sub(rb"\r\nConnection: [^\r]*", b"", head) + b"\r\nConnection: close"
            with socket.socket(socket.AF_UNIX) as engine:
                engine.connect(self._target.removeprefix("unix://"))
                engine.sendall(head + b"\r\n\r\n" + rest)
                upward = threading.Thread(target=_pump, args=(client, engine), daemon=True)
                upward.start()
                _pump(engine, client)
                client.shutdown(socket.SHUT_RDWR)
                upward.join(5)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return
