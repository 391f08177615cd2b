"""The scheduler runs each callback once, claimed under the lock and run outside it, driven by its caller."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from timer_service.errors import DurableTimerError
from timer_service.scheduler import DelayedScheduler, SchedulerFull

DEADLINE_S = 20.0


class Runs:
    """A scheduler of strings, and a note of what has run."""

    def __init__(self, capacity: int = 100) -> None:
        self.scheduler: DelayedScheduler[str] = DelayedScheduler(capacity)
        self.ran: list[str] = []

    def add(self, id: str, due: int, then: Callable[[], object] = lambda: None) -> None:
        def callback() -> None:
            self.ran.append(id)
            then()

        self.scheduler.schedule(id, due, callback)


@pytest.fixture
def runs() -> Runs:
    return Runs()


def test_the_worked_example(runs: Runs):
    """schedule(a,10), schedule(b,5), schedule(a,3): next is 3, run_due(4) runs a, cancel(b) once, then nothing."""
    runs.add("a", 10)
    runs.add("b", 5)
    runs.add("a", 3)
    assert runs.scheduler.next() == 3
    assert runs.scheduler.run_due(4) == 1
    assert runs.ran == ["a"]
    assert runs.scheduler.cancel("b") is True
    assert runs.scheduler.run_due(100) == 0
    assert runs.scheduler.cancel("b") is False
    assert runs.scheduler.next() is None


def test_due_exactly_now_is_due(runs: Runs):
    """And a unit later is not; times are plain integers of any size and sign."""
    runs.add("a", 5)
    runs.add("b", 6)
    runs.add("past", -(10**30))
    runs.add("far", 10**30)
    assert runs.scheduler.run_due(5) == 2
    assert runs.ran == ["past", "a"]
    assert runs.scheduler.next() == 6
    assert runs.scheduler.run_due(10**30) == 2


def test_one_snapshot_is_ordered_by_due_and_id(runs: Runs):
    """Not by the order of scheduling."""
    for id, due in [("c", 2), ("b", 2), ("z", 1), ("d", 2), ("a", 2), ("y", 1)]:
        runs.add(id, due)
    assert runs.scheduler.run_due(2) == 6
    assert runs.ran == list("yzabcd")


def test_replacing_takes_time_and_callback_together(runs: Runs):
    """The old callback never runs, the new one once, at the new time, whether earlier or later."""
    runs.add("a", 5, lambda: pytest.fail("was replaced"))
    runs.add("b", 1)
    runs.scheduler.schedule("a", 7, lambda: runs.ran.append("new a"))
    runs.scheduler.schedule("b", 6, lambda: runs.ran.append("new b"))
    assert len(runs.scheduler) == 2
    assert runs.scheduler.run_due(5) == 0
    assert runs.scheduler.run_due(6) == 1
    assert runs.scheduler.run_due(7) == 1
    assert runs.ran == ["new b", "new a"]


def test_cancel_takes_what_is_pending(runs: Runs):
    """True once; unknown, cancelled and run ids give False."""
    for id in "abc":
        runs.add(id, 1)
    assert [runs.scheduler.cancel(id) for id in "bbx"] == [True, False, False]
    runs.scheduler.run_due(1)
    assert runs.ran == ["a", "c"]
    assert runs.scheduler.cancel("a") is False


# ── capacity ────────────────────────────────────────────────────────────────────────────────────────────────


def test_c45_full_refuses_a_new_id_and_replaces_an_old_one():
    """The refusal changes nothing; a cancel or a run makes room for one."""
    runs = Runs(capacity=2)
    runs.add("a", 1)
    runs.add("b", 2)
    with pytest.raises(SchedulerFull, match="2 ids are pending"):
        runs.add("c", 0)
    assert (len(runs.scheduler), runs.scheduler.next()) == (2, 1)
    runs.add("b", 0)
    runs.scheduler.run_due(0)
    runs.add("c", 3)
    with pytest.raises(SchedulerFull):
        runs.add("d", 3)
    runs.scheduler.cancel("a")
    runs.add("d", 3)
    assert runs.scheduler.run_due(3) == 2
    assert runs.ran == ["b", "c", "d"]


def test_room_is_made_when_it_is_claimed():
    """A callback of a full scheduler can schedule itself again."""
    runs = Runs(capacity=1)
    runs.add("a", 1, lambda: runs.add("a", 2))
    assert runs.scheduler.run_due(1) == 1
    assert runs.scheduler.next() == 2


def test_capacities_and_errors():
    """None for nothing, never a negative one; and full is an error of this project's tree."""
    with pytest.raises(ValueError, match="negative"):
        DelayedScheduler(-1)
    for odd in (1.5, float("nan"), True, None):
        with pytest.raises(TypeError, match="a capacity is an int"):
            DelayedScheduler(odd)  # type: ignore[arg-type]
    with pytest.raises(DurableTimerError):
        DelayedScheduler[str](0).schedule("a", 1, print)


