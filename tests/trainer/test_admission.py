"""The staleness law (D01, D14): simulated learners and rollouts, random in everything."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintain.trainer.admission import Admission, AdmissionError, StalenessRule


def test_there_is_room_for_as_many_groups_as_can_be_in_time_also_after_a_resume():
    """D01: 12, not 52: what was trained before the resume does not count."""
    admission = Admission(groups_per_batch=4, steps_per_batch=1, max_staleness=2)
    assert admission.room(served_version=10, next_version=10) == 12
    assert admission.room(served_version=10, next_version=11) == 8  # a batch is being trained


def test_without_staleness_nothing_starts_while_a_batch_is_trained():
    admission = Admission(groups_per_batch=4, steps_per_batch=2, max_staleness=0)
    assert admission.room(served_version=6, next_version=6) == 4
    assert admission.room(served_version=6, next_version=8) == 0


def test_a_group_that_would_be_too_old_is_not_admitted():
    admission = Admission(groups_per_batch=1, steps_per_batch=1, max_staleness=1)
    for draw in range(2):
        admission.admit(draw, served_version=5, next_version=5)
    with pytest.raises(AdmissionError, match=r"draw 2 would be too old.*max_staleness is 1"):
        admission.admit(2, served_version=5, next_version=5)
    with pytest.raises(AdmissionError, match="draw 1 was admitted twice"):
        admission.admit(1, served_version=5, next_version=5)


def test_slow_groups_that_only_a_later_batch_would_miss_are_waited_for_in_time():
    """A check of the next batch alone leaves four groups of version 0 for the batch at version 2, which holds two."""
    admission = Admission(groups_per_batch=2, steps_per_batch=1, max_staleness=2)
    for draw in range(6):
        admission.admit(draw, served_version=0, next_version=0)
    for draw in (4, 5):
        admission.finish(draw, oldest_version=0)
    assert admission.choose(0) == (4, 5)
    admission.take((4, 5), 0)
    for draw in (6, 7):
        admission.admit(draw, served_version=1, next_version=1)
        admission.finish(draw, oldest_version=1)
    assert admission.choose(1) is None
    assert admission.blocking(1) == (0, 1, 2, 3)
    for draw in (2, 3):
        admission.finish(draw, oldest_version=0)
    assert admission.choose(1) == (2, 3)


def test_tokens_that_are_newer_than_the_admission_may_wait_longer():
    admission = Admission(groups_per_batch=1, steps_per_batch=1, max_staleness=1)
    admission.admit(0, served_version=0, next_version=0)
    admission.admit(1, served_version=0, next_version=0)
    admission.finish(1, oldest_version=0)
    admission.take((1,), 0)
    admission.finish(0, oldest_version=1)  # it began after an update
    admission.take((0,), 2)


def test_tokens_older_than_what_every_engine_served_are_refused():
    admission = Admission(groups_per_batch=1, steps_per_batch=1, max_staleness=4)
    admission.admit(0, served_version=3, next_version=3)
    with pytest.raises(AdmissionError, match="an engine was not up to date"):
        admission.finish(0, oldest_version=2)


def test_the_last_guard_refuses_a_batch_that_is_too_old():
    admission = Admission(groups_per_batch=1, steps_per_batch=1, max_staleness=1)
    admission.admit(0, served_version=0, next_version=0)
    admission.finish(0, oldest_version=0)
    with pytest.raises(AdmissionError, match="draw 0 has staleness 2, above max_staleness 1"):
        admission.take((0,), 2)
    assert admission.outstanding == (0,)


class Simulation:
    """A learner, engines and rollouts on a clock of whole ticks; every `slow_every`-th draw is 30 times slower."""

    def __init__(
        self,
        rng: random.Random,
        admission: Admission,
        *,
        fail_frac: float = 0.0,
        skip_frac: float = 0.0,
        slow_every: int = 4,
    ) -> None:
        self.rng, self.admission = rng, admission
        self.fail_frac, self.skip_frac, self.slow_every = fail_frac, skip_frac, slow_every
        self.version = 0
        self.now = self.next_draw = 0
        self.todo: list[int] = []  # to be drawn again after a resume
        self.running: dict[int, tuple[int, int]] = {}  # draw -> (tick at which it ends, version at its first token)
        self.finished: dict[int, int] = {}
        self.trained: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()
        self.staleness: list[int] = []

    def is_slow(self, draw: int) -> bool:
        return draw % self.slow_every == 0

    def fill(self, next_version: int) -> None:
        while self.admission.room(served_version=self.version, next_version=next_version):
            draw = self.todo.pop(0) if self.todo else self.next_draw
            self.next_draw = max(self.next_draw, draw + 1)
            self.admission.admit(draw, served_version=self.version, next_version=next_version)
            start = self.rng.randint(0, 2)  # it may wait for a worker, and meet newer weights
            self.running[draw] = (self.now + start + (60 if self.is_slow(draw) else self.rng.randint(1, 3)), -1)

    def tick(self) -> None:
        self.now += 1
        for draw, (end, first) in list(self.running.items()):
            if first < 0 and self.rng.random() < 0.7:
                self.running[draw] = (end, self.version)
            if self.now >= end:
                _, first = self.running.pop(draw)
                if self.rng.random() < self.fail_frac:
                    self.admission.release(draw)
                    self.dropped[draw] += 1
                    continue
                first = first if first >= 0 else self.version
                self.finished[draw] = first
                self.admission.finish(draw, oldest_version=first)

    def batch(self) -> None:
        self.fill(self.version)
        for _ in range(10_000):
            draws = self.admission.choose(self.version)
            if draws is not None:
                break
            assert set(self.admission.blocking(self.version)) <= set(self.running)
            self.tick()
            self.fill(self.version)
        else:
            raise AssertionError("the learner waits for ever")
        self.admission.take(draws, self.version)
        for draw in draws:
            self.trained[draw] += 1
            self.staleness.append(self.version - self.finished.pop(draw))
        after = self.version + self.admission.steps_per_batch
        self.fill(after)
        for _ in range(self.rng.randint(0, 4)):  # rollouts go on while the learner trains
            self.tick()
            self.fill(after)
        num_skipped = sum(self.rng.random() < self.skip_frac for _ in range(self.admission.steps_per_batch))
        self.version = after - num_skipped

    def resume(self, admission: Admission) -> None:
        """The process dies: what was under way is drawn again, what waited to be trained too."""
        self.todo = sorted(self.admission.outstanding)
        self.admission, self.running, self.finished = admission, {}, {}


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 8))


@settings(max_examples=150, deadline=None)
@given(
    SIZES,
    st.sampled_from(["admit", "withhold"]),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.3]),
    st.sets(st.integers(1, 39), max_size=3),
)
def test_staleness_never_passes_the_bound_and_every_draw_is_trained_once(
    sizes: tuple[int, int, int],
    rule: StalenessRule,
    seed: int,
    fail_frac: float,
    skip_frac: float,
    resumes: set[int],
):
    """With failures, skipped optimizer steps, resumes, and draws that are 30 times slower than the rest."""
    num_groups, num_steps, most = sizes

    def admission() -> Admission:
        return Admission(groups_per_batch=num_groups, steps_per_batch=num_steps, max_staleness=most, rule=rule)

    run = Simulation(random.Random(seed), admission(), fail_frac=fail_frac, skip_frac=skip_frac)
    for number in range(40):
        if number in resumes:
            run.resume(admission())
        run.batch()
    assert all(0 <= staleness <= most for staleness in run.staleness)
    accounted = run.trained + run.dropped
    assert max(accounted.values()) == 1
    # Nothing is left out: whatever is not accounted for yet is under way or waits to be drawn again.
    assert set(range(run.next_draw)) == {*accounted, *run.admission.outstanding, *run.todo}


@pytest.mark.parametrize("rule", ["admit", "withhold"])
@pytest.mark.parametrize("most", [0, 1, 4])
def test_slow_tasks_are_trained_as_often_as_they_are_drawn(rule: StalenessRule, most: int):
    """D14: a quarter of the draws is 30 times slower."""
    admission = Admission(groups_per_batch=4, steps_per_batch=1, max_staleness=most, rule=rule)
    run = Simulation(random.Random(5), admission)
    for _ in range(200):
        run.batch()
    num_slow = sum(run.is_slow(draw) for draw in run.trained)
    assert abs(num_slow / len(run.trained) - 0.25) < 0.02
    assert max(run.staleness) <= most


def test_whatever_finishes_first_is_trained_first_under_admit():
    """`admit` overtakes slow groups within the bound, `withhold` waits for them: so it needs more ticks."""
    ticks = {}
    for rule in ("admit", "withhold"):
        admission = Admission(groups_per_batch=4, steps_per_batch=1, max_staleness=8, rule=rule)
        run = Simulation(random.Random(1), admission, slow_every=40)
        for _ in range(100):
            run.batch()
        ticks[rule] = run.now
    assert ticks["admit"] < ticks["withhold"]
