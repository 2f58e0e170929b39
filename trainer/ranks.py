"""`Ranks`: this process among the learner's processes; rank 0 commands, the others follow.

    rank 0 (rollouts, advantages, the batch)                 ranks 1, 2, …
    announce("train_on") ──────── command store ───────────> next_command: a named wait with a deadline
    scatter(batches)     ──────── gloo ────────────────────> scatter
    forward, backward    <─────── gradients (gloo, NCCL) ──> forward, backward
    gather(tally)        <─────── gloo ──────────────────── gather
    announce("stop")     ────────────────────────────────-─> end

| who           | waits for             | ends by                                                                  |
|---------------|-----------------------|--------------------------------------------------------------------------|
| ranks 1, 2, … | rank 0's next command | the command; `parallelism.command_timeout_s`; at once when rank 0 is dead |
| every rank    | the others, in a step | the step's end; the process group's own time-out; at once on a death      |

The command store lives in rank 0's process, so its death breaks the others' connection and their wait. With one
process everything here is a no-op.

Invariants: a command is announced by rank 0 only and carried out by every rank in the same order; nothing is announced
before rank 0 has checked what it can alone.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from quintain.trainer.config import ParallelismConfig
from quintain.trainer.parallel import open_accelerator

T = TypeVar("T")
STOP = "stop"
CLOSE_TIMEOUT_S = 30.0
"""How long `close` waits for the others to have read that they may end."""


class RankError(RuntimeError):
    """Another process of the learner is gone, or did not answer in time."""


class Ranks:
    """Life cycle: open on every process, `announce` (rank 0) and `next_command` (the others), `close`."""

    def __init__(self, config: ParallelismConfig | None = None) -> None:
        """Join the process group that the launcher's environment variables name; alone with strategy `single`."""
        self.config = config or ParallelismConfig()
        self.accelerator: Accelerator = open_accelerator(self.config)
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self._num_commands = 0
        self._group: Any = None
        self._store: TCPStore | None = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo")
            self._store = self._open_store()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which samples and commands."""
        return self.rank == 0

    def _open_store(self) -> TCPStore:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        timeout = timedelta(seconds=self.config.command_timeout_s)
        if self.is_main:
            store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            self.broadcast(store.port)
            return store
        return TCPStore(host, self.broadcast(0), is_master=False, timeout=timeout)

    def announce(self, name: str, *arguments: Any) -> None:
        """Tell the other ranks what comes next; only rank 0 does, the others' calls mean nothing."""
        if self._store is None or not self.is_main:
            return
        self._store.set(f"command/{self._num_commands}", pickle.dumps((name, arguments)))  # pyright: ignore[reportArgumentType]
        self._num_commands += 1
        self._store.delete_key(f"command/{self._num_commands - 3}")  # everyone has read it: two more were carried out

    def next_command(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for rank 0's next command: its name and arguments.

        Raises:
            RankError: rank 0 is gone, or gave none within `parallelism.command_timeout_s`.
        """
        assert self._store is not None
        key = f"command/{self._num_commands}"
        try:
            self._store.wait([key], timedelta(seconds=self.config.command_timeout_s))
            content = self._store.get(key)
        except (dist.DistError, RuntimeError) as error:
            raise RankError(
                f"rank {self.rank} waited for rank 0's next command, and rank 0 is gone or gave none in "
                f"{self.config.command_timeout_s:g} s (parallelism.command_timeout_s): {str(error).splitlines()[0]}"
            ) from error
        self._num_commands += 1
        return pickle.loads(content)

    def close(self) -> None:
        """Rank 0: let the others end. Every rank: leave the process group. Never raises: the others may be dead."""
        if self._store is None:
            return
        with suppress(RuntimeError):
            self.announce(STOP)
            # The store must outlive the others' last read.
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=CLOSE_TIMEOUT_S))
        self._store = None
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def scatter(self, values: Sequence[T] | None) -> T:
        """Rank r gets rank 0's `values[r]`; the others give None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, list(values) if values is not None else None, src=0, group=self._group)
        return received[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def share_weights(self, model: torch.nn.Module) -> None:
        """Put rank 0's weights and buffers into every rank's `model`, tensor by tensor."""
        if self.size == 1:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            on_cpu = tensor.detach().cpu().contiguous()
            dist.broadcast(on_cpu, src=0, group=self._group)
            if not self.is_main:
                tensor.data.copy_(on_cpu)
