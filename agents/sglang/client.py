"""`SGLangClient`: HTTP to one SGLang server, with typed errors. It knows no policy, no routing and no retries.

Errors say whether something may have been sampled: `EngineBusy` (no: try again), `EngineRefused` (no: the request is
wrong), `EngineLost` (perhaps). Connections live as long as one event loop uses the client; another loop gets new ones.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from quintain.agents.sglang.answers import AnswerError, EngineBusy, EngineError, EngineLost, EngineRefused

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 30.0
KEEP_IDLE_S = 3.0
"""Idle connections are dropped before the server's own 5 s are over: a request sent into a closing one is lost."""

OLDEST_VERSION = (0, 5, 23)
KNOWN_BAD = {
    "0.5.20": "updating weights from disk with paused requests waiting kills it, and it has no begin/end bracket",
    "0.5.12.post1": "log-probs kill its scheduler",
    "0.5.9": "it reads no tokenizer files of transformers 5",
}
"""Versions that were tried, and what is wrong with them."""
NEWEST_TRIED = (0, 5, 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says about itself.

    Example: ``ServerInfo(version="0.5.23", weight_version="4", max_context_tokens=4090, model_path="/models/m")``
    """

    version: str
    weight_version: str
    """As the server has it: `default` until it was told."""
    max_context_tokens: int
    """Most tokens of prompt and reply together that it takes."""
    model_path: str
    incremental_stream: bool = False
    """Its stream sends differences, which this client does not read."""


def check_version(version: str) -> str | None:
    """A notice where a version is newer than any that was tried. Raises EngineError for one known not to work."""
    reason = KNOWN_BAD.get(version)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if reason is None and numbers < OLDEST_VERSION:
        reason = "it does not say which weights sampled which token, or has no begin/end bracket around updates"
    if reason is not None:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise EngineError(f"SGLang {version} does not work here: {reason}; install sglang>={oldest}")
    if numbers > NEWEST_TRIED:
        return f"SGLang {version} is newer than the newest that was tried, {'.'.join(map(str, NEWEST_TRIED))}"
    return None


class SGLangClient:
    """One server at `url`. Use from one event loop at a time; `close` in that loop."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, max_connections: int | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, body: Mapping[str, Any]) -> object:
        """The whole answer to a `/generate` body, also where it is streamed. Raises EngineError."""
        if body.get("stream"):
            return await self._stream(body)
        return _json((await self._send("POST", "/generate", body, self._timeout_s)).content, self.url)

    async def abort(self, rid: str) -> None:
        """End a request; unknown ones are none of the server's business.

        The server ends every request whose id *starts* with `rid`, so no id may be the start of another.
        """
        if not rid:
            raise ValueError("an empty request id would end every request; use abort_all")
        await self._send("POST", "/abort_request", {"rid": rid, "abort_all": False}, CONTROL_TIMEOUT_S)

    async def abort_all(self) -> None:
        """End everything that runs or waits."""
        await self._send("POST", "/abort_request", {"rid": "", "abort_all": True}, CONTROL_TIMEOUT_S)

    async def healthy(self) -> bool:
        """It answers and can take requests (nothing is generated)."""
        return await self._answers("/health", CONNECT_TIMEOUT_S)

    async def ready(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """It can sample: it generated one token just now."""
        return await self._answers("/health_generate", timeout_s)

    async def info(self) -> ServerInfo:
        """Raises AnswerError where a field is missing."""
        info = await self._fields("/server_info")
        model = await self._fields("/model_info")
        try:
            return ServerInfo(
                version=str(info["version"]),
                weight_version=str(model["weight_version"]),
                max_context_tokens=int(info["max_req_input_len"]),
                model_path=str(model["model_path"]),
                incremental_stream=bool(info.get("incremental_streaming_output")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise AnswerError(
                f"{self.url}: server_info or model_info lacks {error}; is this an SGLang server?"
            ) from error

    async def command(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> str:
        """A POST of the control plane; the answer's text. Raises EngineError, also where it says `success: false`."""
        text = (await self._send("POST", path, body or {}, timeout_s)).text
        if text.lstrip().startswith("{") and json.loads(text).get("success") is False:
            raise EngineRefused(f"{self.url}{path}: {json.loads(text).get('message')}")
        return text

    async def close(self) -> None:
        """Close the connections; the client can be used again."""
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            limits = httpx.Limits(
                max_connections=self._max_connections,
                max_keepalive_connections=self._max_connections,
                keepalive_expiry=KEEP_IDLE_S,
            )
            # No proxy of the environment; no time limit on a place in the pool: the policy bounds what is in flight.
            self._http = httpx.AsyncClient(limits=limits, trust_env=False)
            self._loop = loop
        return self._http

    async def _answers(self, path: str, timeout_s: float) -> bool:
        try:
            await self._send("GET", path, None, timeout_s)
        except EngineError:
            return False
        return True

    async def _fields(self, path: str) -> dict[str, Any]:
        fields = _json((await self._send("GET", path, None, CONTROL_TIMEOUT_S)).content, self.url + path)
        if not isinstance(fields, dict):
            raise AnswerError(f"{self.url}{path}: not an object: {str(fields)[:200]!r}")
        return fields

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> httpx.Response:
        try:
            response = await self._client().request(method, self.url + path, json=body, timeout=_timeout(timeout_s))
        except httpx.HTTPError as error:
            raise self._lost(path, error) from error
        self._check(path, response)
        return response

    async def _stream(self, body: Mapping[str, Any]) -> object:
        last, whole = "", False
        try:
            async with self._client().stream(
                "POST", self.url + "/generate", json=body, timeout=_timeout(self._timeout_s)
            ) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    self._check("/generate", response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    whole = whole or data == "[DONE]"
                    if data and not whole:
                        last = data  # each part repeats all before it: only the last one is read
        except httpx.HTTPError as error:
            raise self._lost("/generate", error) from error
        if not whole:
            raise EngineLost(f"{self.url}/generate: the stream ended before its end was said")
        answer = _json(last.encode(), self.url)
        if isinstance(answer, dict) and "error" in answer:
            raise EngineRefused(f"{self.url}/generate: {_message(last)}")
        return answer

    def _check(self, path: str, response: httpx.Response) -> None:
        code = response.status_code
        if code == httpx.codes.OK:
            return
        text = f"{self.url}{path}: HTTP {code}: {_message(response.text)}"
        if code in (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS):
            raise EngineBusy(text)
        raise EngineRefused(text) if 400 <= code < 500 else EngineError(text)

    def _lost(self, path: str, error: httpx.HTTPError) -> EngineError:
        text = f"{self.url}{path}: {type(error).__name__}: {error}"
        unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        return EngineBusy(text) if unsent else EngineLost(text)


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s), pool=None)


def _json(content: bytes, where: str) -> object:
    try:
        return json.loads(content)
    except ValueError as error:
        raise AnswerError(f"{where}: the answer is no JSON: {content[:200]!r}") from error


def _message(text: str) -> str:
    """The sentence in an error body, or the body."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500]
