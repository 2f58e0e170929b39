"""How the engines get the learner's weights: `WeightDelivery`, in this process or through a folder on disk.

Through a folder (`DiskDelivery`)::

    save       a Hugging Face folder, written beside, checked, renamed:  RUN/weights/v000012/
    pause      every server; what runs is put back in its queue and samples nothing until the end
    transfer   each server reads the folder, as version 12, and empties its prefix cache (checked)
    verify     each server says that it has version 12, of that folder, now
    continue   every server, also after a stage that failed
    then the policy is told, and folders of older versions are deleted

| who waits | for                 | until               | then                                              |
|-----------|---------------------|---------------------|---------------------------------------------------|
| loop      | each of the stages  | `stage_timeout_s`   | `DeliveryError` names the stage; the run ends     |

Invariants: when `deliver` returns, every engine serves that version and keeps no state of an older one; a folder is
deleted only after every server has confirmed a newer version; when a stage fails, what a server served before it goes
on serving, and the folder of that version stays. A server that was lost is revived before the pause, and a server that
starts anew anywhere in the run is brought to the newest delivered version before it samples (`bring_up_to_date`).

Does not do: senders of tensors, weights while rollouts run (the loop delivers between batches).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from safetensors import SafetensorError, safe_open

from quintain.agents.sglang import weights as server
from quintain.agents.sglang.answers import AnswerError, EngineError, EngineRefused
from quintain.agents.sglang.client import SGLangClient

Stage = Literal["save", "pause", "transfer", "verify", "continue"]


class DeliveryError(RuntimeError):
    """An engine did not get the weights. The finished batch is safe: resuming delivers them again."""

    def __init__(self, stage: Stage, version: int, reason: str) -> None:
        super().__init__(f"weights of policy version {version} were not delivered, stage {stage!r}: {reason}")
        self.stage: Stage = stage
        self.version = version


class WeightDelivery(Protocol):
    """Brings the learner's weights to all engines."""

    def deliver(self, version: int) -> None:
        """Every engine serves `version`, the learner's weights as they are, when this returns. Raises DeliveryError."""
        ...


class VersionedPolicy(Protocol):
    """What has to know which version every engine serves."""

    def set_policy_version(self, version: int, /) -> None: ...


