"""Which hosts a box may reach through the proxy, and which addresses a name may stand for.

An entry is `host` (ports 80 and 443), `host:port`, `*.suffix` or `*.suffix:port` (names below it, not itself). A name
reaches public addresses only, whatever it resolves to: else whoever owns a listed name could point it at the machine's
own services. Loopback, private, link-local and metadata addresses are reached only where they are listed as literal
addresses (`10.0.0.5:8000`, `[::1]:80`), loopback also as `localhost`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

DEFAULT_PORTS = frozenset({80, 443})
NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowList:
    """Example: ``AllowList(["pypi.org", "*.example.org:443"]).allows("pypi.org", 443)``"""

    def __init__(self, entries: Sequence[str]) -> None:
        self._ports: dict[str, set[int]] = {}
        for entry in entries:
            host, port = split(entry)
            self._ports.setdefault(normal(host), set()).update(DEFAULT_PORTS if port is None else {port})

    def allows(self, host: str, port: int) -> bool:
        """Whether an entry names this host (as it was asked for) and port."""
        host = normal(host)
        labels = [] if literal(host) is not None else host.split(".")
        names = [host, *("*." + ".".join(labels[start:]) for start in range(1, len(labels)))]
        return any(port in self._ports.get(name, ()) for name in names)

    def allows_address(self, host: str, address: str) -> bool:
        """Whether a connection that was asked for by this listed name may go to this address."""
        found = literal(address.partition("%")[0])
        if found is None:
            return False
        return is_public(found) or literal(normal(host)) == found or (normal(host) == "localhost" and found.is_loopback)


def split(entry: str) -> tuple[str, int | None]:
    """`host:port`, `[address]:port` or either without its port. Raises ValueError."""
    host, colon, port = entry.rpartition(":")
    if not colon or entry.endswith("]"):
        host, port = entry, ""
    if host.startswith("["):
        if not host.endswith("]") or literal(host[1:-1]) is None:
            raise ValueError(f"{entry!r} is no address")
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{entry!r}: an IPv6 address needs brackets")
    if not port:
        return host, None
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{entry!r} has no port between 1 and 65535")
    return host, int(port)


def normal(host: str) -> str:
    """A host as it is compared: small letters, no dot at the end, addresses in their one short form."""
    host = host.lower().removesuffix(".")
    address = literal(host)
    return host if address is None else str(address)


def literal(host: str) -> Address | None:
    """The address that the text is, None where it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether anybody on the internet may have it; an IPv4 address inside an IPv6 one counts as itself."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
