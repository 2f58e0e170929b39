"""A pool of Docker boxes: find the engine, remove what dead runs left, get the image, and prove that a box starts."""

from __future__ import annotations

import logging

from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.box import DockerSandbox
from quintain.sandbox.docker.engine import Engine
from quintain.sandbox.docker.image import ensure_image
from quintain.sandbox.docker.owner import labels_of_this_process
from quintain.sandbox.pool import SandboxPool

log = logging.getLogger("quintain.sandbox")


def open_docker_pool(config: SandboxConfig, *, owner: str) -> SandboxPool:
    """A pool with one box started. Raises EngineMissing, SandboxUnavailable."""
    engine = Engine.connect()
    try:
        removed = engine.remove_leftovers()
        if removed:
            log.info("removed %d boxes that earlier runs had left", removed)
        image = ensure_image(engine, config.image)
    except SandboxUnavailable:
        engine.close()
        raise
    except SandboxError as error:
        engine.close()
        raise SandboxUnavailable(f"the Docker engine at {engine.url} answers, but does not work: {error}") from error
    labels = labels_of_this_process(owner)
    pool = SandboxPool(
        lambda: DockerSandbox(config, engine=engine, image=image, labels=labels),
        kind="docker",
        size=config.pool_size,
        acquire_timeout_s=config.acquire_timeout_s,
        on_close=engine.close,
    )
    try:
        pool.warm(1)
    except SandboxUnavailable:
        pool.close()
        raise
    except SandboxError as error:
        pool.close()
        raise SandboxUnavailable(
            f"the Docker engine at {engine.url} answers, but starts no box from {image}: {error}"
        ) from error
    return pool
