"""Clocks never go back, whatever the wall clock does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from timer_service.clock import MAX_OFFSET_MS, ManualClock, OffsetClock, ShiftingClock, SystemClock


class Time:
    """The two clocks of a machine, set by hand: wall time can be stepped, monotonic time can't."""

    def __init__(self) -> None:
        self.wall = 1_700_000_000.0
        self.monotonic = 50.0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def steps(self, seconds: float) -> None:
        self.wall += seconds

    def clock(self) -> SystemClock:
        return SystemClock(lambda: self.wall, lambda: self.monotonic)


def test_it_shows_the_wall_clock():
    """In epoch milliseconds."""
    real = SystemClock()
    before = int(time.time() * 1000)
    assert before - 1 <= real.now_ms() <= int(time.time() * 1000) + 1
    assert Time().clock().now_ms() == 1_700_000_000_000


def test_it_runs_on_over_a_step_back():
    """At its own pace, as if the step had not been; nothing stands still."""
    machine = Time()
    clock = machine.clock()
    machine.passes(10)
    assert clock.now_ms() == 1_700_000_010_000
    machine.steps(-3_600)
    assert clock.now_ms() == 1_700_000_010_000
    machine.passes(10)
    assert clock.now_ms() == 1_700_000_020_000


def test_it_follows_a_step_forward():
    """At once: what is due by the wall clock is due."""
    machine = Time()
    clock = machine.clock()
    machine.steps(3_600)
    assert clock.now_ms() == 1_700_003_600_000
    machine.passes(1)
    assert clock.now_ms() == 1_700_003_601_000


def test_a_suspended_machine_is_a_step_forward():
    """While suspended the monotonic clock may stand; the deadlines of that time are due on waking."""
    machine = Time()
    clock = machine.clock()
    machine.wall += 7_200
    assert clock.now_ms() == 1_700_007_200_000


def test_the_wall_clock_may_catch_up_after_a_step_back():
    """Once it is ahead again it is followed again."""
    machine = Time()
    clock = machine.clock()
    machine.steps(-5)
    machine.passes(1)
    assert clock.now_ms() == 1_700_000_001_000
    machine.steps(6)
    assert clock.now_ms() == int(machine.wall * 1000) == 1_700_000_002_000


