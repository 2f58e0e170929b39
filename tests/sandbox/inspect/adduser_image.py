"""An image in which `adduser` works: the default image and some of this Debian machine's packages."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile

import docker

PACKAGES = [
    "adduser", "passwd", "login", "perl-base", "base-passwd", "libpam0g", "libpam-modules", "libpam-modules-bin",
    "libpam-runtime", "libaudit1", "libcap-ng0", "libcrypt1", "libdb5.3", "libselinux1", "libsemanage2", "libsepol2",
    "libpcre2-8-0", "libbz2-1.0", "libtirpc3", "libnsl2", "libgssapi-krb5-2", "libkrb5-3", "libk5crypto3",
    "libcom-err2", "libkrb5support0", "libkeyutils1", "libssl3",
]  # fmt: skip
SETTINGS = ["/etc/adduser.conf", "/etc/login.defs", "/etc/deluser.conf", "/etc/default/useradd", "/etc/pam.d"]
SKIPPED = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/lintian", "/etc/", "/.")
TEXTS = {"etc/shadow": "root:*:19000:0:99999:7:::\nsandbox:*:19000:0:99999:7:::\n", "etc/gshadow": "root:*::\n"}


def make_image(engine: docker.APIClient, base: str, name: str) -> None:
    """Import `name`:1, made from the image `base`."""
    container = engine.create_container(base, ["x"])["Id"]
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        for chunk in engine.export(container):
            file.write(chunk)
        file.flush()
        engine.remove_container(container, force=True)
        with tarfile.open(file.name, mode="a") as tar:
            there = set(tar.getnames())
            for path in _paths():
                # /bin and its like are links to /usr/bin in the image: a member below them would replace the link
                inside = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)).lstrip("/")
                if inside not in there and os.path.lexists(path) and not (os.path.isdir(path) and os.path.islink(path)):
                    tar.add(path, arcname=inside, recursive=path == "/etc/pam.d")
                    there.add(inside)
            for inside, text in TEXTS.items():
                with tempfile.NamedTemporaryFile("w") as source:
                    source.write(text)
                    source.flush()
                    entry = tar.gettarinfo(source.name, arcname=inside)
                    entry.mode, entry.uid, entry.gid = 0o600, 0, 0
                    with open(source.name, "rb") as content:
                        tar.addfile(entry, content)
        engine.import_image(file.name, repository=name, tag="1", changes=["ENV PATH=/usr/bin:/bin:/usr/sbin:/sbin"])


def _paths() -> list[str]:
    listed: list[str] = []
    for package in PACKAGES:
        answer = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True)
        listed += [line for line in answer.stdout.splitlines() if not line.startswith(SKIPPED)]
    return [*listed, *SETTINGS]
