"""Starts the learner's processes on this machine: torchrun's engine (torch elastic), with exit codes and quiet of ours.

    launcher ──┬── rank 0 (the run: its exit code is the launcher's)
               ├── rank 1 …
               └── watches: where one ends badly the others are told to end; Ctrl-C and SIGTERM are passed on

torchrun itself would answer every failure with exit code 1 and its own traceback, and would kill a rank that takes
more than 30 s to save on Ctrl-C.

Invariants: the port is a free one on the loopback address; no process outlives the launcher (each asks the kernel to
be told of its death).

Does not do: several machines. There torchrun (or a batch system) starts `quintain train` on each with its variables
set, and nothing is launched here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SHUTDOWN_TIMEOUT_S = 600
"""How long the ranks may take to save and end before they are killed."""
_PR_SET_PDEATHSIG = 1


def launch(command: Sequence[str], *, num_processes: int, environment: Mapping[str, str]) -> int:
    """Run `command` in so many processes, with these environment variables too; returns the exit code of the whole.

    That is rank 0's where it ended badly by itself, 128 + signal where the launcher was signalled, 1 where a rank died.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it says of failures is said below, in one line
    os.environ.update(environment)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        return _report(error)
    return 0


def end_with_launcher() -> None:
    """In a launched process: SIGTERM comes when the launcher dies, even of SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _report(error: ChildFailedError) -> int:
    """Say which rank was the first to end badly, where rank 0 hasn't said it itself; the exit code of the whole."""
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}  # in the order they were found
    passed_on = (-signal.SIGTERM, -signal.SIGINT)  # how the others are told to end
    killed = [rank for rank, code in codes.items() if code < 0 and code not in passed_on]
    first = (killed or list(codes))[0]
    code = codes[first]
    if first == 0 and code > 0:
        return code
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    print(f"error: rank {first} {how}, and with it the run; go on with --resume", file=sys.stderr)
    return 1