# ── re-entrancy ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_callback_adds_waits_for_the_next_drive(runs: Runs):
    """Even when it is due, and earlier than what still runs."""
    runs.add("a", 5, lambda: runs.add("x", 0))
    runs.add("b", 5)
    assert runs.scheduler.run_due(5) == 2
    assert runs.ran == ["a", "b"]
    assert runs.scheduler.next() == 0
    assert runs.scheduler.run_due(5) == 1
    assert runs.ran == ["a", "b", "x"]


def test_a_claimed_id_is_not_pending(runs: Runs):
    """In a callback: cancelling it gives False and comes too late, scheduling it adds another run."""
    answers: list[object] = []

    def then() -> None:
        answers.extend([runs.scheduler.cancel("a"), runs.scheduler.cancel("b"), len(runs.scheduler)])
        answers.append(runs.scheduler.next())
        runs.scheduler.schedule("b", 7, lambda: runs.ran.append("b again"))

    runs.add("a", 5, then)
    runs.add("b", 5)
    runs.add("c", 9)
    assert runs.scheduler.run_due(5) == 2
    assert runs.ran == ["a", "b"]
    assert answers == [False, False, 1, 9]
    assert runs.scheduler.run_due(8) == 1
    assert runs.ran == ["a", "b", "b again"]


def test_a_callback_may_cancel_and_move_what_is_pending(runs: Runs):
    """At once: what it cancels never runs, what it moves runs at its new time."""

    def then() -> None:
        assert runs.scheduler.cancel("b") is True
        runs.add("c", 8)

    runs.add("a", 5, then)
    runs.add("b", 6)
    runs.add("c", 6)
    assert runs.scheduler.run_due(5) == 1
    assert runs.scheduler.run_due(7) == 0
    assert runs.scheduler.run_due(8) == 1
    assert runs.ran == ["a", "c"]


def test_a_callback_may_drive(runs: Runs):
    """A drive within a drive runs what was added meanwhile, and nothing that is claimed."""
    counts: list[int] = []

    def then() -> None:
        runs.add("x", 1)
        counts.append(runs.scheduler.run_due(5))

    runs.add("a", 5, then)
    runs.add("b", 5)
    assert runs.scheduler.run_due(5) == 2
    assert counts == [1]
    assert runs.ran == ["a", "x", "b"]


