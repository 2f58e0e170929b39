"""The engines that a pool's boxes are spread over, and which of them answer.

    pick -> the host with the fewest boxes for its weight, among those that answer
    an engine that does not answer is taken out for a while, longer each time; with no other left it is tried anyway

What ran on a dead engine is lost: its boxes' channels end, so each trajectory there gets SandboxDied. The first box of
every engine is audited from inside before anything runs in it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from quintain.sandbox.allow_list import AllowList
from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.address import Address, default_address
from quintain.sandbox.docker.audit import FIRST_PROCESS, audit_box, failures
from quintain.sandbox.docker.box import DockerSandbox
from quintain.sandbox.docker.engine import Engine, EngineError, EngineMissing, engine_errors
from quintain.sandbox.docker.exec_box import ExecBox
from quintain.sandbox.docker.image import Image, ensure_image
from quintain.sandbox.docker.owner import LEASE_S, NETWORK, POOL, labels_of_this_process, owner_is_dead
from quintain.sandbox.docker.preflight import check_engine
from quintain.sandbox.docker.reaper import reap
from quintain.sandbox.docker.relay_exec import BoxRelay
from quintain.sandbox.network_log import NetworkLog

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
THREADS = (4, 32)
NO_WAY_TO_THE_MACHINE = {"com.docker.network.bridge.inhibit_ipv4": "true"}
"""`internal` alone leaves the machine an address on the network, with every service that listens there."""
log = logging.getLogger("quintain.sandbox")


class Host:
    """One engine of a pool, with its image and network. Watches its boxes (`BoxWatcher`)."""

    def __init__(self, engine: Engine, weight: float, config: SandboxConfig, labels: Mapping[str, str]) -> None:
        self.engine = engine
        self.weight = weight
        self.config = config
        self.labels = dict(labels)
        self.image: Image | None = None
        self.network: str | None = None
        self.boxes: set[DockerSandbox] = set()
        self.audit: list[dict[str, Any]] | None = None
        """Rows of the first audit that found nothing wrong; None before it."""
        self.audit_rows: list[dict[str, Any]] = []
        """Rows of the last audit, whatever it found."""
        self.agent_open = False
        """The runtime lets a job open the agent's memory or files, so that commands go through the engine's exec."""
        self.network_log = NetworkLog()
        """What its boxes reached, or were refused; one for all hosts of a pool."""
        self.down_until = 0.0
        self._num_failures = 0

    def prepare(self) -> None:
        """Remove what dead owners left, check the engine, get the image, make the network. Raises SandboxError."""
        gone, _ = reap(self.engine)
        if gone:
            log.info("removed %d boxes, networks and volumes that earlier runs had left", len(gone))
        check_engine(self.engine, self.config)
        self.image = ensure_image(self.engine, self.config.image)
        if self.config.network == "internal":
            self._make_network()

    def _make_network(self) -> None:
        name = f"quintain-{self.labels[POOL]}"
        try:
            with engine_errors(f"make the network {name}"):
                self.engine.client().create_network(
                    name,
                    driver="bridge",
                    internal=True,
                    options=NO_WAY_TO_THE_MACHINE,
                    labels=self.labels,
                    check_duplicate=True,
                )
        except EngineError as error:
            if "address pool" in str(error):
                raise SandboxUnavailable(
                    f"{error}. The engine has no address range left: `quintain sandbox cleanup` removes networks of "
                    "dead runs, `docker network prune` all that nobody uses; or set sandbox.network=none."
                ) from error
            raise
        self.network = name

    def make_box(self) -> DockerSandbox:
        """A box that is not started yet."""
        assert self.image is not None
        box = ExecBox(
            self.config,
            engine=self.engine,
            image=self.image.reference,
            labels=self.labels,
            network=self.network,
            watcher=self,
        )
        box.python_missing = box.python_missing or self.agent_open
        if self.config.network == "proxy":
            box.relay = BoxRelay(self.engine, box.id, AllowList(self.config.allowed_hosts), self.network_log)
        self.boxes.add(box)
        return box

    async def box_started(self, box: DockerSandbox) -> None:
        """Audit the host's first box. Raises SandboxUnavailable where it protects less than it should."""
        self._num_failures, self.down_until = 0, 0.0
        if self.audit is None:
            assert self.image is not None
            rows = self.audit_rows = await audit_box(box, self.config, image_env=self.image.env)
            found = failures(rows)
            if [row["name"] for row in found] == [FIRST_PROCESS] and not box.python_missing:
                self.agent_open = True
                log.warning(
                    "the runtime %s does not shut the agent to jobs: commands go through the engine's exec, and every "
                    "box is used once",
                    self.config.runtime or "of the engine",
                )
                raise SandboxError(f"box {box.id} is replaced by one whose first process is a shell")
            if found:
                raise SandboxUnavailable(
                    f"a box of the engine at {self.engine.address.given} does not protect what it should: "
                    + "; ".join(f"{row['name']}: expected {row['expected']}, found {row['found']}" for row in found)
                    + ". `quintain sandbox audit` shows everything."
                )
            if box.reusable:  # only now: a reset empties whatever is writable, of the machine's too if it is mounted
                await box.reset()
            self.audit = rows

    def box_failed(self, error: SandboxError) -> None:
        """Take the engine out for a while, where it did not answer at all."""
        if isinstance(error, EngineError) and error.status is None:
            pause_s = min(FIRST_PAUSE_S * 2**self._num_failures, MAX_PAUSE_S)
            self._num_failures += 1
            self.down_until = time.monotonic() + pause_s
            log.warning("the engine at %s is left out for %.0f s: %s", self.engine.address.given, pause_s, error)

    def box_gone(self, box: DockerSandbox) -> None:
        """Forget a box that was removed, or can't be."""
        self.boxes.discard(box)

    def close(self) -> None:
        """Remove all that this pool made here and all that dead owners left."""
        pool = self.labels[POOL]
        with contextlib.suppress(SandboxError):
            reap(self.engine, lambda labels: labels.get(POOL) == pool or owner_is_dead(labels))
        self.engine.close()


