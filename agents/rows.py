"""Building token rows as the conversation goes on: tokens are only ever added, so a row is its own exact prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quintain.agents.completion import Completion
from quintain.agents.trajectory import TokenRow


class RowBuilder:
    """One row under construction. It always ends with a sampled token, except while it is empty."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._policy_versions: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, prompt_ids: Sequence[int], completion: Completion) -> None:
        """What was put before a generation (mask 0, no log-prob), and what the policy then sampled."""
        num_prompt, num_sampled = len(prompt_ids), len(completion.token_ids)
        self.token_ids += prompt_ids
        self.token_ids += completion.token_ids
        self._sampled += [False] * num_prompt + [True] * num_sampled
        self._logprobs += [math.nan] * num_prompt
        self._logprobs += completion.logprobs
        self._policy_versions += [-1] * num_prompt
        self._policy_versions += completion.policy_versions()

    def build(self) -> TokenRow:
        return TokenRow(
            token_ids=tuple(self.token_ids),
            sampled=tuple(self._sampled),
            logprobs=tuple(self._logprobs),
            policy_versions=tuple(self._policy_versions),
        )
