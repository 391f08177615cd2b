"""The queue fires keys in order, each once, when the clock says so, and loses none to failures and cancellations."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.ring import T0_MS, LoopClock, play
from timer_service import scheduler
from timer_service.clock import Clock, ManualClock, OffsetClock, SystemClock
from timer_service.errors import AlreadyRunning
from timer_service.scheduler import MAX_SLEEP_S, TimerQueue

DEADLINE_S = 20.0
DAY_MS = 86_400_000


class Bench:
    """A queue of strings that runs, and what it fired."""

    def __init__(self, clock: Clock) -> None:
        self.queue: TimerQueue[str] = TimerQueue(clock)
        self.fired: list[str] = []
        self.react: Callable[[str], Awaitable[None] | None] = lambda key: None
        self.task = asyncio.get_running_loop().create_task(self.queue.run(self.fire))

    def fire(self, key: str) -> Awaitable[None] | None:
        self.fired.append(key)
        return self.react(key)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def restart(self) -> None:
        await self.stop()
        self.task = asyncio.get_running_loop().create_task(self.queue.run(self.fire))


class ManualBench(Bench):
    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock)

    async def at(self, now_ms: int) -> str:
        """Set the clock, let the loop go round, and return what was fired meanwhile."""
        before = len(self.fired)
        self.clock.advance(now_ms - self.clock.now_ms())
        await rounds()
        return "".join(self.fired[before:])


async def rounds(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[ManualBench]:
    made = ManualBench()
    await rounds()
    yield made
    await made.stop()


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_worked_example(bench: ManualBench):
    """To exactly 3 s: e, b, d in this order; to 8 s: a, c; each once, and nothing after that."""
    for key, at_s in [("a", 5), ("b", 3), ("c", 8), ("d", 3), ("e", 1)]:
        bench.queue.schedule(key, at_s * 1_000)
    assert await bench.at(999) == ""
    assert len(bench.queue) == 5
    assert await bench.at(3_000) == "ebd"
    assert await bench.at(8_000) == "ac"
    assert await bench.at(100_000) == ""
    assert len(bench.queue) == 0


async def test_due_exactly_now_fires_now(bench: ManualBench):
    """Neither a millisecond before nor after; what is past when it is scheduled fires at once."""
    bench.queue.schedule("a", 10)
    assert await bench.at(9) == ""
    assert await bench.at(10) == "a"
    bench.queue.schedule("b", 10)
    bench.queue.schedule("c", -5)
    assert await bench.at(10) == "cb"


async def test_an_advance_fires_within_one_turn_of_the_loop(bench: ManualBench):
    """Deterministically: after one ``sleep(0)`` all of them have been fired."""
    for key in "abc":
        bench.queue.schedule(key, 1_000)
    await rounds()
    bench.clock.advance(1_000)
    assert bench.fired == []
    await asyncio.sleep(0)
    assert bench.fired == ["a", "b", "c"]


async def test_a_key_is_armed_once_and_moves(bench: ManualBench):
    """Scheduling an armed key moves it, to later and to earlier; it fires once, at its last time."""
    bench.queue.schedule("a", 10)
    bench.queue.schedule("a", 30)
    bench.queue.schedule("b", 40)
    bench.queue.schedule("b", 20)
    assert len(bench.queue) == 2
    assert await bench.at(10) == ""
    assert await bench.at(20) == "b"
    assert await bench.at(29) == ""
    assert await bench.at(50) == "a"


async def test_scheduled_again_for_the_same_time_it_comes_last(bench: ManualBench):
    """Ties go by when they were scheduled, and a move is a scheduling."""
    for key in "abcda":
        bench.queue.schedule(key, 7)
    assert await bench.at(7) == "bcda"


async def test_a_cancelled_key_never_fires(bench: ManualBench):
    """Cancel tells whether the key was armed, and leaves the others alone."""
    for key in "abc":
        bench.queue.schedule(key, 5)
    assert [bench.queue.cancel(key) for key in "bbx"] == [True, False, False]
    assert len(bench.queue) == 2
    assert await bench.at(5) == "ac"
    assert bench.queue.cancel("a") is False


class Unordered:
    """A key with a payload, without any order."""

    def __init__(self, payload: dict[str, int]) -> None:
        self.payload = payload


async def test_c45_equal_deadlines_never_compare_keys():
    """A thousand keys that have no order, due at once, come in the order in which they were scheduled."""
    clock, fired = ManualClock(), list[Unordered]()
    queue: TimerQueue[Unordered] = TimerQueue(clock)
    keys = [Unordered({"number": number}) for number in range(1_000)]
    for key in keys:
        queue.schedule(key, 5)
    task = asyncio.create_task(queue.run(fired.append))
    clock.advance(5)
    await rounds()
    task.cancel()
    assert fired == keys


@pytest.mark.parametrize("at", [None, True, 1.0, float("nan"), "5"])
def test_a_time_is_an_integer(at: int):
    """Anything else is refused before it can spoil the order: a new key is not armed, an old one not moved."""
    queue: TimerQueue[str] = TimerQueue(ManualClock())
    queue.schedule("old", 5)
    for key in ("old", "new"):
        with pytest.raises(TypeError, match="a time is an int"):
            queue.schedule(key, at)
    assert len(queue) == 1
    assert queue.cancel("new") is False


# ── what happens while it fires ─────────────────────────────────────────────────────────────────────────────


async def test_what_fire_schedules_waits_for_the_next_look(bench: ManualBench):
    """All that is due was taken out before: a key armed by ``fire`` comes after them, even with an earlier time."""
    bench.react = lambda key: bench.queue.schedule("x", 0) if key == "a" else None
    for key in "abc":
        bench.queue.schedule(key, 5)
    assert await bench.at(5) == "abcx"


async def test_a_key_that_arms_itself_leaves_the_loop_its_turns(bench: ManualBench):
    """At a time that is past, so that it is due for ever: other tasks run, and cancelling ends it."""
    bench.react = lambda key: bench.queue.schedule(key, 0)
    bench.queue.schedule("a", 0)
    assert set(await bench.at(0)) == {"a"}
    assert 5 <= len(bench.fired) <= 25


async def test_a_key_that_was_taken_out_is_not_armed(bench: ManualBench):
    """Cancelling it comes too late, and arming it makes it fire once more."""
    answers: list[bool] = []

    def react(key: str) -> None:
        if bench.fired == ["a"]:
            answers.append(bench.queue.cancel("b"))
            bench.queue.schedule("c", 20)
            answers.append(len(bench.queue) == 1)

    bench.react = react
    for key in "abc":
        bench.queue.schedule(key, 5)
    assert await bench.at(5) == "abc"
    assert answers == [False, True]
    assert await bench.at(20) == "c"


async def test_an_async_fire_is_awaited_before_the_next(bench: ManualBench):
    """One at a time, in order; what becomes due meanwhile comes after."""
    gates = {key: asyncio.Event() for key in "ab"}

    async def react(key: str) -> None:
        if key in gates:
            await gates[key].wait()

    bench.react = react
    bench.queue.schedule("a", 1)
    bench.queue.schedule("b", 1)
    assert await bench.at(1) == "a"
    bench.queue.schedule("c", 0)
    gates["a"].set()
    assert await bench.at(2) == "b"
    gates["b"].set()
    assert await bench.at(2) == "c"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_fire_that_fails_ends_the_run_and_loses_nothing_else(bench: ManualBench, is_async: bool):
    """The error comes out, its key is gone, the rest is armed as before and in its order for the next run."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("b")

    def react(key: str) -> Awaitable[None] | None:
        if key == "b":
            if is_async:
                return fail()
            raise LookupError(key)
        return None

    bench.react = react
    for key in "abcd":
        bench.queue.schedule(key, 5)
    bench.queue.schedule("later", 6)
    assert await bench.at(5) == "ab"
    with pytest.raises(LookupError, match="b"):
        await bench.task
    assert len(bench.queue) == 3
    assert bench.queue.cancel("b") is False
    bench.queue.schedule("e", 5)
    await bench.restart()
    assert await bench.at(6) == "cdelater"


