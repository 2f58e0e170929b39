"""Which image boxes are made from, and getting it.

A named image must be on the engine already: pulling gigabytes unasked is nobody's wish. Without a name: on Debian or
Ubuntu an image of this machine's own packages, made in about 2 s without any registry and named after what is in it;
elsewhere `python:3.12-slim`, pulled once.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from dataclasses import dataclass

import docker.errors

from quintain.sandbox.base import SandboxUnavailable
from quintain.sandbox.docker.debian_root import PackagesMissing, plan_root, write_root
from quintain.sandbox.docker.engine import Engine, EngineError, engine_errors

REPOSITORY = "quintain-box"
FALLBACK = "python:3.12-slim"
CHANGES = ["ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
log = logging.getLogger("quintain.sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that is on an engine.

    Example: ``Image(reference="quintain-box:3f9a…", digest="sha256:77…", env=("PATH=/usr/bin",))``
    """

    reference: str
    digest: str
    """The engine's id of its content."""
    env: tuple[str, ...]
    """`NAME=value` that the image gives to every process."""


def ensure_image(engine: Engine, named: str | None) -> Image:
    """The image that boxes are made from, on the engine now.

    Raises SandboxUnavailable, whose message names the remedy, and EngineError.
    """
    return describe(engine, _reference(engine, named))


def describe(engine: Engine, reference: str) -> Image:
    """What the engine says of an image that it has. Raises EngineError."""
    with engine_errors(f"look at image {reference}"):
        found = engine.client().inspect_image(reference)
    return Image(reference=reference, digest=found["Id"], env=tuple((found.get("Config") or {}).get("Env") or ()))


def _reference(engine: Engine, named: str | None) -> str:
    if named is not None:
        if not present(engine, named):
            raise SandboxUnavailable(
                f"sandbox.image={named}: the engine at {engine.url} has no such image; "
                f"`docker pull {named}` (or build it), or unset sandbox.image for quintain's own"
            )
        return named
    own: str | None = None
    with contextlib.suppress(PackagesMissing):
        own = from_this_machine(engine) if engine.address.given.startswith("unix://") else None
    return own or _pulled(engine)


def present(engine: Engine, image: str) -> bool:
    """Whether the engine has it. Raises EngineError."""
    try:
        with engine_errors(f"look for image {image}"):
            engine.client().inspect_image(image)
    except EngineError as error:
        if error.status == 404:
            return False
        raise
    return True


def from_this_machine(engine: Engine) -> str:
    """quintain's own image, made where it is missing. Raises PackagesMissing, EngineError."""
    plan = plan_root()
    image = f"{REPOSITORY}:{plan.digest}"
    if present(engine, image):
        return image
    log.info("making the sandbox image %s from this machine's packages", image)
    with tempfile.NamedTemporaryFile(prefix="quintain-image-", suffix=".tar") as file:
        write_root(plan, file)
        file.flush()
        with engine_errors(f"import image {image}"):
            engine.image_client().import_image(file.name, repository=REPOSITORY, tag=plan.digest, changes=CHANGES)
    return image


def _pulled(engine: Engine) -> str:
    if present(engine, FALLBACK):
        return FALLBACK
    log.info("pulling the sandbox image %s", FALLBACK)
    try:
        with engine_errors(f"pull {FALLBACK}"):
            repository, tag = FALLBACK.split(":")
            engine.image_client().pull(repository, tag=tag)
    except (EngineError, docker.errors.DockerException) as error:
        raise SandboxUnavailable(
            f"no image for boxes: {error}. Load one that holds python3 into the engine at {engine.url} and name it in "
            "sandbox.image; on Debian or Ubuntu, `apt-get install python3 procps` lets quintain make its own."
        ) from error
    return FALLBACK
