"""The errors of the environment layer."""

from __future__ import annotations

import traceback


class ToolError(Exception):
    """Raise in a tool for trouble the model should read about (a missing file, say): the text becomes the observation.

    Anything else that a tool raises is a bug of the environment and leaves `step`.
    """


class ToolDeadlineError(Exception):
    """A tool took longer than its deadline and could not be stopped: the environment instance must not be used on."""


class VerifierError(Exception):
    """A reward could not be computed. The trajectory gets no reward at all: neither 0 nor NaN."""


class NoTasksError(ValueError):
    """No usable task is left for a split; the message counts the reasons."""


class EnvironmentArgumentsError(TypeError):
    """The environment's constructor does not take these arguments."""


class UnknownEnvironmentError(ValueError):
    """No environment has this id; the message names the nearest."""


class EnvironmentImportError(Exception):
    """Importing a user's environment raised, or tried to leave the program; the message has the file and the line."""


class EnvironmentDefinitionError(TypeError, ValueError):
    """An environment class is written wrongly (a tool without a docstring, rows that are no tasks); it says how."""


def place_in(error: BaseException, file: str | None) -> str:
    """`FILE, line N`: where `file` was when the error was raised; without one, the innermost place of all.

    For a syntax error, the place in the text that could not be read.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}, line {frame.lineno}" for frame in frames if file in (None, frame.filename)]
    return places[-1] if places else file or "unknown place"
