"""The errors of the environment layer."""

from __future__ import annotations


class ToolError(Exception):
    """Raise in a tool for trouble the model should read about (a missing file, say): the text becomes the observation.

    Anything else that a tool raises is a bug of the environment and leaves `step`.
    """


class VerifierError(Exception):
    """A reward could not be computed. The trajectory gets no reward at all: neither 0 nor NaN."""


class NoTasksError(ValueError):
    """No usable task is left for a split; the message counts the reasons."""


class EnvironmentArgumentsError(TypeError):
    """The environment's constructor does not take these arguments."""


class UnknownEnvironmentError(ValueError):
    """No environment has this id; the message names the nearest."""
