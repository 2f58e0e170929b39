"""Functions run in another process that can be killed: what hangs, eats memory or crashes there harms nothing here.

    run_in_child(f, *args) ── idle child, or a new one ──load f──> "ready" ──call──> value or exception ──> idle again
                                                          |                  |
                                                          ` START_TIMEOUT_S  ` deadline_s: killed with its descendants

Children are kept and used again, because importing a library (sympy, say) takes longer than most calls. A child is a
fresh interpreter, not a fork: a fork of a process with threads may deadlock. It ends when this process ends, even by
SIGKILL, and a limit of CPU time ends it where it can't notice. At most one child a core works; further calls wait for
one, no longer than the calls before them may take.
The function is found in the child by name, so it must stand at a module's top; arguments and result are pickled.
It confines nothing: a child has the rights of this process. What a model wrote belongs into a box.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

START_TIMEOUT_S = 120.0
"""How long a child may take to start and to import the function's module."""
MEMORY_BYTES = 8 * 2**30
"""Address space of a child; more makes its allocations fail."""
_HEADER = struct.Struct("!Q")
_BOOT = "import sys; from quintain.envs.child_main import serve; serve(int(sys.argv[1]))"


class ChildDeadline(Exception):
    """The function took longer than its deadline; its process was killed."""


class ChildDied(Exception):
    """The child ended without an answer: a crash, a limit of memory or CPU time."""


class ChildRaised(Exception):
    """The function raised something that can't be pickled; the message has its type and text."""


def run_in_child(function: Callable[..., Any], *args: Any, deadline_s: float, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` in a child. Raises ChildDeadline, ChildDied, what the function raises (or
    ChildRaised), and ValueError for a function that no other process can find."""
    request = _request(function, args, kwargs, deadline_s)
    with _working:
        child = _take_idle()
        try:
            kind, value = child.ask(request, deadline_s)
        except BaseException:
            child.kill()
            raise
        _give_back(child)
    if kind == "value":
        return value
    raise value


class _Child:
    """One interpreter that answers one request at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        env = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # Ctrl-C is for us; we end it ourselves
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes, deadline_s: float) -> tuple[str, Any]:
        """`("value", result)` or `("error", exception)`. Raises ChildDeadline, ChildDied."""
        until = time.monotonic() + START_TIMEOUT_S
        try:
            self._socket.settimeout(START_TIMEOUT_S)
            self._socket.sendall(_HEADER.pack(len(request)) + request)
            kind, value = self._receive(until)
            if kind == "ready":
                kind, value = self._receive(time.monotonic() + deadline_s)
        except TimeoutError:
            raise ChildDeadline(f"no answer within {deadline_s:g} s; its process was killed") from None
        except (ConnectionError, EOFError):
            code = self._process.wait(timeout=5.0)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ChildDied(f"its process ended without an answer ({how})") from None
        return kind, value

    def kill(self) -> None:
        """End it and everything that it started; returns when it is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, until: float) -> tuple[str, Any]:
        size = _HEADER.unpack(self._read(_HEADER.size, until))[0]
        return pickle.loads(self._read(size, until))

    def _read(self, size: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            part = self._socket.recv(min(size - len(data), 2**20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _request(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float) -> bytes:
    """What the child needs to find and call the function."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name or "<" in name or module not in sys.modules:
        raise ValueError(
            f"{name or function!r} can't be run in another process, which finds it by name; define it with `def` at "
            "the top of a module"
        )
    file = getattr(sys.modules[module], "__file__", None)
    return pickle.dumps((module, file, name, pickle.dumps((args, kwargs)), deadline_s, MEMORY_BYTES))


_lock = threading.Lock()
_idle: list[_Child] = []
_working = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))


def _take_idle() -> _Child:
    """A child that nobody uses; one that died meanwhile is left out."""
    with _lock:
        while _idle:
            child = _idle.pop()
            if child.alive:
                return child
            child.kill()
    return _Child()


def _give_back(child: _Child) -> None:
    with _lock:
        _idle.append(child)


def end_idle_children() -> None:
    """End the children that wait for work, as the interpreter does when it exits."""
    with _lock:
        children, _idle[:] = list(_idle), []
    for child in children:
        child.kill()


def _forget_after_fork() -> None:
    """The children are the parent's."""
    global _lock, _working
    _lock, _working = threading.Lock(), threading.BoundedSemaphore(max(2, os.cpu_count() or 1))
    _idle.clear()


atexit.register(end_idle_children)
os.register_at_fork(after_in_child=_forget_after_fork)
