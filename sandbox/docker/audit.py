"""The audit: does a box protect what it should? Looked at from inside the box, never taken from what was asked for.

    facts = one script's report from inside      rows = facts judged against the config      ok = every row is

A fact that is missing counts against the box. The engine's word (`docker inspect`) is not used: an engine may accept a
setting and ignore it, as rootless ones do with limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quintain.sandbox import relay
from quintain.sandbox.allow_list import AllowList
from quintain.sandbox.base import SandboxError
from quintain.sandbox.config import SandboxConfig

if TYPE_CHECKING:
    from quintain.sandbox.agent_sandbox import AgentSandbox

AUDIT_TIMEOUT_S = 20.0
FIRST_PROCESS = "first process"
DEFAULT_CAPABILITIES = 0xA80425FB
"""The set that Docker gives to root unasked; a relaxed box may have these and no other."""
OWN_VARIABLES = {"HOME", "LANG", "PATH", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_"}
PROXY_VARIABLES = {"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NO_PROXY", "no_proxy"}
UNLISTED = "unlisted.quintain.invalid"
SYSTEM_MOUNTS = re.compile(r"/(proc|sys|dev/pts|dev/mqueue)(/.*)?$|/dev(/console)?$")
ENGINE_FILES = {"/etc/resolv.conf", "/etc/hostname", "/etc/hosts"}
NETWORK_PROBE = """
import socket, struct, sys
addresses = [("metadata", "169.254.169.254"), ("outside", "192.0.2.1")]
with open("/proc/net/route") as file:
    gateways = [line.split()[2] for line in file.readlines()[1:] if line.split()[1] == "00000000"]
addresses += [("gateway", socket.inet_ntoa(struct.pack("=I", int(gateway, 16)))) for gateway in gateways]
for name, address in addresses:
    probe = socket.socket()
    probe.settimeout(1)
    try:
        probe.connect((address, 80))
        print(name, "reached")
    except ConnectionRefusedError:
        print(name, "reached")
    except OSError as error:
        print(name, "unreachable")
"""
PROXY_PROBE = f"""
import socket
for name, host in (("proxy-unlisted", "{UNLISTED}"), ("proxy-metadata", "169.254.169.254")):
    try:
        probe = socket.create_connection(("{relay.HOST}", {relay.PORT}), timeout=5)
        probe.sendall(("CONNECT " + host + ":80 HTTP/1.1\\r\\n\\r\\n").encode())
        print(name, probe.recv(64).decode("latin-1").split(" ")[1])
    except (OSError, IndexError):
        print(name, "nothing")
"""
SCRIPT = r"""
show() { echo "== $1"; shift; "$@" 2>/dev/null; }
show status cat /proc/self/status
show uid_map cat /proc/self/uid_map
show mounts cat /proc/self/mountinfo
show limits cat /proc/self/limits
show routes cat /proc/net/route
show routes6 cat /proc/net/ipv6_route
show interfaces cat /proc/net/dev
show memory cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes
show pids cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max
show cpu cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu/cpu.cfs_period_us
show environment env
show first cat /proc/1/cmdline
echo
echo "== opened"
for file in /proc/1/environ /proc/1/mem /proc/1/fd/0; do (: <$file) 2>/dev/null && echo "$file"; done
echo "== written"
for folder in / /etc /usr /usr/bin /sys /sys/fs/cgroup /proc/sys/kernel /dev; do
  (: >"$folder/.quintain-audit") 2>/dev/null && { echo "$folder"; rm -f "$folder/.quintain-audit"; }
done
echo "== ran"
for folder in /work /tmp /dev/shm; do
  file=$folder/.quintain-audit
  (echo '#!/bin/sh' >$file; chmod 755 $file; $file) 2>/dev/null && echo "$folder"
  rm -f $file
