"""A pool of Docker boxes: reach the engines, remove what dead runs left, get the image, prove that a box is safe."""

from __future__ import annotations

import logging

from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.hosts import Fleet
from quintain.sandbox.pool import SandboxPool

log = logging.getLogger("quintain.sandbox")


def open_docker_pool(config: SandboxConfig, *, owner: str) -> SandboxPool:
    """A pool with one box started and audited. Raises EngineMissing, SandboxUnavailable."""
    fleet = Fleet.open(config, owner=owner)
    network_log = fleet.hosts[0].network_log

    def close() -> None:
        for access in network_log.entries():
            if access.allowed:
                log.info(
                    "boxes reached %s:%d %d times (%d bytes out, %d in)%s",
                    access.host,
                    access.port,
                    access.num_requests,
                    access.sent_bytes,
                    access.received_bytes,
                    f": {access.reason}" if access.reason else "",
                )
        fleet.close()

    pool = SandboxPool(fleet.make_box, config, kind="docker", notice=fleet.notice, on_close=close)
    pool.network_log = network_log
    where = ", ".join(host.engine.address.given for host in fleet.hosts)
    try:
        pool.warm(1)
    except SandboxUnavailable:
        pool.close()
        raise
    except SandboxError as error:
        pool.close()
        image = fleet.hosts[0].image
        raise SandboxUnavailable(
            f"the Docker engine at {where} answers, but starts no box from {image and image.reference}: {error}"
        ) from error
    pool.audit = next((host.audit for host in fleet.hosts if host.audit is not None), [])
    return pool
