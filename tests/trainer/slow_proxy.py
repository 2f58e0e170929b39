"""A TCP proxy in front of a real server that holds back requests with a given path: a server that reads slowly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from urllib.parse import urlsplit


class SlowProxy:
    """Listens on a free port. Requests for `path` reach the server only after `delay_s`; infinite = never."""

    def __init__(self, url: str, *, path: str, delay_s: float) -> None:
        self._target = (urlsplit(url).hostname, urlsplit(url).port)
        self._path, self._delay_s = path.encode(), delay_s
        self.held = threading.Event()
        """Set when the first such request has come."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, requests: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if requests and self._path in data.split(b"\r\n", 1)[0]:
                    self.held.set()
                    if self._delay_s == float("inf"):
                        return
                    time.sleep(self._delay_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
