"""From an exception to what the user reads and the exit code: the outermost boundary of the command line.

Bad input gets its message alone. Anything unexpected gets one line, and the traceback goes to a file: a note on the
exception that starts with `log:` (the run adds it) says where, else a file in the temporary folder is written here.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType

import click

INPUT_ERRORS = (
    "quintain.recipes.loader:RecipeError",
    "quintain.sandbox.base:SandboxUnavailable",
    "quintain.envs.errors:UnknownEnvironmentError",
    "quintain.envs.errors:EnvironmentArgumentsError",
    "quintain.envs.errors:EnvironmentImportError",
    "quintain.envs.errors:EnvironmentDefinitionError",
    "quintain.envs.errors:NoTasksError",
    "quintain.agents.template:TemplateError",
    "quintain.trainer.parallel:WrappingError",
    "quintain.trainer.tracking.tracker:TrackingError",
    "quintain.trainer.ledger:BatchFileError",
    "quintain.trainer.accuracy:PrecisionUnavailableError",
)
"""Errors that say what the user has to change, as `module:class`: looked up among the loaded modules only, since an
exception whose module was never imported cannot have been raised."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: takes the same clean way out as Ctrl-C."""


def terminate_like_ctrl_c() -> None:
    """Let SIGTERM (a batch system's warning, say) end the run as Ctrl-C does."""

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, on_term)


def is_input_error(error: BaseException) -> bool:
    for name in INPUT_ERRORS:
        module, _, attribute = name.partition(":")
        cls = getattr(sys.modules.get(module), attribute, None)
        if cls is not None and isinstance(error, cls):
            return True
    return False


def report(error: BaseException) -> int:
    """Print what the user needs to know of `error` to stderr and return the exit code."""
    if isinstance(error, click.Abort) and isinstance(error.__cause__, KeyboardInterrupt):
        error = error.__cause__  # click wraps it
    notes: list[str] = list(getattr(error, "__notes__", ()))
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, click.ClickException):
        error.show()
        return 2
    if isinstance(error, KeyboardInterrupt | click.Abort):
        terminated = isinstance(error, Terminated)
        click.echo("\n".join(["terminated" if terminated else "interrupted", *notes]), err=True)
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    if isinstance(error, BrokenPipeError):  # `quintain show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if is_input_error(error):
        click.echo(f"error: {error}", err=True)
        return 2
    if not any(note.startswith("log:") for note in notes):
        notes.append(f"log: {_write_traceback(error)}")
    first_line = (str(error).strip().splitlines() or [""])[0]
    click.echo(f"error: {type(error).__name__}: {first_line}", err=True)
    for note in notes:
        click.echo(note, err=True)
    return 1


def _write_traceback(error: BaseException) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile(
        "w", prefix="quintain-error-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        file.write("".join(traceback.format_exception(error)))
    return file.name
