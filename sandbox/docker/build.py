"""Images without a registry: from a Dockerfile, a root file system (folder or tar), or this machine's own packages.

An image is named after its content (`quintain-image:<hash>`), so building the same again finds it and does nothing.
What counts: paths, kinds, modes, link targets and bytes of all that is sent, the way it is used, and the ids of the
images that a Dockerfile starts from. Times and the order of a folder's entries do not count, nor do owners beside a
Dockerfile.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from docker.utils.build import exclude_paths

from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.docker.debian_root import PackagesMissing
from quintain.sandbox.docker.engine import Engine, engine_errors
from quintain.sandbox.docker.image import CHANGES, Image, describe, from_this_machine, present

BUILT = "quintain-image"
LABEL = "quintain.image"
WAYS = {"file": "Dockerfile", "root": "root file system"}


class BuildError(SandboxUnavailable):
    """The image can't be built; the message says why and holds the end of the builder's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build came to. Example: ``Built(image=Image(…), source="Dockerfile", cached=True)``"""

    image: Image
    source: str
    """`Dockerfile`, `root file system` or `this machine's packages`."""
    cached: bool
    """It was there already."""


def build(engine: Engine, source: Path | None, *, network: str = "none", args: dict[str, str] | None = None) -> Built:
    """Build from a Dockerfile (or a folder with one), a root folder or a root tar; None = quintain's default image.

    `network`: of the Dockerfile's RUN lines (`none`, `default`, `host`). Raises BuildError, EngineError.
    """
    if source is None:
        return _default(engine)
    if not source.exists():
        raise BuildError(f"{source}: there is no such file or folder")
    with tempfile.NamedTemporaryFile(prefix="quintain-build-", suffix=".tar") as file:
        dockerfile = _dockerfile_of(source)
        if dockerfile is not None:
            words = [network, *(f"{name}={value}" for name, value in sorted((args or {}).items()))]
            digest = _pack_context(engine, dockerfile, file, words)
        else:
            digest = _pack_root(source, file)
        reference = f"{BUILT}:{digest}"
        way = WAYS["file" if dockerfile is not None else "root"]
        if present(engine, reference):
            return Built(image=describe(engine, reference), source=way, cached=True)
        file.flush()
        file.seek(0)
        if dockerfile is not None:
            _build(engine, file, dockerfile, reference, network, args or {})
        else:
            with engine_errors(f"import {source}"):
                engine.image_client().import_image(file.name, repository=BUILT, tag=digest, changes=CHANGES)
    return Built(image=describe(engine, reference), source=way, cached=False)


def _default(engine: Engine) -> Built:
    with engine_errors("list images"):
        before = {tag for image in engine.client().images() for tag in image.get("RepoTags") or ()}
    try:
        reference = from_this_machine(engine)
    except PackagesMissing as error:
        raise BuildError(
            f"quintain's own image is made of a Debian or Ubuntu machine's packages: {error}. Name a Dockerfile or a "
            "root file system instead"
        ) from error
    return Built(image=describe(engine, reference), source="this machine's packages", cached=reference in before)


def _dockerfile_of(source: Path) -> Path | None:
    if source.is_dir():
        return source / "Dockerfile" if (source / "Dockerfile").is_file() else None
    return None if tarfile.is_tarfile(source) else source


def _pack_context(engine: Engine, dockerfile: Path, file: IO[bytes], words: Iterable[str]) -> str:
    folder = dockerfile.parent
    ignore = folder / ".dockerignore"
    patterns = [line for line in ignore.read_text().splitlines() if line.strip()] if ignore.is_file() else []
    names = exclude_paths(str(folder), patterns, dockerfile=dockerfile.name)
    bases = [_image_id(engine, name) for name in _bases(dockerfile.read_text())]
    return _pack(folder, sorted(names), file, ["dockerfile", dockerfile.name, *words, *bases], keep_owner=False)


def _bases(text: str) -> Iterator[str]:
    """The images that a Dockerfile starts from, its own earlier stages left out."""
    stages = {"scratch"}
    for name, stage in re.findall(
        r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", text, re.MULTILINE | re.IGNORECASE
    ):
        if name not in stages:
            yield name
        stages.add(stage)


def _image_id(engine: Engine, name: str) -> str:
    if "$" in name:
        return name
    if not present(engine, name):
        raise BuildError(
            f"FROM {name}: the engine at {engine.address.given} has no such image; `docker pull {name}`, or start from "
            "one that `quintain sandbox build` made"
        )
    return describe(engine, name).digest


def _pack_root(source: Path, file: IO[bytes]) -> str:
    if source.is_dir():
        names = (
            os.path.relpath(os.path.join(folder, name), source)
            for folder, folders, files in os.walk(source)
            for name in (*folders, *files)
        )
        return _pack(source, sorted(names), file, ["root"], keep_owner=True)
    with open(source, "rb") as tar:
        digest = hashlib.sha256(b"tar\0")
        while chunk := tar.read(2**20):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()[:16]


def _pack(folder: Path, names: Iterable[str], file: IO[bytes], words: Iterable[str], *, keep_owner: bool) -> str:
    """Write the entries as a tar that depends on nothing but their content; its digest together with `words`."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uname, entry.gname = 0, "", ""
        if not keep_owner:
            entry.uid = entry.gid = 0
        return entry

    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            try:
                tar.add(folder / name, arcname=name, recursive=False, filter=plain)
            except OSError as error:
                raise BuildError(f"{folder / name} can't be read: {error}") from error
    file.flush()
    digest = hashlib.sha256("\0".join(words).encode() + b"\0\0")
    file.seek(0)
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()[:16]


def _build(
    engine: Engine, context: IO[bytes], dockerfile: Path, reference: str, network: str, args: dict[str, str]
) -> None:
    said: list[str] = []
    failure: str | None = None
    try:
        with engine_errors(f"build {dockerfile}"):
            for message in engine.image_client().build(
                fileobj=context,
                custom_context=True,
                dockerfile=dockerfile.name,
                tag=reference,
                network_mode=network,
                buildargs=args,
                labels={LABEL: reference},
                use_config_proxy=False,
                rm=True,
                forcerm=True,
                decode=True,
            ):
                said.append(str(message.get("stream", "")))
                failure = message.get("error") or failure
    except SandboxError as error:
        failure = str(error)
    if failure is not None:
        raise BuildError(f"{dockerfile}: {failure}\n{''.join(said)[-2000:]}".rstrip())