async def test_what_was_armed_anew_is_not_put_back(bench: ManualBench):
    """The later word counts, whether the key was waiting for its turn or was itself interrupted."""

    async def react(key: str) -> None:
        if len(bench.fired) == 1:
            bench.queue.schedule("a", 50)
            bench.queue.schedule("b", 60)
            await asyncio.Event().wait()

    bench.react = react
    for key in "abc":
        bench.queue.schedule(key, 5)
    assert await bench.at(5) == "a"
    await bench.restart()
    assert len(bench.queue) == 3
    assert await bench.at(49) == "c"
    assert await bench.at(50) == "a"
    assert await bench.at(60) == "b"


async def test_cancelled_while_fire_awaits_nothing_is_lost(bench: ManualBench):
    """What was armed stays so; the interrupted key and those that were taken out are armed again, in order."""
    stuck = asyncio.Event()

    async def react(key: str) -> None:
        if key == "b":
            await stuck.wait()

    bench.react = react
    for key in "abc":
        bench.queue.schedule(key, 5)
    bench.queue.schedule("later", 6)
    assert await bench.at(5) == "ab"
    await bench.stop()
    assert bench.task.cancelled()
    assert len(bench.queue) == 3
    stuck.set()
    await bench.restart()
    assert await bench.at(6) == "bclater"


