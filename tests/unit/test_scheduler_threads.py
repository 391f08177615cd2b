"""``run`` in a thread of its own: no change that falls between its last look and its sleep is missed, no stop is lost.

The gap between look and sleep is where a wake-up could get lost. It is hit on purpose: the scheduler reads its clock
there, and the clock of these tests lets something happen before it answers, in the same thread or in another one.
Sleeps would not end by themselves here, so that what is missed is missed for good.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from timer_service import scheduler as module
from timer_service.clock import SystemClock
from timer_service.errors import AlreadyRunning
from timer_service.scheduler import MAX_SLEEP_S, DelayedScheduler

DEADLINE_S = 20.0
SECOND = 1_000_000_000
ROUNDS = 1_000


@pytest.fixture(autouse=True)
def endless_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep ends because something happened, or the test fails."""
    monkeypatch.setattr(module, "MAX_SLEEP_S", 3_600.0)


class Clock:
    """Nanoseconds, set by hand. ``before`` is called by each reading, before it takes the time."""

    def __init__(self) -> None:
        self.now = 0
        self.before: Callable[[], object] = lambda: None

    def __call__(self) -> int:
        self.before()
        return self.now


class Owner:
    """A scheduler that runs in a thread."""

    def __init__(self) -> None:
        self.scheduler: DelayedScheduler[str] = DelayedScheduler(100)
        self.clock = Clock()
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.scheduler.run(self.clock)
        except BaseException as error:
            self.errors.append(error)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def join(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()

    def sleeps(self) -> None:
        """Wait until the thread waits: it has given the lock away, and is in the queue of the condition."""
        give_up = threading.Event()
        timer = threading.Timer(DEADLINE_S, give_up.set)
        timer.start()
        try:
            while not give_up.is_set():
                with self.scheduler._changed:
                    if self.scheduler._changed._waiters:  # type: ignore[attr-defined]
                        return
            raise AssertionError("it does not wait")
        finally:
            timer.cancel()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    if made.thread.is_alive():
        made.scheduler.stop()
        made.thread.join(DEADLINE_S)


class Note(threading.Event):
    """Set by a callback; ``heard`` waits for it."""

    def heard(self) -> bool:
        return self.wait(DEADLINE_S)


# ── it runs what is due ─────────────────────────────────────────────────────────────────────────────────────


def test_it_runs_in_its_own_thread_what_is_due(owner: Owner):
    """In order; and what is not due stays."""
    ran: list[tuple[str, int]] = []
    done = Note()
    for id in "cab":
        owner.scheduler.schedule(id, 5, lambda id=id: ran.append((id, threading.get_ident())))  # type: ignore[misc]
    owner.scheduler.schedule("d", 6, done.set)
    owner.scheduler.schedule("later", 7, done.clear)
    owner.clock.now = 6
    owner.start()
    assert done.heard()
    assert ran == [(id, owner.thread.ident) for id in "abc"]
    owner.sleeps()
    assert owner.scheduler.next() == 7


def test_it_runs_on_a_real_clock(owner: Owner):
    """Nanoseconds of the machine: never before the due time."""
    clock, at, done = SystemClock(), list[int](), Note()

    def now_ns() -> int:
        return clock.now_ms() * 1_000_000

    def callback() -> None:
        at.append(now_ns())
        done.set()

    due = now_ns() + 30_000_000
    owner.scheduler.schedule("a", due, callback)
    threading.Thread(target=owner.scheduler.run, args=(now_ns,), daemon=True).start()
    assert done.heard()
    owner.scheduler.stop()
    assert at[0] >= due


def test_an_earlier_time_wakes_it(owner: Owner):
    """New or moved, while it sleeps for a later one or for none."""
    for id, before in [("a", None), ("b", 3_600 * SECOND), ("far", 3_600 * SECOND)]:
        done = Note()
        if before is not None:
            owner.scheduler.schedule("far", before, lambda: None)
        if not owner.thread.is_alive():
            owner.start()
        owner.sleeps()
        owner.scheduler.schedule(id, 0, done.set)
        assert done.heard()


def test_wake_makes_it_look_at_a_clock_that_was_moved(owner: Owner):
    """At once."""
    done = Note()
    owner.scheduler.schedule("a", 3_600 * SECOND, done.set)
    owner.start()
    owner.sleeps()
    owner.clock.now = 3_600 * SECOND
    owner.scheduler.wake()
    assert done.heard()


def test_a_clock_that_is_moved_without_a_word_is_noticed(owner: Owner, monkeypatch: pytest.MonkeyPatch):
    """Within ``MAX_SLEEP_S``: so are a suspended machine and a wall clock that was set."""
    assert MAX_SLEEP_S <= 10
    monkeypatch.setattr(module, "MAX_SLEEP_S", 0.05)
    done = Note()
    owner.scheduler.schedule("a", 10**400, done.set)
    owner.start()
    owner.sleeps()
    owner.clock.now = 10**400
    assert done.heard()


def test_a_clock_that_stands_just_before_a_due_time_keeps_nobody_busy(owner: Owner):
    """It is looked at half as often each time: two dozen looks are an hour."""
    looks: list[float] = []
    asleep = owner.scheduler._changed
    wait = asleep.wait
    done = Note()

    def counted(timeout: float | None = None) -> bool:
        assert timeout is not None
        looks.append(timeout)
        if len(looks) == 30:
            done.set()
            return wait(timeout)
        return False  # as if that time had passed

    asleep.wait = counted  # type: ignore[method-assign]
    owner.scheduler.schedule("a", 10, lambda: None)
    owner.start()
    assert done.heard()
    assert looks[1:24] == [0.001 * 2**number for number in range(22)] + [3_600.0]
    assert looks[24:] == [3_600.0] * 6


# ── it stops ────────────────────────────────────────────────────────────────────────────────────────────────


def test_stop_ends_a_wait(owner: Owner):
    """From another thread; what is pending stays so, and it may run again."""
    done = Note()
    owner.scheduler.schedule("a", 5, done.set)
    owner.start()
    owner.sleeps()
    owner.scheduler.stop()
    owner.join()
    assert len(owner.scheduler) == 1
    owner.clock.now = 5
    owner.start()
    assert done.heard()


def test_stop_before_run_is_not_lost(owner: Owner):
    """The next run returns without running anything; the one after that runs."""
    done = Note()
    owner.scheduler.schedule("a", 0, done.set)
    owner.scheduler.stop()
    owner.scheduler.stop()
    owner.start()
    owner.join()
    assert not done.is_set()
    owner.start()
    assert done.heard()


def test_stop_from_a_callback_ends_it_after_its_snapshot(owner: Owner):
    """What was claimed runs to its end, what it added does not."""
    ran: list[str] = []

    def first() -> None:
        ran.append("a")
        owner.scheduler.stop()

    def second() -> None:
        ran.append("b")
        owner.scheduler.schedule("c", 0, print)

    owner.scheduler.schedule("a", 0, first)
    owner.scheduler.schedule("b", 0, second)
    owner.start()
    owner.join()
    assert ran == ["a", "b"]
    assert owner.scheduler.next() == 0


def test_stop_from_a_signal_handler():
    """The handler runs in the very thread that holds or waits for the lock."""
    scheduler: DelayedScheduler[str] = DelayedScheduler(1)
    before = signal.signal(signal.SIGUSR1, lambda *_: scheduler.stop())
    try:
        asked = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        asked.start()
        scheduler.run(lambda: 0)
        with scheduler._changed:
            os.kill(os.getpid(), signal.SIGUSR1)
        scheduler.run(lambda: 0)
        asked.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_run_at_a_time(owner: Owner):
    """A second one is refused, from another thread and from a callback, and the first goes on."""
    refused, done = Note(), Note()

    def again() -> None:
        with pytest.raises(AlreadyRunning):
            owner.scheduler.run(owner.clock)
        refused.set()

    owner.start()
    owner.sleeps()
    with pytest.raises(AlreadyRunning):
        owner.scheduler.run(owner.clock)
    owner.scheduler.schedule("a", 0, again)
    assert refused.heard()
    owner.scheduler.schedule("b", 0, done.set)
    assert done.heard()


def test_a_failure_ends_the_run(owner: Owner):
    """It comes out of ``run``, which may be called again; a failing clock does the same."""
    error, done = LookupError("a"), Note()

    def fail() -> None:
        raise error

    owner.scheduler.schedule("a", 0, fail)
    owner.scheduler.schedule("later", 1, done.set)
    owner.start()
    owner.join()
    owner.clock.before = fail
    owner.start()
    owner.join()
    assert owner.errors == [error, error]
    owner.clock.before = lambda: None
    owner.clock.now = 1
    owner.start()
    assert done.heard()


# ── the gap between the last look and the sleep ─────────────────────────────────────────────────────────────


def at_reading(clock: Clock, number: int, act: Callable[[], object]) -> None:
    """Let ``act`` happen during one reading of the clock, counted from now."""
    readings = iter(range(1, 1_000_000))
    clock.before = lambda: act() if next(readings) == number else None


@pytest.mark.parametrize("reading", [1, 2, 3, 4])
@pytest.mark.parametrize("far", [False, True], ids=["empty", "waiting for a later one"])
def test_an_earlier_time_at_the_last_moment(owner: Owner, reading: int, far: bool):
    """Scheduled while the clock is read, be it for looking or for sleeping: it runs."""
    done = Note()
    if far:
        owner.scheduler.schedule("far", 3_600 * SECOND, print)
    owner.scheduler.schedule("first", 0, lambda: None)
    at_reading(owner.clock, reading, lambda: owner.scheduler.schedule("near", 0, done.set))
    owner.start()
    if reading > 2:
        owner.sleeps()
        owner.scheduler.wake()
    assert done.heard()


@pytest.mark.parametrize("reading", [1, 2])
def test_a_jump_of_the_clock_at_the_last_moment(owner: Owner, reading: int):
    """The clock has just been read, is moved, and ``wake`` comes before it sleeps: it looks again."""
    done = Note()
    owner.scheduler.schedule("a", 3_600 * SECOND, done.set)
    readings = iter(range(1, 1_000_000))

    def read() -> int:
        answer = owner.clock.now
        if next(readings) == reading:
            owner.clock.now = 3_600 * SECOND
            owner.scheduler.wake()
        return answer

    threading.Thread(target=owner.scheduler.run, args=(read,), daemon=True).start()
    assert done.heard()
    owner.scheduler.stop()


@pytest.mark.parametrize("reading", [1, 2])
def test_a_stop_at_the_last_moment(owner: Owner, reading: int):
    """It ends without sleeping."""
    at_reading(owner.clock, reading, owner.scheduler.stop)
    owner.start()
    owner.join()


def test_a_slow_callback_makes_nothing_late(owner: Owner):
    """How long to sleep is reckoned from a new reading, after the callbacks."""
    asked, done = list[float | None](), Note()

    def slow() -> None:
        owner.clock.now += 59 * SECOND

    def wait(timeout: float | None = None) -> bool:
        asked.append(timeout)
        owner.scheduler.stop()
        done.set()
        return True

    owner.scheduler._changed.wait = wait  # type: ignore[method-assign]
    owner.scheduler.schedule("slow", 0, slow)
    owner.scheduler.schedule("next", 60 * SECOND, print)
    owner.start()
    assert done.heard()
    owner.join()
    assert asked == [1.0]


class MeetingClock(Clock):
    """Its readings wait, after they took the time, until the test lets them go: there it meets the owner thread."""

    def __init__(self) -> None:
        super().__init__()
        self.meet = False
        self.arrived, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self) -> int:
        now = self.now
        if self.meet:
            self.arrived.release()
            assert self.go.acquire(timeout=DEADLINE_S)
        return now

    def await_reading(self) -> None:
        assert self.arrived.acquire(timeout=DEADLINE_S)


@pytest.mark.parametrize("act", ["an earlier time", "a jump of the clock", "stop"])
def test_a_thousand_races(act: str):
    """Another thread acts while the owner goes to sleep: in the gap itself, or at once after letting it go on."""
    owner = Owner()
    owner.clock = clock = MeetingClock()
    owner.start()
    for number in range(ROUNDS):
        done = Note()
        clock.meet = True
        owner.scheduler.schedule("far", clock.now + 3_600 * SECOND, done.set)
        owner.scheduler.wake()
        clock.await_reading()
        if number % 4 < 2:  # the other one of the two readings in a round: for looking, for sleeping
            clock.go.release()
            owner.scheduler.wake()
            clock.await_reading()
        clock.meet = False
        if number % 2:
            clock.go.release()
        match act:
            case "an earlier time":
                owner.scheduler.schedule("near", clock.now, done.set)
            case "a jump of the clock":
                clock.now += 3_600 * SECOND
                owner.scheduler.wake()
            case "stop":
                owner.scheduler.stop()
        if not number % 2:
            clock.go.release()
        if act == "stop":
            owner.join()
            owner.start()
        else:
            assert done.heard(), f"round {number}"
    owner.scheduler.stop()
    owner.join()
    assert owner.errors == []
