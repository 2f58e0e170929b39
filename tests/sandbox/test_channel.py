"""A channel that ends, lies or is silent is a typed error, and is never used again."""

from __future__ import annotations

import asyncio

import pytest

from quintain.sandbox import SandboxDied, SandboxTimeout
from quintain.sandbox.agent_frames import pack
from quintain.sandbox.channel import Channel


async def ask(answer: bytes | None, *, eof: bool = False) -> Exception:
    """What a request raises where the other side says `answer`; the channel must then be broken."""
    reader = asyncio.StreamReader()
    channel = Channel(reader, lambda _: None, box="b", last_words=lambda: "Traceback: x")
    if answer is not None:
        reader.feed_data(answer)
    if eof:
        reader.feed_eof()
    with pytest.raises((SandboxDied, SandboxTimeout)) as caught:
        await channel.request({"op": "ping"}, timeout_s=0.1)
    with pytest.raises(SandboxDied, match="gone"):
        await channel.request({"op": "ping"}, timeout_s=0.1)
    return caught.value


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n", pack({"id": 7}), pack({"id": 1})[:16] + b"not json!", pack({})],
)
def test_garbage_or_the_answer_to_another_request_is_a_dead_box(answer: bytes):
    assert isinstance(asyncio.run(ask(answer)), SandboxDied)


def test_an_ended_stream_is_a_dead_box_with_its_last_words():
    for answer in (None, pack({"id": 1})[:10]):
        error = asyncio.run(ask(answer, eof=True))
        assert isinstance(error, SandboxDied) and "Traceback: x" in str(error)


def test_silence_is_a_timeout():
    assert isinstance(asyncio.run(ask(None)), SandboxTimeout)


def test_a_cancelled_request_breaks_the_channel():
    async def scenario() -> None:
        channel = Channel(asyncio.StreamReader(), lambda _: None, box="b")
        request = asyncio.ensure_future(channel.request({"op": "exec"}, timeout_s=5))
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert channel.broken is not None and "unfinished" in channel.broken

    asyncio.run(scenario())