async def test_cancelled_while_it_waits_everything_stays_armed(bench: ManualBench):
    """And an advance while nobody runs it is seen by the next run."""
    bench.queue.schedule("a", 5)
    await rounds()
    await bench.stop()
    assert await bench.at(5) == ""
    await bench.restart()
    assert await bench.at(5) == "a"


async def test_one_run_at_a_time(bench: ManualBench):
    """The second is refused and disturbs nothing; after the first has ended there may be another."""
    with pytest.raises(AlreadyRunning):
        await bench.queue.run(bench.fire)
    bench.queue.schedule("a", 5)
    assert await bench.at(5) == "a"
    await bench.restart()
    bench.queue.schedule("b", 5)
    assert await bench.at(5) == "b"


def test_one_loop_after_the_other():
    """A queue that ran on one event loop runs on the next."""
    clock, fired = ManualClock(), list[str]()
    queue: TimerQueue[str] = TimerQueue(clock)

    async def story(key: str) -> None:
        task = asyncio.create_task(queue.run(fired.append))
        await rounds()
        queue.schedule(key, 0)
        await rounds()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for key in "ab":
        asyncio.run(story(key))
    assert fired == ["a", "b"]


def in_a_thread(call: Callable[[int], object], argument: int) -> None:
    thread = threading.Thread(target=call, args=(argument,))
    thread.start()
    thread.join()


def test_a_loop_that_was_closed_over_its_run_holds_nobody_up():
    """The clock may be moved all the same, and the queue runs on another loop."""
    clock, fired = ManualClock(), list[str]()
    queue: TimerQueue[str] = TimerQueue(clock)
    queue.schedule("a", 5)
    abandoned = asyncio.new_event_loop()
    left = abandoned.create_task(queue.run(fired.append))
    abandoned.run_until_complete(rounds())
    abandoned.close()
    in_a_thread(clock.advance, 5)

    async def story() -> None:
        task = asyncio.create_task(queue.run(fired.append))
        await rounds()
        left.get_coro().close()  # as the garbage collector would, sooner or later
        queue.schedule("b", 10)
        in_a_thread(clock.advance, 5)
        await rounds()
        with pytest.raises(AlreadyRunning):
            await queue.run(fired.append)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert fired == ["a", "b"]
    left._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_a_run_that_ended_is_forgotten_by_the_clock():
    """A clock that outlives many runs keeps none of them."""
    clock = ManualClock()
    for _ in range(3):
        task = asyncio.create_task(TimerQueue[str](clock).run(print))
        await rounds()
        assert len(clock._listeners._calls) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(clock._listeners._calls) == 0


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────


def in_loop_time(story: Callable[[Bench, Callable[[], int]], Awaitable[None]]) -> None:
    """Play ``story`` with a queue on the loop's own clock, which jumps over every wait."""

    async def played() -> None:
        clock = LoopClock()
        bench = Bench(clock)
        await rounds()
        await story(bench, lambda: clock.now_ms() - T0_MS)
        await bench.stop()

    play(played())


def test_it_fires_at_the_due_time_and_not_before():
    """On a clock that runs: each at its own millisecond."""

    async def story(bench: Bench, now_ms: Callable[[], int]) -> None:
        at: dict[str, int] = {}
        bench.react = lambda key: at.update({key: now_ms()})
        for key, due_ms in {"a": 1, "b": 70, "c": 4_999, "d": 5_001, "e": 60_000}.items():
            bench.queue.schedule(key, T0_MS + due_ms)
        await asyncio.sleep(61)
        assert at == {"a": 1, "b": 70, "c": 4_999, "d": 5_001, "e": 60_000}

    in_loop_time(story)


def test_an_earlier_key_is_not_late_for_a_later_one():
    """New, or moved forward, while the queue sleeps for another: it wakes in time."""

    async def story(bench: Bench, now_ms: Callable[[], int]) -> None:
        at: dict[str, int] = {}
        bench.react = lambda key: at.update({key: now_ms()})
        bench.queue.schedule("far", T0_MS + 4_000)
        bench.queue.schedule("moved", T0_MS + 4_500)
        await asyncio.sleep(1)
        bench.queue.schedule("near", T0_MS + 1_002)
        await asyncio.sleep(1)
        bench.queue.schedule("moved", T0_MS + 2_003)
        await asyncio.sleep(3)
        assert at == {"near": 1_002, "moved": 2_003, "far": 4_000}

    in_loop_time(story)


