"""A tcp proxy in front of a real engine whose attach streams can be cut, as a network does."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutEngine:
    """Listens on a free port of this machine. Example: ``proxy = CutEngine(engine_url); …; proxy.cut()``"""

    def __init__(self, target: str) -> None:
        self.num_attached = 0
        self._target = target.removeprefix("unix://")
        self._attached: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every attach stream that there is now."""
        attached, self._attached = self._attached, []
        for end in attached:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            engine = socket.socket(socket.AF_UNIX)
            engine.connect(self._target)
            threading.Thread(target=self._pump, args=(client, engine, client), daemon=True).start()
            threading.Thread(target=self._pump, args=(engine, client, None), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, client: socket.socket | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if client is not None and b"/attach?" in data[:300]:
                    self.num_attached += 1
                    self._attached += [client, sink]
                    client = None
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
