"""Removing what owners left on an engine: containers first, then the networks and volumes that they used.

Nothing without quintain's labels is ever touched, and nothing whose owner lives or can't be judged from here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from quintain.sandbox.docker.engine import Engine, EngineError, engine_errors
from quintain.sandbox.docker.owner import PID, owner_is_dead

Labels = Mapping[str, str]
TRIES = 4
PAUSE_S = 0.3
log = logging.getLogger("quintain.sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """Something of quintain's on an engine.

    Example: ``Thing(kind="container", id="3f9a…", name="quintain-run-9f", state="running", labels={…})``
    """

    kind: str
    """`container`, `network` or `volume`."""
    id: str
    name: str
    state: str
    """A container's state; empty for the others."""
    labels: Labels
    created_s: float = 0.0
    """When it was made, seconds since 1970; 0 where the engine does not say."""


def things(engine: Engine) -> Iterator[Thing]:
    """All that carries quintain's labels, containers first. Raises EngineError."""
    client, chosen = engine.client(), {"label": PID}
    with engine_errors("list containers"):
        for found in client.containers(all=True, filters=chosen):
            name = (found.get("Names") or [found["Id"][:12]])[0].lstrip("/")
            yield Thing(
                kind="container",
                id=found["Id"],
                name=name,
                state=found.get("State") or "",
                labels=found.get("Labels") or {},
                created_s=float(found.get("Created") or 0),
            )
    with engine_errors("list networks"):
        for found in client.networks(filters=chosen):
            yield Thing(kind="network", id=found["Id"], name=found["Name"], state="", labels=found.get("Labels") or {})
    with engine_errors("list volumes"):
        for found in client.volumes(filters=chosen).get("Volumes") or []:
            yield Thing(kind="volume", id=found["Name"], name=found["Name"], state="", labels=found.get("Labels") or {})


def reap(engine: Engine, doomed: Callable[[Labels], bool] = owner_is_dead) -> tuple[list[Thing], list[str]]:
    """Remove what `doomed` is true of: what is gone now, and why the rest is not.

    Raises EngineError where the engine gives no list.
    """
    gone: list[Thing] = []
    problems: list[str] = []
    for thing in [thing for thing in things(engine) if doomed(thing.labels)]:
        try:
            _remove(engine, thing)
            gone.append(thing)
        except EngineError as error:
            problems.append(f"{thing.kind} {thing.name}: {error}")
            log.warning("what an earlier run left could not be removed: %s", problems[-1])
    return gone, problems


def _remove(engine: Engine, thing: Thing) -> None:
    """Tried again for a while: a network is in use until its last container has really gone."""
    for attempt in range(1, TRIES + 1):
        try:
            if thing.kind == "container":
                engine.remove(thing.id)
                return
            with engine_errors(f"remove {thing.kind} {thing.name}"):
                if thing.kind == "network":
                    engine.client().remove_network(thing.id)
                else:
                    engine.client().remove_volume(thing.id, force=True)
            return
        except EngineError as error:
            if error.status == 404:
                return
            if attempt == TRIES or error.status is None:
                raise
            time.sleep(PAUSE_S * attempt)