def test_c26_far_times_neither_fire_nor_keep_it_busy():
    """+3 s, +25 days, +400 days: only the first fires; a jump by 25 days fires the second alone, at once."""

    async def story() -> None:
        clock = OffsetClock(LoopClock())
        bench = Bench(clock)
        looks = count_looks(clock)
        for key, due_ms in {"a": 3_000, "b": 25 * DAY_MS, "c": 400 * DAY_MS}.items():
            bench.queue.schedule(key, T0_MS + due_ms)
        await asyncio.sleep(600)
        assert bench.fired == ["a"]
        assert len(looks) <= 2 * 600 / MAX_SLEEP_S + 10
        clock.shift(25 * DAY_MS - 601_000)
        await asyncio.sleep(0.5)
        assert bench.fired == ["a"]
        clock.shift(1_000)
        await asyncio.sleep(0)
        assert bench.fired == ["a", "b"]
        await asyncio.sleep(600)
        assert bench.fired == ["a", "b"]
        await bench.stop()

    play(story())


def count_looks(clock: OffsetClock) -> list[int]:
    looks: list[int] = []
    now_ms = clock.now_ms

    def counted() -> int:
        looks.append(now_ms())
        return looks[-1]

    clock.now_ms = counted  # type: ignore[method-assign]
    return looks


def test_waiting_longer_than_24_days(monkeypatch: pytest.MonkeyPatch):
    """Waited through, in the loop's time, with longer sleeps than usual; and any integer may be a time."""
    monkeypatch.setattr(scheduler, "MAX_SLEEP_S", 3_600.0)

    async def story(bench: Bench, now_ms: Callable[[], int]) -> None:
        bench.queue.schedule("month", T0_MS + 30 * DAY_MS)
        bench.queue.schedule("never", 10**400)
        await asyncio.sleep(30 * DAY_MS / 1_000 - 0.001)
        assert bench.fired == []
        await asyncio.sleep(0.001)
        await rounds()
        assert bench.fired == ["month"]

    in_loop_time(story)


class Machine:
    """Wall and monotonic clock of a machine that can be set and suspended; its monotonic clock is the loop's."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ahead_s = T0_MS / 1_000
        self.clock = SystemClock(lambda: self.loop.time() + self.ahead_s, self.loop.time)


def test_c34_a_wall_clock_that_steps_back_delays_nothing():
    """An hour back after arming +10 s: it fires after 10 s, once, not before."""

    async def story() -> None:
        machine = Machine()
        bench = Bench(machine.clock)
        bench.queue.schedule("a", machine.clock.now_ms() + 10_000)
        await asyncio.sleep(1)
        machine.ahead_s -= 3_600
        await asyncio.sleep(8.99)
        assert bench.fired == []
        await asyncio.sleep(0.02)
        assert bench.fired == ["a"]
        await asyncio.sleep(7_200)
        assert bench.fired == ["a"]
        await bench.stop()

    play(story())


def test_c34_a_suspended_machine_fires_soon_after():
    """The loop's clock stood for two hours while the wall clock went on: due within ``MAX_SLEEP_S``, once."""

    async def story() -> None:
        machine = Machine()
        bench = Bench(machine.clock)
        bench.queue.schedule("a", machine.clock.now_ms() + 3_600_000)
        await asyncio.sleep(0.1)
        machine.ahead_s += 7_200
        await asyncio.sleep(MAX_SLEEP_S)
        assert bench.fired == ["a"]
        await bench.stop()

    play(story())


def test_a_shift_wakes_it_at_once_through_every_layer():
    """The offset of the clock, and an advance of the clock under it."""

    async def story() -> None:
        base = ManualClock()
        clock = OffsetClock(base)
        bench = Bench(clock)
        bench.queue.schedule("a", 1_000)
        bench.queue.schedule("b", 2_000)
        await rounds()
        clock.shift(1_000)
        await asyncio.sleep(0)
        assert bench.fired == ["a"]
        await rounds()
        base.advance(1_000)
        await asyncio.sleep(0)
        assert bench.fired == ["a", "b"]
        await bench.stop()

    play(story())