MOVES = st.lists(st.tuples(st.sampled_from(["passes", "steps"]), st.floats(-1e6, 1e6, allow_nan=False)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(MOVES)
def test_it_never_goes_back_and_never_lags(moves: list[tuple[str, float]]):
    """Under any steps of the wall clock: not before an earlier reading, not behind the wall or the time passed."""
    machine = Time()
    clock = machine.clock()
    last = clock.now_ms()
    for what, seconds in moves:
        passed = abs(seconds) if what == "passes" else 0.0
        getattr(machine, what)(abs(seconds) if what == "passes" else seconds)
        now = clock.now_ms()
        assert now >= last
        assert now >= int(machine.wall * 1000)
        assert now - last >= int(passed * 1000) - 1
        last = now


# ── the test clock ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_offset_is_added():
    """Shifts add up, and each returns the total."""
    clock = OffsetClock(ManualClock(1_000))
    assert clock.now_ms() == 1_000
    assert clock.shift(500) == 500
    assert clock.shift(0) == 500
    assert clock.shift(1) == 501
    assert (clock.now_ms(), clock.offset_ms) == (1_501, 501)


@pytest.mark.parametrize("by_ms", [-1, MAX_OFFSET_MS + 1])
def test_absurd_shifts_change_nothing(by_ms: int):
    """Time never goes back, and never further than to the year 2200; listeners hear nothing of it."""
    clock = OffsetClock(ManualClock(1_000))
    heard: list[int] = []
    clock.on_shift(lambda: heard.append(clock.now_ms()))
    with pytest.raises(ValueError, match=r"never goes back|must not exceed"):
        clock.shift(by_ms)
    clock.shift(MAX_OFFSET_MS)
    with pytest.raises(ValueError, match="must not exceed"):
        clock.shift(1)
    assert heard == [1_000 + MAX_OFFSET_MS]
    assert clock.offset_ms == MAX_OFFSET_MS


def test_listeners_hear_of_each_shift_after_it():
    """All of them, with the new time on the clock."""
    clock = OffsetClock(ManualClock(0))
    heard: list[tuple[str, int]] = []
    clock.on_shift(lambda: heard.append(("one", clock.now_ms())))
    clock.on_shift(lambda: heard.append(("two", clock.now_ms())))
    clock.shift(5)
    assert heard == [("one", 5), ("two", 5)]


def test_the_manual_clock():
    """Stands until it is told otherwise, tells its listeners, and refuses to go back."""
    clock = ManualClock(10)
    heard: list[int] = []
    clock.on_shift(lambda: heard.append(clock.now_ms()))
    assert clock.now_ms() == 10
    clock.advance(5)
    clock.advance(0)
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1)
    assert clock.now_ms() == 15
    assert heard == [15, 15]


# ── listeners and threads ───────────────────────────────────────────────────────────────────────────────────


def jump(clock: OffsetClock | ManualClock, by_ms: int) -> None:
    if isinstance(clock, OffsetClock):
        clock.shift(by_ms)
    else:
        clock.advance(by_ms)


@pytest.fixture(params=[ManualClock, lambda: OffsetClock(ManualClock())], ids=["manual", "offset"])
def clock(request: pytest.FixtureRequest) -> OffsetClock | ManualClock:
    made: OffsetClock | ManualClock = request.param()
    return made


def test_a_listener_that_fails_keeps_nobody_from_hearing(clock: OffsetClock | ManualClock):
    """The clock moves, all hear of it, and what they raised comes out together."""
    heard: list[int] = []
    errors = [LookupError("one"), ValueError("two")]

    def fail(error: Exception) -> None:
        raise error

    ends = [clock.on_shift(partial(fail, error)) for error in errors]
    clock.on_shift(lambda: heard.append(clock.now_ms()))
    with pytest.raises(ExceptionGroup, match="the clock has moved") as caught:
        jump(clock, 5)
    assert heard == [clock.now_ms()] == [5]
    assert list(caught.value.exceptions) == errors
    for end in ends:
        end()
    jump(clock, 5)
    assert heard == [5, 10]


def test_a_listener_can_leave():
    """It hears no more; leaving twice does nothing; one that came twice leaves once."""
    clock, heard = ManualClock(), list[str]()

    def listener() -> None:
        heard.append("twice")

    ends = [clock.on_shift(listener), clock.on_shift(listener)]
    clock.on_shift(lambda: heard.append("other"))
    ends[0]()
    ends[0]()
    clock.advance(1)
    assert heard == ["twice", "other"]


def test_a_listener_may_come_leave_and_move_the_clock_while_all_are_told():
    """Those that were there at the move hear of it; a move within it is told within it."""
    clock = OffsetClock(ManualClock())
    heard: list[tuple[str, int]] = []

    def first() -> None:
        heard.append(("first", clock.now_ms()))
        leave()
        clock.on_shift(lambda: heard.append(("new", clock.now_ms())))
        clock.shift(10)

    leave = clock.on_shift(first)
    clock.on_shift(lambda: heard.append(("last", clock.now_ms())))
    assert clock.shift(1) == 1
    assert heard == [("first", 1), ("last", 11), ("new", 11), ("last", 11)]


def test_listeners_of_an_offset_hear_of_its_base():
    """A jump of the clock below is a jump of the clock above, however many lie between."""
    base = ManualClock()
    clock = OffsetClock(OffsetClock(base))
    heard: list[int] = []
    clock.on_shift(lambda: heard.append(clock.now_ms()))
    clock.shift(5)
    base.advance(3)
    assert heard == [5, 8]


def test_clocks_that_jump_say_so():
    """``ShiftingClock`` tells them from those that have to be looked at."""
    assert isinstance(ManualClock(), ShiftingClock)
    assert isinstance(OffsetClock(SystemClock()), ShiftingClock)
    assert not isinstance(SystemClock(), ShiftingClock)


def in_threads(act: Callable[[], object], number: int = 4) -> None:
    """Run ``act`` in threads that change as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=act, daemon=True) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)


class Slow(int):
    """An offset that takes a while to be added up, so that another thread comes in between."""

    def __radd__(self, other: int) -> int:
        time.sleep(0)
        return other + int(self)


def test_moves_of_several_threads_add_up(clock: OffsetClock | ManualClock):
    """None is lost."""

    def move() -> None:
        for _ in range(500):
            jump(clock, Slow(1))

    in_threads(move)
    assert clock.now_ms() == 2_000


class Stepped(float):
    """A wall time just after a step; whoever compares it is held up, once, until somebody else has read the clock."""

    meanwhile: list[Callable[[], object]]

    def __gt__(self, other: float) -> bool:
        if self.meanwhile:
            self.meanwhile.pop()()
        return float(self) > other


def test_two_threads_never_see_it_go_back():
    """One is in the middle of its reading after a step of the wall clock, when it steps again and another one reads."""
    machine, seen, threads = Time(), list[int](), list[threading.Thread]()
    clock = machine.clock()

    def another_reads() -> None:
        machine.steps(3_600)
        threads.append(threading.Thread(target=lambda: seen.append(clock.now_ms()), daemon=True))
        threads[0].start()
        threads[0].join(0.2)  # it has to wait for its turn: only a clock without a lock lets it in

    machine.wall = Stepped(machine.wall + 60)
    machine.wall.meanwhile = [another_reads]
    seen.append(clock.now_ms())
    threads[0].join(20)
    seen.append(clock.now_ms())
    assert seen == [1_700_000_060_000, 1_700_003_660_000, 1_700_003_660_000]


# ── odd arguments, and what may be left out ─────────────────────────────────────────────────────────────────


def test_an_offset_stands_on_the_wall_clock_by_itself():
    """Without a base it is the machine's own."""
    before_ms = SystemClock().now_ms()
    clock = OffsetClock()
    clock.shift(60_000)
    assert clock.now_ms() >= before_ms + 60_000
    assert clock.offset_ms == 60_000


def test_a_manual_clock_can_be_set():
    """To any later time, and to the same; never back."""
    clock, heard = ManualClock(10), []
    clock.on_shift(lambda: heard.append(clock.now_ms()))
    clock.set(15)
    clock.set(15)
    with pytest.raises(ValueError, match="never goes back"):
        clock.set(14)
    assert (clock.now_ms(), heard) == (15, [15, 15])


@pytest.mark.parametrize("odd", [1.0, float("nan"), True, "1", None])
def test_milliseconds_are_integers(odd: int):
    """Anything else moves nothing: with NaN the clock would never show a time again."""
    manual = ManualClock(10)
    clock = OffsetClock(manual)
    for call in (clock.shift, manual.advance, manual.set, ManualClock):
        with pytest.raises(TypeError, match="are an int"):
            call(odd)
    assert (clock.now_ms(), clock.offset_ms) == (10, 0)