class InProcessDelivery:
    """For a policy that samples with the very model that is trained: it only has to know the version."""

    def __init__(self, policy: VersionedPolicy) -> None:
        self._policy = policy

    def deliver(self, version: int) -> None:
        self._policy.set_policy_version(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFolder:
    """Weights on disk, whole. Example: ``WeightFolder(version=12, path=Path("runs/a/weights/v000012"))``"""

    version: int
    path: Path


class DiskDelivery:
    """SGLang servers read the weights from a folder that they and this process both see.

    Life cycle: make it with an empty or stale `root`, `save` where a server has to start from the weights, `deliver`
    between batches. One writer per folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        export: Callable[[Path], Any],
        urls: Sequence[str],
        policy: VersionedPolicy,
        stage_timeout_s: float = 600.0,
        revive: Callable[[SGLangClient], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Use `root`; what an earlier process left there is deleted, since nothing of it is served by this run.

        Args:
            export: writes the live weights, as a Hugging Face folder, into the folder it is given.
            urls: every server, not a router before them.
            revive: brings a server back that does not answer; awaited before a pause.
        """
        self._root, self._export, self._urls = root, export, tuple(urls)
        self._policy, self._stage_timeout_s, self._revive = policy, stage_timeout_s, revive
        shutil.rmtree(root, ignore_errors=True)
        self._saved: WeightFolder | None = None
        self.newest: WeightFolder | None = None
        """What every server has."""

    def save(self, version: int) -> Path:
        """The folder of the live weights, written unless it is there; `version` names them."""
        if self._saved is None or self._saved.version != version:
            self._saved = WeightFolder(version=version, path=self._write(version))
        return self._saved.path

    def deliver(self, version: int) -> None:
        """See `WeightDelivery.deliver`."""
        folder = WeightFolder(version=version, path=self.save(version))
        asyncio.run(self._deliver(folder))
        self.newest = folder
        self._policy.set_policy_version(version)
        for path in self._root.iterdir():
            if path != folder.path:
                shutil.rmtree(path, ignore_errors=True)

    async def bring_up_to_date(self, client: SGLangClient) -> None:
        """Give one server, which samples nothing yet, the newest version that every server has.

        Raises EngineError. Without any delivery so far it is left with the weights that it started with.
        """
        while (folder := self.newest) is not None and not await _serves(client, folder):
            try:
                await _load(client, folder, flush_timeout_s=self._stage_timeout_s)
            except EngineRefused:
                if self.newest != folder:  # it was deleted meanwhile, because a newer one is there
                    continue
                raise
            return

    async def _deliver(self, folder: WeightFolder) -> None:
        clients = [SGLangClient(url, timeout_s=self._stage_timeout_s) for url in self._urls]
        try:
            try:
                await self._update(clients, folder)
            except BaseException:
                # What went wrong first is what counts; a server that is gone can't be told to go on.
                with suppress(DeliveryError):
                    await self._continue(clients, folder.version)
                raise
            await self._continue(clients, folder.version)
        finally:
            for client in clients:
                await client.close()

    async def _update(self, clients: Sequence[SGLangClient], folder: WeightFolder) -> None:
        async with self._stage("pause", folder.version):
            for client in clients:
                if self._revive is not None and not await client.healthy():
                    await self._revive(client)
                await server.pause(client, "retract")
        async with self._stage("transfer", folder.version):
            await asyncio.gather(*(_load(client, folder, flush_timeout_s=self._stage_timeout_s) for client in clients))
        async with self._stage("verify", folder.version):
            for client in clients:
                await _verify(client, folder)

    async def _continue(self, clients: Sequence[SGLangClient], version: int) -> None:
        """All of them are told, also where one of them can't be."""
        async with self._stage("continue", version):
            answers = await asyncio.gather(*(server.resume(client) for client in clients), return_exceptions=True)
            for error in answers:
                if error is not None:
                    raise error

    @asynccontextmanager
    async def _stage(self, stage: Stage, version: int) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._stage_timeout_s):
                yield
        except TimeoutError as error:
            raise DeliveryError(stage, version, f"not done within {self._stage_timeout_s} s; {_REMEDY}") from error
        except EngineError as error:
            raise DeliveryError(stage, version, f"{error}; {_REMEDY}") from error

    def _write(self, version: int) -> Path:
        """Export in a thread, which can be left behind where the disk hangs."""
        path = self._root / f"v{version:06d}"
        beside = self._root / f".tmp-v{version:06d}-{os.getpid()}"
        failures: list[Exception] = []

        def write() -> None:
            try:
                beside.mkdir(parents=True)
                self._export(beside)
                check_readable(beside)
                shutil.rmtree(path, ignore_errors=True)
                beside.rename(path)
            except Exception as error:  # noqa: BLE001 - the worker boundary: it is the waiting loop's DeliveryError
                failures.append(error)

        thread = threading.Thread(target=write, name="save-weights", daemon=True)
        thread.start()
        thread.join(self._stage_timeout_s)
        if thread.is_alive():
            reason = f"{beside} was not written within {self._stage_timeout_s} s"
            raise DeliveryError("save", version, f"{reason}; {_REMEDY}")
        if failures:
            shutil.rmtree(beside, ignore_errors=True)
            raise DeliveryError("save", version, f"{failures[0]}; {_REMEDY}") from failures[0]
        return path


_REMEDY = "the engine's log says more; the last batch is kept, go on with --resume"


def check_readable(folder: Path) -> None:
    """Raises OSError where a file of weights is not whole: a server that meets a broken one half-way ends."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OSError(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        try:
            with safe_open(file, framework="pt"):  # compares header and length; the tensors are not read
                pass
        except SafetensorError as error:
            raise OSError(f"{file} does not read back ({error}); is the disk full?") from error


async def _load(client: SGLangClient, folder: WeightFolder, *, flush_timeout_s: float) -> None:
    """The flush comes last: nothing that was computed with the old weights is left to be found (D03)."""
    await server.update_from_disk(
        client, folder.path, policy_version=folder.version, abort_all_requests=False, flush_cache=False
    )
    await server.flush(client, timeout_s=flush_timeout_s)


async def _serves(client: SGLangClient, folder: WeightFolder) -> bool:
    info = await client.info()
    return (info.weight_version, Path(info.model_path)) == (str(folder.version), folder.path)


async def _verify(client: SGLangClient, folder: WeightFolder) -> None:
    if not await _serves(client, folder):
        info = await client.info()
        raise AnswerError(
            f"{client.url} says that it serves version {info.weight_version} of {info.model_path}, not version "
            f"{folder.version} of {folder.path}"
        )
