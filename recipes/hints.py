"""Commands as the user can paste them: with the program as it was started, and quoted for a shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def command_line(*arguments: str | Path) -> str:
    """`quintain ARGUMENTS`; where that name isn't on PATH (no virtual environment is active), the path that was used.

    Example: ``command_line("view", Path("runs/a b"))`` gives ``quintain view 'runs/a b'``
    """
    return shlex.join([program(), *map(str, arguments)])


def program() -> str:
    """What to type for `quintain` here."""
    started = Path(sys.argv[0])
    if started.name != "quintain" or not started.is_file():  # a test or a notebook
        return "quintain"
    found = shutil.which("quintain")
    return "quintain" if found and Path(found).resolve() == started.resolve() else str(started)
