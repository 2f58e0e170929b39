"""The engine of a run, put together from `engine:` of its recipe: the policy, its servers, and how they get weights.

    assemble: open_engine ──> policy (known to the runners, samples nothing yet)
    warm start, checkpoint    in this process, whatever the engine
    start ──> WORK/weights/v000000 ──> servers, each with its log (WORK/logs/sglang-0.log) ──> WeightDelivery

Invariants: every server that was started is on the stack before it starts, so it ends however the run ends (where this
process is killed, its watcher ends it); a server that died is started again and gets the newest delivered weights
before it samples; the weights on disk go when the run ends (its checkpoints are elsewhere).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quintain.agents.config import EngineConfig
from quintain.agents.local_policy import LocalPolicy
from quintain.agents.policy import Policy
from quintain.agents.sglang.client import SGLangClient
from quintain.agents.sglang.policy import SGLangPolicy
from quintain.agents.sglang.server import ManagedServer
from quintain.trainer.progress import Progress
from quintain.trainer.weights import DiskDelivery, InProcessDelivery, VersionedPolicy, WeightDelivery

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

POLL_S = 0.2


class EnginePolicy(Policy, VersionedPolicy, Protocol):
    """A policy whose weights change."""


class Engine(Protocol):
    """What samples for a run. Life cycle: `start` once the model has the weights to begin with."""

    policy: EnginePolicy
    in_process: bool
    """It samples with the trainer's own model, also before `start`."""
    description: str
    """For `status.json`: kind, version, addresses."""

    def start(self, export: Callable[[Path], Any], *, version: int, progress: Progress) -> WeightDelivery:
        """Be ready to sample, once `deliver` has given the weights; `export` writes the live ones into a folder."""
        ...


class LocalEngine:
    """In this process, with the model that is trained."""

    in_process, description = True, "local"

    def __init__(self, model: PreTrainedModel) -> None:
        self.policy: EnginePolicy = LocalPolicy(model)

    def start(self, export: Callable[[Path], Any], *, version: int, progress: Progress) -> WeightDelivery:
        return InProcessDelivery(self.policy)


class SGLangEngine:
    """SGLang servers: started here (`engine.launch`) or running already (`engine.urls`)."""

    in_process = False

    def __init__(
        self,
        config: EngineConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        work_dir: Path,
        stack: ExitStack,
    ) -> None:
        self._config, self._tokenizer, self._stack = config, tokenizer, stack
        self._weights_dir, self._logs = work_dir / "weights", work_dir / "logs"
        self._servers: dict[str, ManagedServer] = {}
        if config.launch is not None:
            for index in range(config.launch.num_servers):
                log = self._logs / f"sglang-{index}.log"
                server = ManagedServer(config.launch, model_dir=self._weights_dir, log=log)
                self._servers[server.url] = server
        self.urls = config.urls or tuple(self._servers)
        self._delivery: DiskDelivery | None = None
        self._policy = SGLangPolicy(
            self.urls,
            vocab_size=model.config.get_text_config().vocab_size,
            router=config.router,
            max_in_flight=config.max_in_flight,
            stream=config.stream,
            request_timeout_s=config.request_timeout_s,
            retry_s=config.retry_s,
            revive=self._revive,
        )
        self.policy: EnginePolicy = self._policy
        self.description = "sglang"

    def start(self, export: Callable[[Path], Any], *, version: int, progress: Progress) -> WeightDelivery:
        """Raises EngineError, with the end of the log, where a server can't be started or doesn't fit."""

        def write(folder: Path) -> None:
            export(folder)
            self._tokenizer.save_pretrained(folder)

        delivery = DiskDelivery(
            self._weights_dir,
            export=write,
            urls=self.urls,
            policy=self._policy,
            stage_timeout_s=self._config.sync_timeout_s,
            revive=self._revive,
        )
        count = f"{len(self._servers) or len(self.urls)} server{'s' if len(self.urls) > 1 else ''}"
        with progress.phase(f"engine (sglang, {count})"):
            self._stack.callback(shutil.rmtree, self._weights_dir, ignore_errors=True)  # after the servers ended
            for server in self._servers.values():
                server.model_dir, server.weight_version = delivery.save(version), version
                self._stack.callback(server.stop)
            infos = asyncio.run(self._open())
        self._delivery = delivery
        self.description = f"sglang {infos[0].version} at {', '.join(self.urls)}"
        return delivery

    async def _open(self) -> list[Any]:
        async with asyncio.TaskGroup() as starts:
            for server in self._servers.values():
                starts.create_task(server.start())
        try:
            return await self._policy.start()
        finally:
            await self._policy.drain()  # its connections belong to this event loop

    async def _revive(self, client: SGLangClient) -> None:
        """Start our own server again, or wait for someone else's; then bring it up to date."""
        assert self._delivery is not None
        server = self._servers.get(client.url)
        if server is not None:
            if (newest := self._delivery.newest) is not None:
                server.model_dir, server.weight_version = newest.path, newest.version
            await server.restart(self._delivery.bring_up_to_date)
            return
        give_up = time.monotonic() + self._config.retry_s
        while not await client.healthy():
            if time.monotonic() > give_up:
                return  # whoever asks it next says what is wrong
            await asyncio.sleep(POLL_S)
        await self._delivery.bring_up_to_date(client)


def open_engine(
    config: EngineConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    work_dir: Path,
    stack: ExitStack,
) -> Engine:
    """The engine that `config` asks for; servers start later, and end when `stack` unwinds. Files go to `work_dir`."""
    if config.type == "local":
        return LocalEngine(model)
    return SGLangEngine(config, model, tokenizer, work_dir=work_dir, stack=stack)