class Fleet:
    """The hosts of one pool. Example: ``Fleet.open(config, owner="run7")``, `make_box`, …, `close`."""

    def __init__(self, hosts: list[Host], notice: str | None = None) -> None:
        self.hosts = hosts
        self.notice = notice
        """Which engines were left out, for the user; None where none was."""

    @classmethod
    def open(cls, config: SandboxConfig, *, owner: str) -> Fleet:
        """Connect to every engine and prepare it. Raises EngineMissing (none answers), SandboxUnavailable."""
        labels = {
            **labels_of_this_process(owner),
            POOL: secrets.token_hex(6),
            LEASE_S: f"{config.lease_s:g}",
            NETWORK: config.network,
        }
        hosts: list[Host] = []
        network_log = NetworkLog()
        missing: list[EngineMissing] = []
        try:
            for address, weight in _addresses(config):
                try:
                    engine = Engine.connect(address, num_threads=min(max(config.pool_size, THREADS[0]), THREADS[1]))
                except EngineMissing as error:
                    missing.append(error)
                    continue
                hosts.append(Host(engine, weight, config, labels))
                hosts[-1].network_log = network_log
                with _as_unavailable(engine):
                    hosts[-1].prepare()
        except BaseException:
            for host in hosts:
                host.close()
            raise
        if not hosts:
            raise missing[0] if len(missing) == 1 else EngineMissing("; ".join(map(str, missing)))
        return cls(hosts, "; ".join(f"{error}, so it is left out" for error in missing) or None)

    def make_box(self) -> DockerSandbox:
        """A box, not started yet, on the host that is to have the next one."""
        now = time.monotonic()
        alive = [host for host in self.hosts if host.down_until <= now]
        if not alive:
            return min(self.hosts, key=lambda host: host.down_until).make_box()
        return min(alive, key=lambda host: (len(host.boxes) + 1) / host.weight).make_box()

    def close(self) -> None:
        """Idempotent enough to be called after a failure half-way."""
        for host in self.hosts:
            host.close()


def _addresses(config: SandboxConfig) -> Iterator[tuple[Address, float]]:
    if not config.hosts:
        yield default_address(), 1.0
    for host in config.hosts:
        yield Address(host.url, host.tls), host.weight


@contextlib.contextmanager
def _as_unavailable(engine: Engine) -> Iterator[None]:
    try:
        yield
    except SandboxUnavailable:
        raise
    except SandboxError as error:
        raise SandboxUnavailable(
            f"the Docker engine at {engine.address.given} answers, but does not work: {error}"
        ) from error
