"""What samples tokens: the `Policy` protocol. Two fakes are shipped: `ScriptedPolicy` (answers by heart, for tests of
environments and rollouts) and `SimulatedPolicy` (takes its time, for tests of schedules)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from quintain.agents.completion import Completion, GenerateRequest


class Policy(Protocol):
    """Samples token ids from token ids."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token would be sampled from."""
        ...

    @property
    def max_context_tokens(self) -> int | None:
        """Most tokens of prompt and reply together; None = no limit known. Rollouts ask for no more than this."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises PolicyError where the engine failed; nothing was sampled then."""
        ...

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Held by each rollout worker from its first to its last trajectory.

        A worker between `generate` calls is in its tool phase. `LocalPolicy` samples only when every slot waits in
        `generate`, so that the rows of a batch depend on what was sampled and never on how long a tool took.
        """
        ...

    async def drain(self) -> None:
        """Give up what is still being sampled, and return once nothing reads the weights any more.

        Called at the end of every collection, also after errors and cancellation: rollouts that reached their
        deadline leave requests behind. The policy can be used again afterwards.
        """
        ...

    async def close(self) -> None: ...


class PolicyError(Exception):
    """The engine failed: an infrastructure outcome."""
