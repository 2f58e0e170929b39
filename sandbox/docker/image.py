"""Which image boxes are made from, and getting it.

A named image must be on the engine already: pulling gigabytes unasked is nobody's wish. Without a name: on Debian or
Ubuntu an image of this machine's own packages, made in about 2 s without any registry and named after what is in it;
elsewhere `python:3.12-slim`, pulled once.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile

import docker.errors

from quintain.sandbox.base import SandboxUnavailable
from quintain.sandbox.docker.debian_root import PackagesMissing, plan_root, write_root
from quintain.sandbox.docker.engine import Engine, EngineError, engine_errors

REPOSITORY = "quintain-box"
FALLBACK = "python:3.12-slim"
CHANGES = ["ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
log = logging.getLogger("quintain.sandbox")


def ensure_image(engine: Engine, named: str | None) -> str:
    """The reference of an image that is on the engine now.

    Raises SandboxUnavailable, whose message names the remedy, and EngineError.
    """
    if named is not None:
        if not _present(engine, named):
            raise SandboxUnavailable(
                f"sandbox.image={named}: the engine at {engine.url} has no such image; "
                f"`docker pull {named}` (or build it), or unset sandbox.image for quintain's own"
            )
        return named
    own: str | None = None
    with contextlib.suppress(PackagesMissing):
        own = _from_this_machine(engine) if engine.url.startswith("unix://") else None
    return own or _pulled(engine)


def _present(engine: Engine, image: str) -> bool:
    try:
        with engine_errors(f"look for image {image}"):
            engine.client().inspect_image(image)
    except EngineError as error:
        if error.status == 404:
            return False
        raise
    return True


def _from_this_machine(engine: Engine) -> str:
    plan = plan_root()
    image = f"{REPOSITORY}:{plan.digest}"
    if _present(engine, image):
        return image
    log.info("making the sandbox image %s from this machine's packages", image)
    with tempfile.NamedTemporaryFile(prefix="quintain-image-", suffix=".tar") as file:
        write_root(plan, file)
        file.flush()
        with engine_errors(f"import image {image}"):
            engine.image_client().import_image(file.name, repository=REPOSITORY, tag=plan.digest, changes=CHANGES)
    return image


def _pulled(engine: Engine) -> str:
    if _present(engine, FALLBACK):
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
