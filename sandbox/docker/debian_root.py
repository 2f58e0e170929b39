"""A small Debian root (shell, coreutils, python3; git without Perl) as a tar, from this machine's installed packages.

No download and no sub-process: dpkg's database names the packages' files and dependencies. Only files that packages own
go in, and none of /etc, where an administrator's settings are. Set-uid bits are dropped.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import re
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ADMIN = Path("/var/lib/dpkg")
NEEDED = ["base-files", "bash", "coreutils", "dash", "grep", "libc-bin", "python3", "sed"]
WANTED = ["bc", "debianutils", "diffutils", "findutils", "gawk", "git", "gzip", "mawk", "procps", "tar", "util-linux"]
SKIPPED_PACKAGES = {
    "adduser", "base-passwd", "debconf", "dpkg", "git-man", "init-system-helpers", "install-info", "liberror-perl",
    "login", "lsb-base", "mount", "passwd", "perl", "perl-base", "sysvinit-utils", "tzdata",
}  # fmt: skip
SKIPPED_PATHS = re.compile(
    r"/(etc|var|boot|home|root)(/|$)|/usr/share/(man|doc|locale|info|lintian|bug|menu|bash-completion|doc-base)(/|$)"
    r"|/usr/lib/python3\.\d+/(test|idlelib|lib2to3|ensurepip|turtledemo)(/|$)"
)
FOLDERS = {
    "etc": 0o755, "root": 0o700, "tmp": 0o1777, "var": 0o755, "var/tmp": 0o755, "proc": 0o555, "sys": 0o555,
    "dev": 0o755, "run": 0o755, "home": 0o755, "work": 0o755, "usr": 0o755, "usr/bin": 0o755, "usr/sbin": 0o755,
    "usr/lib": 0o755, "usr/lib64": 0o755,
}  # fmt: skip
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nsandbox:x:1000:1000::/work:/bin/sh\n",
    "etc/group": "root:x:0:\nsandbox:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class PackagesMissing(Exception):
    """This machine is no Debian or Ubuntu with the packages that a box needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootPlan:
    """Which packages make the root. Example: ``RootPlan(packages={"dash": "amd64"}, digest="3f9a…")``"""

    packages: Mapping[str, str]
    """Package name -> architecture."""
    digest: str
    """16 hex digits over the packages' versions and the way the root is made."""


def plan_root() -> RootPlan:
    """Choose the packages. Raises PackagesMissing."""
    if not (ADMIN / "status").exists() or not os.path.islink("/bin"):
        raise PackagesMissing("no dpkg database, or /bin is not merged into /usr")
    installed, provides = _installed()
    missing = [name for name in NEEDED if name not in installed]
    if missing:
        raise PackagesMissing(f"not installed: {' '.join(missing)}")
    chosen = _closure([*NEEDED, *(name for name in WANTED if name in installed)], installed, provides)
    text = "".join(f"{name}={installed[name].get('Version')}\n" for name in chosen)
    source = inspect.getsource(sys.modules[__name__])
    return RootPlan(
        packages={name: installed[name]["Architecture"] for name in chosen},
        digest=hashlib.sha256((source + text).encode()).hexdigest()[:16],
    )


