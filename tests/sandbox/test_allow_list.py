"""The parts of the proxy that need no box: allow-list, addresses, request heads, frames, the log, settings."""

from __future__ import annotations

import asyncio

import pytest

from quintain.sandbox import relay
from quintain.sandbox.allow_list import AllowList, is_public, literal
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.network_log import MAX_ENTRIES, OTHERS, NetworkLog
from quintain.sandbox.proxy import Refused, parse
from quintain.sandbox.relay_link import RelayLink, RelayStream

LISTED = AllowList(["pypi.org", "a.org:8080", "*.b.org", "10.0.0.5:80", "localhost:1", "[::1]:2"])


@pytest.mark.parametrize("host", ["pypi.org:80", "PyPI.org.:443", "a.org:8080", "x.b.org:443", "y.x.b.org:80", "::1:2"])
def test_listed_hosts_are_allowed(host: str):
    name, _, port = host.rpartition(":")
    assert LISTED.allows(name, int(port))


@pytest.mark.parametrize(
    "host", ["pypi.org:22", "x.pypi.org:80", "a.org:80", "b.org:80", "xb.org:80", "10.0.0.6:80", "org:80", "5:80"]
)
def test_other_hosts_are_not(host: str):
    name, _, port = host.rpartition(":")
    assert not LISTED.allows(name, int(port))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "fec0::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "::127.0.0.1",
        "2001:0:1::1",
        "192.0.2.1",
        "fd00:ec2::254",
    ],
)
def test_addresses_that_are_not_public_are_reached_by_no_name(address: str):
    found = literal(address)
    assert found is not None and not is_public(found)
    assert not LISTED.allows_address("pypi.org", address)


def test_public_and_literally_listed_addresses_are_reached():
    for address in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert LISTED.allows_address("pypi.org", address)
    assert LISTED.allows_address("10.0.0.5", "10.0.0.5") and LISTED.allows_address("localhost", "127.0.0.1")
    assert not LISTED.allows_address("localhost", "10.0.0.5") and not LISTED.allows_address("10.0.0.6", "10.0.0.5")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"network": "proxy"}, "set allowed_hosts"),
        ({"allowed_hosts": ["a.org"]}, "set network=proxy"),
        ({"network": "proxy", "allowed_hosts": ["http://a.org/"]}, "without http://"),
        ({"network": "proxy", "allowed_hosts": ["*"]}, "is no host"),
        ({"network": "proxy", "allowed_hosts": ["a.org:70000"]}, "is no host"),
        ({"network": "proxy", "allowed_hosts": ["a.org"], "type": "local"}, "set type=docker"),
    ],
)
def test_settings_that_make_no_sense_together_name_the_remedy(settings: dict, remedy: str):
    with pytest.raises(ValueError, match=remedy):
        SandboxConfig.model_validate(settings)


def test_heads_are_taken_apart_and_lose_what_is_for_the_proxy_only():
    request = parse(b"GET http://A.org:81/x?y HTTP/1.1\r\nHost: evil\r\nProxy-Authorization: z\r\nAccept: a")
    assert (request.host, request.port) == ("a.org", 81)
    assert request.head == b"GET /x?y HTTP/1.1\r\nHost: A.org:81\r\nAccept: a\r\nConnection: close\r\n\r\n"
    request = parse(b"CONNECT [::1]:443 HTTP/1.1")
    assert (request.host, request.port, request.head) == ("::1", 443, b"")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GET / HTTP/1.1",
        b"GET ftp://a/ HTTP/1.1",
        b"CONNECT a.org HTTP/1.1",
        b"CONNECT a:0 HTTP/1.1",
        b"CONNECT a/b:1 X",
        b"GET http://a\x00b/ HTTP/1.1",
        b"GET http://a/ HTTP/1.1\nX: y",
        b"CONNECT \xff:1 HTTP/1.1",
        b"GET http://[/ HTTP/1.1",
    ],
)
def test_what_is_no_request_is_refused(head: bytes):
    with pytest.raises(Refused) as caught:
        parse(head)
    assert caught.value.status == 400


def frame(kind: int, number: int = 0, payload: bytes = b"") -> bytes:
    return relay.FRAME.pack(kind, number, len(payload)) + payload


HOSTILE = {
    "unknown kind": frame(99),
    "a frame too long": relay.FRAME.pack(relay.DATA, 1, 2**31),
    "a stream opened twice": frame(relay.OPEN, 1) * 2,
    "a stream never opened": frame(relay.DATA, 7, b"x"),
    "too many streams": b"".join(frame(relay.OPEN, number) for number in range(1, relay.MAX_STREAMS + 2)),
    "more than the window": frame(relay.OPEN, 1) + frame(relay.DATA, 1, bytes(2**15)) * 5,
    "a window too wide": frame(relay.OPEN, 1) + frame(relay.WINDOW, 1, b"\0\0\0\1"),
    "a window without size": frame(relay.OPEN, 1) + frame(relay.WINDOW, 1),
    "data after the end": frame(relay.OPEN, 1) + frame(relay.END, 1) + frame(relay.DATA, 1, b"x"),
    "empty data": frame(relay.OPEN, 1) + frame(relay.DATA, 1),
    "an answer to nothing": frame(relay.PONG),
    "started twice": frame(relay.READY) * 2,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_drop_the_relay_with_all_its_streams(name: str):
    async def scenario() -> None:
        streams: list[RelayStream] = []
        hung_up: list[bool] = []
        link = RelayLink(lambda data: None, streams.append, lambda: hung_up.append(True))
        for byte in HOSTILE[name]:
            link.feed(bytes([byte]))
        assert link.broken is not None and "protocol" in link.broken and hung_up == [True]
        assert all(stream.lost for stream in streams) and not await link.answers(1)

    asyncio.run(scenario())


def test_frames_for_a_stream_that_ended_here_are_ignored():
    async def scenario() -> None:
        streams: list[RelayStream] = []
        link = RelayLink(lambda data: None, streams.append, lambda: None)
        link.feed(frame(relay.OPEN, 3))
        streams[0].reset()
        link.feed(frame(relay.DATA, 3, b"late") + frame(relay.END, 3) + frame(relay.OPEN, 4))
        assert link.broken is None and [stream.number for stream in streams] == [3, 4]

    asyncio.run(scenario())


def test_a_flood_of_refusals_hides_no_access():
    log = NetworkLog()
    for number in range(2 * MAX_ENTRIES):
        log.add(f"h{number}", 80, allowed=False, reason="not listed")
    log.add("a.org", 443, allowed=True, sent_bytes=1, received_bytes=2)
    entries = log.entries()
    assert entries[0].host == "a.org" and len(entries) == MAX_ENTRIES + 2
    assert next(entry.num_requests for entry in entries if entry.host == OTHERS) == MAX_ENTRIES
