"""`quintain sandbox`: audit, bench, build, cleanup and list. Options here; the work is in `sandbox_commands`.

Each takes a recipe's sandbox settings, or the defaults, with overrides; each prints a table, or JSON with `--json`.
"""

from __future__ import annotations

from pathlib import Path

import click

_SETTINGS = click.argument("settings", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Sizes(click.ParamType):
    name = "N,N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1 or max(sizes) > 1024:
            self.fail(f"{value!r}: give numbers of boxes from 1 to 1024, such as 1,16,64,128", param, ctx)
        return sizes


@click.group(short_help="The boxes that tools run in: safety, speed, left-overs.")
def sandbox() -> None:
    """The boxes that tools run in: are they safe, how quick are they, what is left of them."""


@sandbox.command(short_help="Look at a box from inside: does it protect?")
@_SETTINGS
@_JSON
def audit(settings: tuple[str, ...], as_json: bool) -> None:
    """Start a box on every engine and look at it from inside; the exit code is 1 where it protects too little.

    \b
    Examples:
      quintain sandbox audit
      quintain sandbox audit recipes/shell.yaml --json
      quintain sandbox audit sandbox.network=internal sandbox.noexec=true
    """
    from quintain.recipes.sandbox_commands import print_audit

    if not print_audit(settings, as_json=as_json):
        raise click.exceptions.Exit(1)


@sandbox.command(short_help="Commands, starts, throughput and memory of boxes.")
@_SETTINGS
@click.option(
    "--sizes", type=_Sizes(), default="1,16", show_default=True, help="Numbers of boxes to run at once, up to 1024."
)
@_JSON
def bench(settings: tuple[str, ...], sizes: tuple[int, ...], as_json: bool) -> None:
    """Measure commands, starts, throughput and memory, each beside the plain way of doing it.

    \b
    Examples:
      quintain sandbox bench
      quintain sandbox bench --sizes 1,16,64,128 --json
      quintain sandbox bench sandbox.runtime=crun
    """
    from quintain.recipes.sandbox_commands import print_bench

    print_bench(settings, sizes=sizes, as_json=as_json)


@sandbox.command(short_help="Build an image without any registry.")
@click.argument("source", required=False, type=click.Path(path_type=Path))
@click.option(
    "--network",
    type=click.Choice(["none", "default", "host"]),
    default="none",
    show_default=True,
    help="Network of the Dockerfile's RUN lines.",
)
@click.option("--build-arg", "build_args", multiple=True, metavar="NAME=VALUE", help="An ARG of the Dockerfile.")
@_JSON
def build(source: Path | None, network: str, build_args: tuple[str, ...], as_json: bool) -> None:
    """Build an image without any registry and print its name, which goes into sandbox.image.

    SOURCE is a Dockerfile, a folder with one, a root file system (folder or tar), or nothing: then quintain's own image
    of this machine's packages. The name says what is in it: the same content is built once.

    \b
    Examples:
      quintain sandbox build
      quintain sandbox build images/swe/Dockerfile --network default
      quintain sandbox build rootfs.tar --json
    """
    from quintain.recipes.sandbox_commands import print_build

    print_build(source, network=network, build_args=build_args, as_json=as_json)


@sandbox.command(short_help="Remove what dead owners left on the engines.")
@_SETTINGS
@_JSON
def cleanup(settings: tuple[str, ...], as_json: bool) -> None:
    """Remove boxes, networks and volumes whose owner, a process of this machine, is dead; never those of a live one.

    \b
    Example:
      quintain sandbox cleanup
    """
    from quintain.recipes.sandbox_commands import print_cleanup

    if not print_cleanup(settings, as_json=as_json):
        raise click.exceptions.Exit(1)


@sandbox.command(name="list", short_help="Everything of quintain's on the engines.")
@_SETTINGS
@_JSON
def list_(settings: tuple[str, ...], as_json: bool) -> None:
    """Every box, network and volume of quintain's on the engines, with its run and whether its owner lives.

    \b
    Example:
      quintain sandbox list --json
    """
    from quintain.recipes.sandbox_commands import print_list

    print_list(settings, as_json=as_json)