def write_root(plan: RootPlan, file: IO[bytes]) -> None:
    """Write the root as an uncompressed tar."""
    with tarfile.open(fileobj=file, mode="w|", bufsize=1 << 20, format=tarfile.GNU_FORMAT) as tar:
        done: set[str] = set()

        def add(name: str, mode: int, kind: bytes = tarfile.REGTYPE, *, data: bytes = b"", link: str = "") -> None:
            entry = tarfile.TarInfo(name)
            entry.mode, entry.type, entry.linkname, entry.size = mode, kind, link, len(data)
            tar.addfile(entry, io.BytesIO(data))
            done.add(name)

        def add_parents(name: str) -> None:
            folder = os.path.dirname(name)
            if folder and folder not in done:
                add_parents(folder)
                add(folder, 0o755, tarfile.DIRTYPE)

        for name, mode in FOLDERS.items():
            add(name, mode, tarfile.DIRTYPE)
        for name in ("bin", "sbin", "lib", "lib64"):
            add(name, 0o777, tarfile.SYMTYPE, link=f"usr/{name}")
        for name, text in FILES.items():
            add(name, 0o644, data=text.encode())
        for name in ("awk", "which"):  # made by update-alternatives, so no package's list has them
            target = os.path.realpath(f"/usr/bin/{name}")
            if os.path.exists(target):
                add(f"usr/bin/{name}", 0o777, tarfile.SYMTYPE, link=os.path.basename(target))
        for path in _paths(plan.packages):
            name = path.lstrip("/")
            if name in done or not os.path.lexists(path):
                continue
            add_parents(name)
            if os.path.islink(path):
                add(name, 0o777, tarfile.SYMTYPE, link=os.readlink(path))
            elif os.path.isdir(path):
                add(name, 0o755, tarfile.DIRTYPE)
            elif os.path.isfile(path):
                with open(path, "rb") as source:
                    add(name, os.fstat(source.fileno()).st_mode & 0o755, data=source.read())


def _installed() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Installed packages by name, and which package provides which virtual one."""
    installed: dict[str, dict[str, str]] = {}
    provides: dict[str, str] = {}
    fields = re.compile(r"^(Package|Status|Version|Architecture|Depends|Pre-Depends|Provides): (.*)$", re.MULTILINE)
    for paragraph in (ADMIN / "status").read_text(encoding="utf-8", errors="replace").split("\n\n"):
        package = dict(fields.findall(paragraph))
        if package.get("Status") != "install ok installed":
            continue
        installed.setdefault(package["Package"], package)
        for virtual in package.get("Provides", "").split(","):
            provides.setdefault(virtual.split("(")[0].strip(), package["Package"])
    return installed, provides


def _closure(
    names: Iterable[str], installed: Mapping[str, Mapping[str, str]], provides: Mapping[str, str]
) -> list[str]:
    """The packages and all that they depend on, as far as installed."""
    todo, chosen = list(names), set()
    while todo:
        name = provides.get(todo[-1], todo[-1]) if todo[-1] not in installed else todo[-1]
        todo.pop()
        if name in chosen or name in SKIPPED_PACKAGES or name not in installed:
            continue
        chosen.add(name)
        depends = ",".join(installed[name].get(field, "") for field in ("Depends", "Pre-Depends"))
        for clause in filter(None, (part.strip() for part in depends.split(","))):
            choices = [re.split(r"[ (:]", choice.strip())[0] for choice in clause.split("|")]
            todo += [choice for choice in choices if choice in installed or choice in provides][:1]
    return sorted(chosen)


def _paths(packages: Mapping[str, str]) -> list[str]:
    """Every path of the packages, with links to /usr folded, and the compiled form of Python files."""
    real: dict[str, str] = {}
    paths: set[str] = set()
    for name, architecture in packages.items():
        lists = (ADMIN / "info" / f"{name}.list", ADMIN / "info" / f"{name}:{architecture}.list")
        for line in next((file.read_text() for file in lists if file.exists()), "").splitlines():
            if line in ("/.", "/") or SKIPPED_PATHS.match(line):
                continue
            folder, base = os.path.split(line)
            folder = real.setdefault(folder, os.path.realpath(folder))
            paths.add(os.path.join(folder, base))
            if base.endswith(".py"):
                cache = os.path.join(folder, "__pycache__")
                if cache not in real:
                    real[cache] = " ".join(os.listdir(cache)) if os.path.isdir(cache) else ""
                paths.update(
                    os.path.join(cache, entry)
                    for entry in re.findall(rf"\b{re.escape(base[:-3])}\.cpython-\d+\.pyc\b", real[cache])
                )
    return sorted(paths)