def test_the_lock_is_free_while_callbacks_run(runs: Runs):
    """Another thread schedules, cancels, asks and drives meanwhile."""
    answers: list[object] = []

    def elsewhere() -> None:
        runs.add("x", 3)
        answers.extend([runs.scheduler.cancel("later"), runs.scheduler.next(), runs.scheduler.run_due(3)])

    def then() -> None:
        thread = threading.Thread(target=elsewhere, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()

    runs.add("a", 5, then)
    runs.add("later", 9)
    assert runs.scheduler.run_due(5) == 1
    assert answers == [True, 3, 1]
    assert runs.ran == ["a", "x"]


def test_two_drives_share_the_work():
    """Eight threads that drive at once: each callback runs once, and the counts add up."""
    scheduler: DelayedScheduler[int] = DelayedScheduler(20_000)
    ran: list[int] = []
    counts: list[int] = []
    start = threading.Barrier(8)

    def drive() -> None:
        start.wait(DEADLINE_S)
        counts.append(sum(scheduler.run_due(now) for now in range(0, 2_001, 5)))

    for id in range(2_000):
        scheduler.schedule(id, id, partial(ran.append, id))
    threads = [threading.Thread(target=drive, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(ran) == list(range(2_000))
    assert sum(counts) == 2_000


class Noticing(int):
    """A time of day; whenever it is compared, another thread tries to look into the scheduler."""

    scheduler: DelayedScheduler[str]
    threads: list[tuple[threading.Thread, bool]]

    def __ge__(self, other: int) -> bool:
        thread = threading.Thread(target=self.scheduler.next, daemon=True)
        thread.start()
        thread.join(0.1)  # held up, unless the lock is free
        self.threads.append((thread, thread.is_alive()))
        return int(self) >= int(other)


def test_nobody_comes_in_between_while_it_claims(runs: Runs):
    """The lock is held from the first look to the last; then others go on."""
    runs.add("a", 5)
    now = Noticing(5)
    now.scheduler, now.threads = runs.scheduler, []
    assert runs.scheduler.run_due(now) == 1
    assert [held_up for _, held_up in now.threads] == [True]
    for thread, _ in now.threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


# ── failures ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_failure_comes_out_and_the_rest_of_the_snapshot_does_not_run(runs: Runs):
    """Not now and not later; its note names them. What was not claimed is untouched."""
    error = LookupError("b")

    def fail() -> None:
        raise error

    runs.add("a", 1)
    runs.add("b", 2, fail)
    runs.add("c", 3)
    runs.add("d", 4)
    runs.add("later", 6)
    with pytest.raises(LookupError) as caught:
        runs.scheduler.run_due(5)
    assert caught.value is error
    assert error.__notes__ == ["2 callbacks that were due with it did not run: 'c', 'd'"]
    assert runs.ran == ["a", "b"]
    assert (len(runs.scheduler), runs.scheduler.next()) == (1, 6)
    assert runs.scheduler.run_due(6) == 1
    assert runs.ran == ["a", "b", "later"]


def test_the_note_of_a_failure_stays_short(runs: Runs):
    """Ten names at most, and none at all when the last one failed."""

    def fail() -> None:
        raise LookupError

    runs.add("a", 1, fail)
    with pytest.raises(LookupError) as caught:
        runs.scheduler.run_due(1)
    assert not hasattr(caught.value, "__notes__")
    runs.add("a", 1, fail)
    for number in range(10, 30):
        runs.add(str(number), 2)
    with pytest.raises(LookupError) as caught:
        runs.scheduler.run_due(2)
    names = ", ".join(f"'{number}'" for number in range(10, 20))
    assert caught.value.__notes__ == [f"20 callbacks that were due with it did not run: {names}, …"]


def test_what_a_failing_callback_did_before_stands(runs: Runs):
    """It has scheduled itself again: that is a new entry, not part of the snapshot."""

    def fail() -> None:
        runs.add("a", 9)
        raise LookupError

    runs.add("a", 1, fail)
    with pytest.raises(LookupError):
        runs.scheduler.run_due(1)
    assert runs.scheduler.next() == 9


def test_ids_that_cannot_be_compared_claim_nothing():
    """Only equal due times need an order of ids; without one nothing runs and everything stays pending."""
    scheduler: DelayedScheduler[str | int] = DelayedScheduler(10)
    ran: list[str | int] = []
    mixed: list[tuple[str | int, int]] = [("a", 1), (2, 2), ("c", 3), (4, 3)]
    for id, due in mixed:
        scheduler.schedule(id, due, partial(ran.append, id))
    assert scheduler.run_due(2) == 2
    with pytest.raises(TypeError, match="not supported"):
        scheduler.run_due(3)
    assert ran == ["a", 2]
    assert (len(scheduler), scheduler.next()) == (2, 3)
    assert scheduler.cancel(4) is True
    assert scheduler.run_due(3) == 1


@pytest.mark.parametrize("due", [None, True, 1.0, float("nan"), "5"])
def test_a_due_time_is_an_integer(runs: Runs, due: int):
    """Anything else is refused: a new id is not taken, an old one not replaced."""
    runs.add("old", 5)
    for id in ("old", "new"):
        with pytest.raises(TypeError, match="a time is an int"):
            runs.scheduler.schedule(id, due, lambda: pytest.fail("was refused"))
    assert len(runs.scheduler) == 1
    runs.scheduler.run_due(5)
    assert runs.ran == ["old"]


@pytest.mark.parametrize("odd", [None, "print", 5])
def test_a_callback_can_be_called(runs: Runs, odd: Any):
    """Refused when it is scheduled: when it is due it would take the rest of its snapshot with it."""
    runs.add("old", 5)
    for id in ("old", "new"):
        with pytest.raises(TypeError, match="a callback"):
            runs.scheduler.schedule(id, 1, odd)
    assert (len(runs.scheduler), runs.scheduler.next()) == (1, 5)
    runs.scheduler.run_due(5)
    assert runs.ran == ["old"]


# ── payloads and memory ─────────────────────────────────────────────────────────────────────────────────────


class Task:
    """A callback with a payload, without any order."""

    def __init__(self, payload: dict[str, int], ran: list[dict[str, int]]) -> None:
        self.payload, self.ran = payload, ran

    def __call__(self) -> None:
        self.ran.append(self.payload)


def test_c45_equal_deadlines_never_compare_callbacks():
    """A thousand of them, due at once, come by id, whatever order they were scheduled in."""
    scheduler: DelayedScheduler[int] = DelayedScheduler(1_000)
    ran: list[dict[str, int]] = []
    for id in sorted(range(1_000), key=lambda id: id * 7 % 1_000):
        scheduler.schedule(id, 5, Task({"number": id}, ran))
    assert scheduler.run_due(5) == 1_000
    assert [payload["number"] for payload in ran] == list(range(1_000))


def test_c45_a_million_times_added_and_cancelled_leaves_nothing():
    """Under new ids each time, in a scheduler of 100: it never fills up and nothing is kept."""
    scheduler: DelayedScheduler[int] = DelayedScheduler(100)

    def cycles(first: int, number: int) -> None:
        for id in range(first, first + number):
            if id >= 100:
                assert scheduler.cancel(id - 100)
            scheduler.schedule(id, id, print)

    cycles(0, 980_000)
    tracemalloc.start()
    try:
        cycles(980_000, 5_000)
        before, _ = tracemalloc.get_traced_memory()
        cycles(985_000, 15_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(scheduler) == len(scheduler._pending) == len(scheduler._heap._array) == 100
    assert after - before < 20_000
