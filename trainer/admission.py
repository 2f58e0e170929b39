"""Which task draws may start, and which finished groups make a batch, so that no trained token is too old.

Symbols: S = `max_staleness`, K = optimizer steps a batch, P = groups a batch, V = the version at the first optimizer
step of the batch that is formed next, v = the oldest version that may have sampled a group's tokens. A group that is
trained on in the n-th batch from now (n = 0 is the next) has staleness at most ``V + nK - v``, so it has to be in
batch ``n <= due = floor((S + v - V) / K)``. All groups can be in time exactly when, for every n, at most
``(n + 1) P`` of them are due by batch n.

Invariants (the law): that condition holds after every admission and every batch, whatever finishes first. A new group
gets in only where it leaves the condition true; a batch is formed only of finished groups whose leaving keeps it
true, and where there are not enough of those, the learner waits for the unfinished ones named by `blocking`. Hence no
group is ever thrown away for its age, and slow tasks are trained as often as they are drawn (D01, D14).

A check of the next batch alone (take what would be too old one batch later) is not enough: with P = 2 and S = 2, six
groups of version 0 of which the last two finish first, then two of version 1, leave four for the batch at version 2.

Does not do: starting rollouts, knowing the versions that engines serve, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StalenessRule = Literal["admit", "withhold"]


class AdmissionError(RuntimeError):
    """The staleness law would have been broken: a defect of the caller."""


@dataclass(slots=True)
class _Group:
    draw: int
    oldest_version: int
    """Of the engine's weights at admission; of its trained tokens once it is finished."""
    finished: bool = False


class Admission:
    """The groups between their admission and their batch. One thread; holds numbers only.

    Life cycle: `admit` while `room` says so, `finish` or `release` each draw once, `choose` and `take` for each batch.
    """

    def __init__(
        self, *, groups_per_batch: int, steps_per_batch: int, max_staleness: int, rule: StalenessRule = "admit"
    ) -> None:
        """`rule`: `admit` forms batches of whatever finished first, as far as the law allows; `withhold` keeps the
        order of admission, so that finished groups wait for slower ones before them."""
        self.groups_per_batch, self.steps_per_batch = groups_per_batch, steps_per_batch
        self.max_staleness, self.rule = max_staleness, rule
        self._groups: dict[int, _Group] = {}  # by draw, in the order of admission

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Draws that were admitted and neither taken nor released, in the order of admission."""
        return tuple(self._groups)

    def room(self, *, served_version: int, next_version: int) -> int:
        """How many groups may start now.

        Args:
            served_version: the oldest version that an engine still samples with.
            next_version: V, while a batch is trained on the version after its last optimizer step.
        """
        due = self._due(served_version, next_version)
        return max(0, self.groups_per_batch * (due + 1) - len(self._groups))

    def admit(self, draw: int, *, served_version: int, next_version: int) -> None:
        """Count the group of `draw`, which starts now. Raises AdmissionError where there is no room for it."""
        if draw in self._groups:
            raise AdmissionError(f"draw {draw} was admitted twice")
        if self.room(served_version=served_version, next_version=next_version) < 1:
            raise AdmissionError(
                f"draw {draw} would be too old: {len(self._groups)} groups are under way, the engines serve version "
                f"{served_version}, the next batch starts at {next_version}, and max_staleness is {self.max_staleness}"
            )
        self._groups[draw] = _Group(draw, served_version)

    def finish(self, draw: int, *, oldest_version: int | None) -> None:
        """The group is there; `oldest_version` of its trained tokens (None: it has none)."""
        group = self._groups[draw]
        group.finished = True
        if oldest_version is not None:
            if oldest_version < group.oldest_version:
                raise AdmissionError(
                    f"draw {draw} holds tokens of version {oldest_version}, but was admitted when every engine served "
                    f"version {group.oldest_version}: an engine was not up to date"
                )
            group.oldest_version = oldest_version

    def release(self, draw: int) -> None:
        """The group will not be trained on (it failed, or teaches nothing); another draw may take its place."""
        del self._groups[draw]

    def choose(self, next_version: int) -> tuple[int, ...] | None:
        """The draws of the batch at `next_version`; None where the learner has to wait. Nothing changes by asking."""
        if self.rule == "withhold":
            first = list(self._groups.values())[: self.groups_per_batch]
            whole = len(first) == self.groups_per_batch and all(group.finished for group in first)
            return tuple(group.draw for group in first) if whole else None
        batch = self._soonest_due(next_version)
        if len(batch) < self.groups_per_batch or self._late(batch, next_version):
            return None
        return tuple(group.draw for group in batch)

    def take(self, draws: Sequence[int], next_version: int) -> None:
        """These go into the batch at `next_version`. Raises AdmissionError where one of them is too old for it."""
        for draw in draws:
            staleness = next_version - self._groups[draw].oldest_version
            if staleness > self.max_staleness:
                raise AdmissionError(f"draw {draw} has staleness {staleness}, above max_staleness {self.max_staleness}")
        for draw in draws:
            del self._groups[draw]

    def blocking(self, next_version: int) -> tuple[int, ...]:
        """The unfinished draws that the batch at `next_version` waits for, in the order of admission; those that the
        law needs, or, where only the number is short, all."""
        unfinished = [group for group in self._groups.values() if not group.finished]
        if self.rule == "withhold":
            first = list(self._groups.values())[: self.groups_per_batch]
            return tuple(group.draw for group in first if not group.finished)
        late = self._late(self._soonest_due(next_version), next_version)
        needed = [group for group in unfinished if self._due(group.oldest_version, next_version) in late]
        return tuple(group.draw for group in (needed or unfinished))

    def _soonest_due(self, next_version: int) -> list[_Group]:
        """Up to P finished groups, the soonest due first, then by admission: if any choice keeps the law, this does."""
        finished = [group for group in self._groups.values() if group.finished]
        finished.sort(key=lambda group: self._due(group.oldest_version, next_version))  # stable
        return finished[: self.groups_per_batch]

    def _late(self, batch: Sequence[_Group], next_version: int) -> set[int]:
        """The batches n by which too much would be due once `batch` has gone, and all before them; empty: none."""
        leaving = {group.draw for group in batch}
        due = sorted(
            self._due(group.oldest_version, next_version)
            for group in self._groups.values()
            if group.draw not in leaving
        )
        too_many = [n for index, n in enumerate(due) if index + 1 > self.groups_per_batch * n]
        return set(range(max(too_many) + 1)) if too_many else set()

    def _due(self, oldest_version: int, next_version: int) -> int:
        """The last batch, counted from the next one, that may hold a group of `oldest_version`; -1: none may."""
        return (self.max_staleness + oldest_version - next_version) // self.steps_per_batch
