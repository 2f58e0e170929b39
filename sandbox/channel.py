"""The client's side of the agent's protocol, over any pair of byte streams.

One request at a time. A channel that ended, holds something else than our frames, was left in the middle of a request,
or did not answer by the deadline is broken for good: nobody can tell any more which answer belongs to which request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from quintain.sandbox.agent_frames import FRAME, MAX_BODY_BYTES, pack, unpack_sizes
from quintain.sandbox.base import SandboxDied, SandboxTimeout


class Channel:
    """Requests to one agent. `write` queues bytes for it, `reader` gives its answers, `last_words` its stderr."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        write: Callable[[bytes], None],
        *,
        box: str,
        last_words: Callable[[], str] = lambda: "",
    ) -> None:
        self._reader = reader
        self._write = write
        self._box = box
        self._last_words = last_words
        self._lock = asyncio.Lock()
        self._number = 0
        self.broken: str | None = None
        """Why the channel can't be used any more; None while it can."""

    async def request(self, header: Mapping[str, Any], body: bytes = b"", *, timeout_s: float) -> tuple[dict, bytes]:
        """Send one request and wait for its answer: header and body.

        Raises SandboxDied (the stream ended or holds garbage), SandboxTimeout (no answer in `timeout_s`).
        """
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(
                f"a request holds at most {MAX_BODY_BYTES} bytes, this one {len(body)}; write a file instead"
            )
        async with self._lock:
            if self.broken is not None:
                raise SandboxDied(f"box {self._box} is gone: {self.broken}")
            self._number += 1
            self.broken = f"request {self._number} ({header['op']}) was left unfinished"
            try:
                async with asyncio.timeout(timeout_s):
                    self._write(pack({**header, "id": self._number}, body))
                    answer = await self._answer()
            except TimeoutError:
                self.broken = f"no answer to {header['op']} in {timeout_s:.1f} s"
                raise SandboxTimeout(f"box {self._box}: {self.broken}") from None
            except asyncio.IncompleteReadError:
                self.broken = f"its channel ended during {header['op']}{self._stderr()}"
                raise SandboxDied(f"box {self._box} died: {self.broken}") from None
            except (OSError, ValueError) as error:
                self.broken = f"its channel failed during {header['op']}: {error}{self._stderr()}"
                raise SandboxDied(f"box {self._box} died: {self.broken}") from error
            self.broken = None
            return answer

    async def _answer(self) -> tuple[dict, bytes]:
        header_bytes, body_bytes = unpack_sizes(await self._reader.readexactly(FRAME.size))
        header = json.loads(await self._reader.readexactly(header_bytes))
        body = await self._reader.readexactly(body_bytes)
        if header.pop("id", None) != self._number:
            raise ValueError(f"answer to another request than {self._number}")
        return header, body

    def _stderr(self) -> str:
        words = self._last_words().strip()
        return f"; it said: {words[-800:]}" if words else ""
