"""The other side of `child_process.py`: reads requests from a socket, calls functions, writes what they gave.

Ends when the socket is closed at the other end, also while a function runs: a thread watches. Where the function never
lets that thread run (a loop in C), the limit of CPU time does it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import resource
import select
import socket
import struct
import sys
import threading
import traceback
from typing import Any

from quintain.envs.child_process import ChildRaised

_HEADER = struct.Struct("!Q")
SPARE_CPU_S = 60
"""CPU seconds beyond the deadline after which the kernel ends us; the parent has long done so, unless it is gone."""


def serve(descriptor: int) -> None:
    """Answer requests until the other end is closed."""
    channel = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    while True:
        module, file, name, arguments, deadline_s, memory_bytes = pickle.loads(_read(channel))
        _limit(deadline_s, memory_bytes)
        try:
            function = _find(module, file, name)
            args, kwargs = pickle.loads(arguments)
            _write(channel, ("ready", None))
            answer = ("value", function(*args, **kwargs))
            _write(channel, answer)
        except BaseException as error:  # noqa: BLE001 - worker boundary: the caller gets it
            _write(channel, ("error", _portable(error)))


def _end_with_parent(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    while not poll.poll():
        pass
    os._exit(0)


def _limit(deadline_s: float, memory_bytes: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime + deadline_s) + SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _find(module: str, file: str | None, name: str) -> Any:
    """The function by its module and name; a module that can't be imported by name is loaded from its file."""
    found = sys.modules.get(module) if module != "__main__" else sys.modules.get("__mp_main__")
    if found is None and module != "__main__":
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module or file is None:
                raise
    if found is None:
        found = _load(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _load(module: str, file: str | None) -> Any:
    """A program that was run as a script is loaded without being one, so that its last lines start nothing here."""
    name = "__mp_main__" if module == "__main__" else module
    spec = importlib.util.spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise ImportError(f"module {module} has no file that could be loaded in another process")
    loaded = sys.modules[name] = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _portable(error: BaseException) -> BaseException:
    """The exception itself where it survives being pickled, with the place it came from as a note."""
    place = "".join(traceback.format_exception(error))[-4000:]
    try:
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(copy, Exception):
            copy.add_note(place)
            pickle.dumps(copy)
            return copy
    except Exception:  # noqa: BLE001 - whatever pickling it raises: it is told in words then
        pass
    raised = ChildRaised(f"{type(error).__name__}: {error}"[:2000])
    raised.add_note(place)
    return raised


def _write(channel: socket.socket, answer: tuple[str, Any]) -> None:
    data = pickle.dumps(answer)
    channel.sendall(_HEADER.pack(len(data)) + data)


def _read(channel: socket.socket) -> bytes:
    size = _HEADER.unpack(_exactly(channel, _HEADER.size))[0]
    return _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 2**20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)
