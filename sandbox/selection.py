"""Which kind of box a run gets, and why.

type: docker -> Docker, or SandboxUnavailable
type: local  -> local, with a notice that nothing is isolated
type: auto   -> Docker where an engine answers; else local, only for environments that never run model-written
                commands (`needs_isolation = False`) and with a notice; else SandboxUnavailable
"""

from __future__ import annotations

from quintain.sandbox.base import SandboxUnavailable
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.local import NO_ISOLATION, LocalSandbox
from quintain.sandbox.pool import SandboxPool


def open_pool(config: SandboxConfig, *, needs_isolation: bool, owner: str) -> SandboxPool:
    """The pool that `config` asks for; boxes start at first use (or by `warm`).

    `owner` names the run, in the labels of its boxes. Raises SandboxUnavailable, whose message names the remedy.
    """
    if config.type == "local":
        return _local_pool(config, f"sandbox.type=local: {NO_ISOLATION}")
    from quintain.sandbox.docker.engine import EngineMissing
    from quintain.sandbox.docker.pool import open_docker_pool

    try:
        return open_docker_pool(config, owner=owner)
    except EngineMissing as error:
        if config.type == "auto" and not needs_isolation:
            return _local_pool(
                config,
                "no Docker engine answers, so tools run in the local sandbox (this environment runs no model-written "
                f"commands); {NO_ISOLATION}",
            )
        remedy = (
            "Start a Docker engine (or point DOCKER_HOST at one); "
            "or, to run model-written commands on this machine with your files and network, set sandbox.type=local"
        )
        raise SandboxUnavailable(f"sandbox.type={config.type}: {error}. {remedy}.") from error


def _local_pool(config: SandboxConfig, notice: str) -> SandboxPool:
    return SandboxPool(
        lambda: LocalSandbox(config, acknowledged=True),
        config,
        kind="local",
        notice=notice,
    )
