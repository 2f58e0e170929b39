"""What a caller may ask of a box, checked before anything is sent: a wrong one is the caller's error, not the box's.

What a model writes (a command's text) may hold anything up to the size limit, and what the box's system refuses of it
is a result with exit code 126; these checks are for what only a program can get wrong.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from quintain.sandbox.agent_frames import MAX_BODY_BYTES, MAX_HEADER_BYTES

MAX_TIMEOUT_S = 86_400.0
"""The longest deadline of one command: a day."""
MAX_REQUEST_BYTES = MAX_HEADER_BYTES - 4096
"""Most bytes of a command with its cwd and env, as JSON; the rest of the header is for the numbers beside them."""
SHOWN_CHARACTERS = 80


def check_exec(
    command: str | Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
) -> None:
    """Raise TypeError or ValueError, naming the argument and its value, where a box can't be asked this."""
    if not isinstance(command, str):
        if isinstance(command, bytes | bytearray) or not isinstance(command, Sequence):
            raise TypeError(f"command={_shown(command)} is neither a str nor a sequence of str")
        for number, part in enumerate(command):
            _check_text(f"command[{number}]", part)
    check_timeout("timeout_s", timeout_s)
    check_bytes("stdin", stdin)
    for name, text in (("cwd", cwd), ("user", user)):
        if text is not None:
            _check_text(name, text)
    _check_env(env)
    parts = [command if isinstance(command, str) else list(command), cwd, dict(env or {})]
    size_bytes = len(json.dumps(parts))
    if size_bytes > MAX_REQUEST_BYTES:
        raise ValueError(
            f"command={_shown(command)} with cwd and env takes {size_bytes} bytes as JSON, more than "
            f"{MAX_REQUEST_BYTES}; write a file or use stdin instead"
        )


def check_timeout(name: str, seconds: float) -> None:
    """Raise TypeError or ValueError where this is no deadline from 0 to `MAX_TIMEOUT_S`."""
    if not isinstance(seconds, numbers.Real):
        raise TypeError(f"{name}={_shown(seconds)} is not a number of seconds")
    if math.isnan(seconds) or not 0 <= seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"{name}={seconds} is not between 0 and {MAX_TIMEOUT_S:.0f} seconds")


def check_bytes(name: str, data: bytes) -> None:
    """Raise TypeError or ValueError where this can't be sent as one request's bytes."""
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"{name}={_shown(data)} is not bytes")
    if len(data) > MAX_BODY_BYTES:
        raise ValueError(f"{name} holds {len(data)} bytes, more than {MAX_BODY_BYTES}; write a file instead")


def check_path(path: str) -> None:
    """Raise TypeError or ValueError where this is no path that can be sent."""
    _check_text("path", path)
    if len(json.dumps(path)) > MAX_REQUEST_BYTES:
        raise ValueError(f"path={_shown(path)} is {len(path)} characters long")


def check_number(name: str, number: int, least: int, most: int | None = None) -> None:
    """Raise TypeError or ValueError where this is no whole number in a range."""
    if not isinstance(number, int):
        raise TypeError(f"{name}={_shown(number)} is not an int")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={number} is not {f'between {least} and {most}' if most else f'at least {least}'}")


def _check_env(env: Mapping[str, str] | None) -> None:
    if env is None:
        return
    if not isinstance(env, Mapping):
        raise TypeError(f"env={_shown(env)} is not a mapping")
    for name, value in env.items():
        if not isinstance(name, str):
            raise TypeError(f"env has the name {_shown(name)}, which is not a str")
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"env has the name {_shown(name)}: it must not be empty or hold '=' or a NUL")
        _check_text(f"env[{_shown(name)}]", value)
        if "\0" in value:
            raise ValueError(f"env[{_shown(name)}]={_shown(value)} holds a NUL")


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name}={_shown(text)} is a {type(text).__name__}, not a str")


def _shown(value: Any) -> str:
    text = repr(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str | bytes | bytearray) else value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