class HandClock:
    """A clock of somebody else's, moved by hand, that tells nobody."""

    def __init__(self) -> None:
        self.at_ms = self.looks = 0

    def now_ms(self) -> int:
        self.looks += 1
        return self.at_ms


def test_a_clock_that_stands_is_left_alone_more_and_more():
    """With a key one millisecond ahead for ten minutes: no spinning; ``wake`` makes it look at once."""

    async def story() -> None:
        clock = HandClock()
        bench = Bench(clock)
        bench.queue.schedule("a", 1)
        await asyncio.sleep(600)
        assert 2 * 600 / MAX_SLEEP_S <= clock.looks <= 2 * 600 / MAX_SLEEP_S + 40
        clock.at_ms = 1
        bench.queue.wake()
        await asyncio.sleep(0)
        assert bench.fired == ["a"]
        bench.queue.schedule("b", 9_000)
        clock.at_ms = 9_000
        await asyncio.sleep(MAX_SLEEP_S)
        assert bench.fired == ["a", "b"]
        await bench.stop()

    play(story())


def test_a_clock_that_stood_and_runs_again_makes_nothing_late():
    """Once it has been seen to move, sleeps are as long as they should be."""

    async def story() -> None:
        clock = HandClock()
        bench = Bench(clock)
        bench.queue.schedule("a", 1)
        await asyncio.sleep(600)
        loop = asyncio.get_running_loop()
        began = loop.time()
        clock.now_ms = lambda: round((loop.time() - began) * 1_000)  # type: ignore[method-assign]
        at: dict[str, int] = {}
        bench.react = lambda key: at.update({key: clock.now_ms()})
        bench.queue.schedule("b", 50)
        bench.queue.wake()
        await asyncio.sleep(6)
        bench.queue.schedule("c", 6_070)
        await asyncio.sleep(6)
        assert at == {"a": 1, "b": 50, "c": 6_070}
        await bench.stop()

    play(story())


def test_looks_in_the_same_millisecond_make_nothing_late():
    """However often it is woken: a clock that did not move since the last look need not be one that stands."""

    async def story(bench: Bench, now_ms: Callable[[], int]) -> None:
        at: dict[str, int] = {}
        bench.react = lambda key: at.update({key: now_ms()})
        bench.queue.schedule("a", T0_MS + 10)
        for _ in range(12):
            bench.queue.wake()
            await rounds(3)
        await asyncio.sleep(1)
        assert at == {"a": 10}

    in_loop_time(story)


async def test_an_advance_in_another_thread_wakes_it(monkeypatch: pytest.MonkeyPatch):
    """A thousand times, without a sleep that would end by itself."""
    monkeypatch.setattr(scheduler, "MAX_SLEEP_S", 3_600.0)
    asyncio.get_running_loop().set_debug(True)  # then it refuses what another thread may not do to it
    clock, fired = ManualClock(), asyncio.Queue[int]()
    queue: TimerQueue[int] = TimerQueue(clock)
    task = asyncio.create_task(queue.run(fired.put_nowait))
    times = 1_000
    for number in range(1, times + 1):
        queue.schedule(number, number)
    asked = threading.Semaphore(0)

    def advance() -> None:
        for _ in range(times):
            asked.acquire(timeout=DEADLINE_S)
            clock.advance(1)

    thread = threading.Thread(target=advance, daemon=True)
    thread.start()
    for number in range(1, times + 1):
        asked.release()
        assert await asyncio.wait_for(fired.get(), DEADLINE_S) == number
    thread.join(DEADLINE_S)
    task.cancel()


def test_wake_does_nothing_while_nobody_runs_it():
    """From this thread or another."""
    queue: TimerQueue[str] = TimerQueue(HandClock())
    queue.wake()
    thread = threading.Thread(target=queue.wake)
    thread.start()
    thread.join(DEADLINE_S)
    assert len(queue) == 0


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_c45_a_million_times_armed_and_cancelled_leaves_nothing():
    """Under new keys each time: nothing is kept of them, so memory is flat."""
    queue: TimerQueue[int] = TimerQueue(ManualClock())

    def cycles(first: int, number: int) -> None:
        for key in range(first, first + number):
            queue.schedule(key, key)
            if key >= 100:
                assert queue.cancel(key - 100)

    cycles(0, 980_000)
    tracemalloc.start()
    try:
        cycles(980_000, 5_000)
        before, _ = tracemalloc.get_traced_memory()
        cycles(985_000, 15_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(queue) == len(queue._armed) == len(queue._heap._array) == 100
    assert after - before < 20_000
