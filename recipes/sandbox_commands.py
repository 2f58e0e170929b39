"""What `quintain sandbox …` does and prints. Tables and JSON go to stdout, progress to stderr."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quintain.recipes.loader import RecipeError, load_overrides, load_recipe
from quintain.sandbox.base import SandboxError, SandboxUnavailable
from quintain.sandbox.config import SandboxConfig


def settings_of(arguments: Sequence[str]) -> SandboxConfig:
    """The sandbox section of a recipe (the first argument, where it holds no `=`), or the defaults, with overrides.

    Raises RecipeError, also for `sandbox.type=local`, which has nothing to look at.
    """
    recipe = arguments[0] if arguments and "=" not in arguments[0] else None
    config = load_recipe(recipe, arguments[1:]).config if recipe else load_overrides(arguments)
    if config.sandbox.type == "local":
        raise RecipeError("sandbox.type=local: the local sandbox isolates nothing, so there is nothing to look at here")
    return config.sandbox.model_copy(update={"type": "docker"})


@contextmanager
def engines_of(config: SandboxConfig) -> Iterator[list[Any]]:
    """Connections to the configured engines. Raises SandboxUnavailable where one does not answer."""
    from quintain.sandbox.docker.address import Address, default_address
    from quintain.sandbox.docker.engine import Engine

    engines: list[Engine] = []
    try:
        for address in [Address(host.url, host.tls) for host in config.hosts] or [default_address()]:
            engines.append(Engine.connect(address))
        yield engines
    finally:
        for engine in engines:
            engine.close()


def print_audit(arguments: Sequence[str], *, as_json: bool) -> bool:
    """Audit a box of every engine and say whether all are as they should be."""
    config = settings_of(arguments)
    reports = [_audit(config, host) for host in config.hosts] or [_audit(config, None)]
    ok = all(report["ok"] for report in reports)
    if as_json:
        first = reports[0]
        print(json.dumps({**first, "ok": ok, **({"engines": reports} if len(reports) > 1 else {})}, indent=2))
        return ok
    for report in reports:
        title = f"{report['engine']}: {report['image']}, runtime {report['runtime']}, network {report['network']}"
        rows = [
            (row["name"], ("ok", "green") if row["ok"] else ("failed", "bold red"), row["expected"], row["found"])
            for row in report["checks"]
        ]
        _table(("check", "", "expected", "found"), rows, title=title)
        if report["error"]:
            click.echo(f"error: {report['error']}", err=True)
    return ok


def _audit(config: SandboxConfig, host: Any) -> dict[str, Any]:
    from quintain.sandbox.background import background_loop
    from quintain.sandbox.docker.hosts import Fleet

    single = config.model_copy(update={"hosts": (host,) if host else (), "pool_size": 1})
    report: dict[str, Any] = {
        "ok": False,
        "checks": [],
        "error": None,
        "engine": host.url if host else None,
        "image": config.image,
        "digest": None,
        "runtime": config.runtime or "default",
        "network": config.network,
        "profile": config.profile,
    }
    fleet = Fleet.open(single, owner="audit")
    try:
        where = fleet.hosts[0]
        assert where.image is not None
        report.update(engine=where.engine.address.given, image=where.image.reference, digest=where.image.digest)
        box = where.make_box()
        try:
            background_loop().run(box.start())
        except SandboxError as error:
            report["error"] = str(error)
        report["checks"] = where.audit_rows
        report["ok"] = where.audit is not None and report["error"] is None
        background_loop().run(box.stop())
    finally:
        fleet.close()
    if report["error"] and not report["checks"]:
        raise SandboxUnavailable(report["error"])
    return report


def print_bench(arguments: Sequence[str], *, sizes: Sequence[int], as_json: bool) -> None:
    """Measure and print."""
    from quintain.sandbox.docker.bench import bench

    config = settings_of(arguments)
    report = bench(config, sizes=sizes, say=lambda text: click.echo(text, err=True))
    if as_json:
        print(json.dumps(report, indent=2))
        return

    def ms(key: str) -> str:
        return f"{report[key] * 1000:.2f} ms"

    rows = []
    for name, key in (
        ("command by channel", "channel"),
        ("command by docker exec", "docker_exec"),
        ("used box, proved clean", "pool_hit"),
        ("new box", "cold_start"),
    ):
        rows.append((name, ms(f"{key}_p50_s"), ms(f"{key}_p95_s")))
    _table(("", "median", "95 %"), rows, title=f"{report['image']}, runtime {report['runtime']}")
    click.echo(
        f"docker exec takes {report['exec_ratio']:.0f} times as long as the channel, "
        f"a new box {report['start_ratio']:.0f} times as long as a used one"
    )
    rows = [
        (
            str(row["num_boxes"]),
            f"{row['start_s']:.1f} s",
            f"{row['execs_per_s']:.0f}",
            _mib(row["box_memory_bytes"]),
            _mib(row["machine_memory_bytes"]),
        )
        for row in report["boxes"]
    ]
    _table(("boxes", "all started in", "commands/s", "memory of a box", "memory of the machine"), rows)


def _mib(value: int | None) -> str:
    return "not known" if value is None else f"{value / 2**20:.1f} MiB"


def print_build(source: Path | None, *, network: str, build_args: Sequence[str], as_json: bool) -> None:
    """Build an image and print its name."""
    from quintain.sandbox.docker.build import build

    pairs = [pair.partition("=") for pair in build_args]
    bad = [name for name, equals, _ in pairs if not equals or not name]
    if bad:
        raise RecipeError(f"--build-arg {bad[0]}: write NAME=VALUE")
    started = time.monotonic()
    with engines_of(SandboxConfig(type="docker")) as (engine,):
        built = build(engine, source, network=network, args={name: value for name, _, value in pairs})
    seconds = time.monotonic() - started
    report = {
        "image": built.image.reference,
        "digest": built.image.digest,
        "source": built.source,
        "cached": built.cached,
        "seconds": round(seconds, 3),
    }
    if as_json:
        print(json.dumps(report, indent=2))
        return
    how = "there already" if built.cached else f"built in {seconds:.1f} s"
    rows = [("image", built.image.reference), ("from", built.source), ("", how), ("id", built.image.digest)]
    _table(("", "name it in sandbox.image"), rows)


def print_cleanup(arguments: Sequence[str], *, as_json: bool) -> bool:
    """Remove what dead owners left and say whether all of it went."""
    from quintain.sandbox.docker.reaper import reap

    removed, problems = [], []
    with engines_of(settings_of(arguments)) as engines:
        for engine in engines:
            gone, failed = reap(engine)
            removed += [_thing(thing, engine) for thing in gone]
            problems += failed
    if as_json:
        print(json.dumps({"ok": not problems, "removed": removed, "problems": problems}, indent=2))
        return not problems
    _things_table(removed, title=f"removed: {len(removed)}")
    for problem in problems:
        click.echo(f"not removed: {problem}", err=True)
    return not problems


def print_list(arguments: Sequence[str], *, as_json: bool) -> None:
    """Print what quintain has on the engines."""
    from quintain.sandbox.docker.reaper import things

    with engines_of(settings_of(arguments)) as engines:
        found = [_thing(thing, engine) for engine in engines for thing in things(engine)]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    _things_table(found, title=f"boxes, networks and volumes of quintain's: {len(found)}")


def _thing(thing: Any, engine: Any) -> dict[str, Any]:
    from quintain.sandbox.docker.owner import HOST, LEASE_S, NETWORK, PID, RUN, owner_state

    return {
        "kind": thing.kind,
        "name": thing.name,
        "state": thing.state,
        "run": thing.labels.get(RUN, ""),
        "owner": owner_state(thing.labels),
        "owner_pid": thing.labels.get(PID, ""),
        "owner_host": thing.labels.get(HOST, ""),
        "lease_s": thing.labels.get(LEASE_S, ""),
        "network": thing.labels.get(NETWORK, ""),
        "age_s": round(time.time() - thing.created_s) if thing.created_s else None,
        "engine": engine.address.given,
    }


def _things_table(found: Sequence[dict[str, Any]], *, title: str) -> None:
    rows = [
        (
            row["kind"],
            row["name"],
            row["state"],
            row["run"],
            (f"{row['owner']} ({row['owner_pid']})", "red" if row["owner"] == "dead" else ""),
            "" if row["age_s"] is None else f"{row['age_s']} s",
            row["engine"],
        )
        for row in found
    ]
    _table(("kind", "name", "state", "run", "owner (pid)", "age", "engine"), rows, title=title)


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str | tuple[str, str]]], *, title: str | None = None
) -> None:
    table = Table(title=Text(title) if title else None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # names are there to be copied
    for row in rows:
        table.add_row(*(Text(*cell) if isinstance(cell, tuple) else Text(cell) for cell in row))
    Console().print(table)