done
echo "== sockets"
for file in /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock; do [ -e $file ] && echo $file; done
echo "== disks"
for file in /dev/* /dev/*/*; do [ -b "$file" ] && echo "$file"; done
echo "== end"
"""

Row = dict[str, Any]


async def audit_box(box: AgentSandbox, config: SandboxConfig, *, image_env: Sequence[str] = ()) -> list[Row]:
    """Look at a started box from inside; a row a check: name, ok, expected, found. Raises SandboxError."""
    result = await box.exec(SCRIPT, timeout_s=AUDIT_TIMEOUT_S)
    facts = _sections(result.stdout)
    if result.timed_out or "end" not in facts:
        raise SandboxError(f"the audit of box {box.id} did not end: {result.stderr[-400:] or result.stdout[-400:]}")
    probe = await box.exec(["python3", "-I", "-S", "-c", NETWORK_PROBE], timeout_s=AUDIT_TIMEOUT_S)
    facts["probe"] = probe.stdout if probe.exit_code == 0 else ""
    if config.network == "proxy":
        probe = await box.exec(["python3", "-I", "-S", "-c", PROXY_PROBE], timeout_s=AUDIT_TIMEOUT_S)
        facts["probe"] += probe.stdout
    return judge(facts, config, image_env=image_env, has_agent=not getattr(box, "python_missing", False))


def failures(rows: Sequence[Row]) -> list[Row]:
    """Those rows that are not as they should be."""
    return [row for row in rows if not row["ok"]]


def judge(
    facts: Mapping[str, str], config: SandboxConfig, *, image_env: Sequence[str] = (), has_agent: bool = True
) -> list[Row]:
    """Compare what was seen inside with what the config promises."""
    return [
        *_identity(facts, config),
        *_mounts(facts, config),
        *_network(facts, config),
        *_limits(facts, config),
        *_surroundings(facts, config, image_env, has_agent=has_agent),
    ]


def _row(name: str, ok: bool, expected: str, found: object) -> Row:
    return {"name": name, "ok": bool(ok), "expected": expected, "found": str(found)}


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^== (\w+)\n", text, flags=re.MULTILINE)
    return {name: body.strip("\n") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _identity(facts: Mapping[str, str], config: SandboxConfig) -> Iterator[Row]:
    status = dict(re.findall(r"^(\w+):\s*(.*)$", facts.get("status", ""), re.MULTILINE))
    relaxed, gvisor = config.profile == "relaxed", config.runtime == "runsc"
    for name, field in (("user", "Uid"), ("group", "Gid")):
        numbers = status.get(field, "").split()
        right = bool(numbers) and (relaxed or "0" not in numbers)
        yield _row(name, right, "any (relaxed)" if relaxed else "not 0", " ".join(numbers) or "not told")
    held = {name: status.get(name) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    allowed = DEFAULT_CAPABILITIES if relaxed else 0
    told = {name: value for name, value in held.items() if value is not None}
    right = len(told) >= 4 and all(int(value, 16) & ~allowed == 0 for value in told.values())
    found = ", ".join(f"{name} {int(value, 16):x}" for name, value in told.items())
    yield _row("capabilities", right, f"none but {allowed:x} (relaxed)" if relaxed else "none", found or "not told")
    privileges = status.get("NoNewPrivs")
    yield _row("no new privileges", privileges == "1" or (gvisor and privileges is None), "1", privileges)
    seccomp = status.get("Seccomp")
    if gvisor:  # its own kernel answers the box's calls, and confines itself towards the machine's
        yield _row("seccomp", True, "gVisor's own kernel", seccomp)
    else:
        yield _row("seccomp", seccomp == "2", "2 (filter)", seccomp)
    maps = " ".join(facts.get("uid_map", "").split())
    whose = "the same ids as outside" if maps.startswith("0 0 ") else "other ids than outside"
    yield _row("uid map", bool(maps), "told", f"{maps} ({whose})")


def _mounts(facts: Mapping[str, str], config: SandboxConfig) -> Iterator[Row]:
    from quintain.sandbox.docker.box import folder_sizes

    mounts = [line.split() for line in facts.get("mounts", "").splitlines() if " - " in line]
    flags = {fields[4]: fields[5].split(",") for fields in mounts}
    relaxed = config.profile == "relaxed"
    written = facts.get("written", "").split()
    if not relaxed:
        yield _row("root", "ro" in flags.get("/", []), "read-only", ",".join(flags.get("/", ["not told"])))
        yield _row("writable places", not written, "none outside the tmpfs folders", " ".join(written) or "none")
    sizes = folder_sizes(config)
    must = set() if config.runtime == "runsc" else {"nosuid", "nodev"}  # gVisor shows neither; its guests gain by none
    strange = []
    for fields in mounts:
        path, kind = fields[4], fields[fields.index("-") + 1]
        known = path in sizes or SYSTEM_MOUNTS.match(path) or (path == "/" and kind in ("overlay", "9p", "rootfs"))
        if path in ENGINE_FILES and (relaxed or "ro" in fields[5].split(",")):
            known = True
        if not known and path != "/":
            strange.append(f"{path} ({kind}, {fields[5]})")
    yield _row("mounts", bool(mounts) and not strange, "nothing of the machine's", "; ".join(strange) or len(mounts))
    for folder, size in sizes.items():
        fields = next((fields for fields in mounts if fields[4] == folder), None)
        options = fields[5].split(",") + fields[-1].split(",") if fields else []
        told = re.search(r"size=(\d+)([kmg]?)", ",".join(options))
        bytes_ = int(told[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[told[2]] if told else None
        right = bool(fields) and bytes_ is not None and bytes_ <= size + 4096 and must <= set(options)
        expected = ", ".join(["tmpfs", f"at most {size} bytes", *sorted(must)])
        yield _row(folder, right, expected, ",".join(options) or "no mount")
    if config.noexec:
        ran = facts.get("ran", "").split()
        yield _row("programs in writable folders", not ran, "none runs", " ".join(ran) or "none runs")


def _network(facts: Mapping[str, str], config: SandboxConfig) -> Iterator[Row]:
    names = re.findall(r"^\s*([\w.@-]+):", facts.get("interfaces", ""), re.MULTILINE)
    probe = dict(line.split() for line in facts.get("probe", "").splitlines())
    ipv4 = [line.split() for line in facts.get("routes", "").splitlines()[1:]]
    ipv6 = [line.split() for line in facts.get("routes6", "").splitlines()]
    outward = [fields[0] for fields in ipv4 if fields[1] == "00000000"]
    outward += [fields[9] for fields in ipv6 if fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo"]
    if config.network in ("none", "proxy"):
        others = [name for name in names if name != "lo"]
        yield _row("interfaces", bool(names) and not others, "lo", " ".join(names) or "not told")
        yield _row("routes", not outward, "no way outward", ", ".join(outward) or f"{len(ipv4)} routes, none outward")
    words = {"metadata": "metadata address", "outside": "an address outside", "gateway": "the machine"}
    for name, word in words.items():
        if name == "gateway" and not outward:
            continue
        found = probe.get(name) or ("not tried" if outward else "no route (no python3 to try with)")
        yield _row(word, found not in ("reached", "not tried"), "unreachable", found)
    if config.network == "proxy":
        allowed = AllowList(config.allowed_hosts)
        for name, host in (("proxy-unlisted", UNLISTED), ("proxy-metadata", "169.254.169.254")):
            if not allowed.allows(host, 80):
                yield _row(f"{host} by the proxy", probe.get(name) == "403", "403", probe.get(name) or "not tried")


def _limits(facts: Mapping[str, str], config: SandboxConfig) -> Iterator[Row]:
    def number(name: str) -> int | None:
        values = facts.get(name, "").split()
        return int(values[0]) if values and values[0].lstrip("-").isdigit() else None

    gvisor = config.runtime == "runsc"  # its guests see no control groups
    for name, most in (("memory", config.memory_bytes), ("pids", config.pids)):
        found = number(name)
        right = (found is not None and 0 < found <= most) or (gvisor and found is None)
        yield _row(f"{name} limit", right, f"at most {most}", "not visible in gVisor" if found is None else found)
    quota = facts.get("cpu", "").split()
    cpus = None
    if len(quota) >= 2 and quota[0].lstrip("-").isdigit() and int(quota[0]) > 0:
        cpus = int(quota[0]) / int(quota[1])
    right = (cpus is not None and cpus <= config.cpus + 0.01) or (gvisor and cpus is None)
    yield _row("CPU limit", right, f"at most {config.cpus:g} cores", "none seen" if cpus is None else f"{cpus:g} cores")
    for name, line, most in (("open files", "open files", config.open_files), ("core files", "core file size", 0)):
        found = re.search(rf"^Max {line}\s+(\S+)\s+(\S+)", facts.get("limits", ""), re.MULTILINE)
        right = found is not None and found[2].isdigit() and int(found[2]) <= most
        yield _row(name, right or (gvisor and found is None), f"at most {most}", found[2] if found else "not told")


def _surroundings(
    facts: Mapping[str, str], config: SandboxConfig, image_env: Sequence[str], *, has_agent: bool
) -> Iterator[Row]:
    ours = OWN_VARIABLES | (PROXY_VARIABLES if config.network == "proxy" else set())
    allowed = ours | {pair.partition("=")[0] for pair in image_env}
    names = re.findall(r"^(\w+)=", facts.get("environment", ""), re.MULTILINE)
    foreign = sorted(set(names) - allowed)
    yield _row("environment", bool(names) and not foreign, "only the image's and ours", " ".join(foreign or names))
    sockets, disks = facts.get("sockets", ""), facts.get("disks", "")
    yield _row("engine's socket", not sockets, "none", sockets or "none")
    yield _row("disks", not disks, "none", disks or "none")
    first, opened = facts.get("first", "").strip("\0\n "), facts.get("opened", "")
    if has_agent:
        yield _row(
            FIRST_PROCESS, bool(first) and not opened, "memory and files shut", " ".join(opened.split()) or "shut"
        )
    else:
        yield _row(FIRST_PROCESS, True, "the engine vouches for exit codes", first.split("\0")[0] or "not told")
