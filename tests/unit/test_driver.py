"""The driver fires what is due, in order and never early, and comes back to it until the state says it was heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.ring import Log, LoopClock, play
from timer_service.clock import Clock, ManualClock, SystemClock
from timer_service.domain.identity import NameKey, TimerRef, derive_timer_ref
from timer_service.domain.model import Phase, Resumed
from timer_service.domain.summary import Summary
from timer_service.errors import Ambiguous, Unavailable
from timer_service.metrics import Metrics
from timer_service.runtime.driver import MAX_UNANSWERED, Armed, Driver
from timer_service.testing import MemoryWakes

T0 = 1_700_000_000_000
TIMEOUT_MS = 60_000
REFS = [derive_timer_ref(NameKey(f"timer-{number}")) for number in range(3_000)]
A, B, C, D = REFS[:4]


def waiting(due_at_ms: int, generation: int = 0) -> Summary:
    return Summary(Phase.WAITING, generation, due_at_ms)


def elapsed(at_ms: int, generation: int = 0) -> Summary:
    return Summary(Phase.ELAPSED, generation, at_ms)


def ended(at_ms: int, generation: int = 0) -> Summary:
    return Summary(Phase.COMPLETED, generation, at_ms)


class Bench:
    """A driver that runs, on a clock that stands until it is told otherwise."""

    def __init__(self, clock: Clock) -> None:
        self.wakes, self.log = MemoryWakes(), Log()
        self.driver = Driver(clock, self.wakes, Metrics(), self.log, resume_timeout_ms=TIMEOUT_MS)
        self.looked_after: list[TimerRef] = []
        self.driver.look_after = lambda armed: self.looked_after.append(armed.key)
        self.task = asyncio.get_running_loop().create_task(self.driver.run())

    @property
    def fired(self) -> list[TimerRef]:
        return [wake.timer_ref for wake in self.wakes.published]

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert self.log.mistakes == []


class ManualBench(Bench):
    def __init__(self) -> None:
        self.clock = ManualClock(T0)
        super().__init__(self.clock)
        self.clock.on_shift(self.driver.wake)

    async def at(self, now_ms: int) -> list[TimerRef]:
        """Set the clock and let everything happen that is to happen; returns what was fired meanwhile."""
        before = len(self.fired)
        self.clock.advance(T0 + now_ms - self.clock.now_ms())
        return self.fired[before:] + await self.now()

    async def now(self) -> list[TimerRef]:
        """The same at the present time, without a word of it to the driver."""
        before = len(self.fired)
        for _ in range(200):
            await asyncio.sleep(0)
        return self.fired[before:]


@pytest.fixture
async def bench() -> AsyncIterator[ManualBench]:
    made = ManualBench()
    yield made
    await made.stop()


# ── when, and in which order ────────────────────────────────────────────────────────────────────────────────


async def test_due_exactly_now_fires_and_a_millisecond_before_does_not(bench: ManualBench):
    """Never early, and at its time at once; the wake names generation, instant and revision."""
    bench.driver.observe(A, 7, waiting(T0 + 1_000, generation=3))
    assert await bench.at(999) == []
    assert await bench.at(1_000) == [A]
    wake = bench.wakes.published[0]
    assert (wake.generation, wake.woken_at_ms, wake.revision) == (3, T0 + 1_000, 7)


async def test_in_due_order_and_ties_in_order_of_arrival(bench: ManualBench):
    """Whatever order they were armed in."""
    for ref, due_ms in ((A, 30), (B, 10), (C, 20), (D, 10)):
        bench.driver.observe(ref, 1, waiting(T0 + due_ms))
    assert await bench.at(100) == [B, D, C, A]


async def test_many_at_one_instant(bench: ManualBench):
    """More than one turn's worth go out in order of arrival, none left behind."""
    for ref in REFS[:1_000]:
        bench.driver.observe(ref, 1, waiting(T0 + 10))
    assert await bench.at(10) == REFS[:1_000]


async def test_what_is_overdue_fires_at_once(bench: ManualBench):
    """Without any further cause than being armed."""
    bench.driver.observe(A, 1, waiting(T0 - 3_600_000))
    assert await bench.at(0) == [A]


async def test_an_arrival_that_is_earlier_does_not_wait_for_a_later_one():
    """On the real clock: armed while the driver sleeps towards the year 2200, it fires on time and not before."""
    clock = SystemClock()
    bench = Bench(clock)
    heard = asyncio.Event()
    bench.wakes.on_wake = lambda _: heard.set()
    bench.driver.observe(A, 1, waiting(7_258_118_400_000))
    await asyncio.sleep(0)
    due = clock.now_ms() + 20
    bench.driver.observe(B, 2, waiting(due))
    await asyncio.wait_for(heard.wait(), 20)
    assert bench.fired == [B]
    assert (bench.wakes.published[0].woken_at_ms or 0) >= due
    await bench.stop()


def test_c37_what_comes_later_and_is_due_earlier_is_on_time() -> None:
    """C37: while it sleeps towards the first: one due soon is not late by that sleep, one past due fires at once."""

    async def story() -> None:
        clock = LoopClock()
        bench = Bench(clock)
        bench.driver.observe(A, 1, waiting(clock.now_ms() + 6 * 3_600_000))
        await asyncio.sleep(10.1)
        due_ms = clock.now_ms() + 250
        bench.driver.observe(B, 2, waiting(due_ms))
        await asyncio.sleep(0.05)
        past_ms = clock.now_ms()
        bench.driver.observe(C, 3, waiting(past_ms - 60_000))
        await asyncio.sleep(5)
        assert bench.fired[:2] == [C, B]
        woken_ms = [wake.woken_at_ms or 0 for wake in bench.wakes.published[:2]]
        assert 0 <= woken_ms[0] - past_ms <= 2
        assert 0 <= woken_ms[1] - due_ms <= 2
        assert A not in bench.fired
        await bench.stop()

    play(story())


def test_a_leap_of_the_clock_that_nobody_tells_of_is_noticed_soon() -> None:
    """A suspended machine, or a wall clock set forward: what became due meanwhile fires within a second or so."""

    class Leaping(LoopClock):
        leapt_ms = 0

        def now_ms(self) -> int:
            return super().now_ms() + self.leapt_ms

    async def story() -> None:
        clock = Leaping()
        bench = Bench(clock)
        bench.driver.observe(A, 1, waiting(clock.now_ms() + 3_600_000))
        await asyncio.sleep(10)
        clock.leapt_ms = 7_200_000
        await asyncio.sleep(1.5)
        assert bench.fired == [A]
        await bench.stop()

    play(story())


async def test_a_long_wait_is_no_problem(bench: ManualBench):
    """A hundred years ahead it sleeps, and fires on the day."""
    century = 3_155_760_000_000
    bench.driver.observe(A, 1, waiting(T0 + century))
    assert await bench.at(century - 1) == []
    assert await bench.at(century) == [A]


# ── again, until it is heard ────────────────────────────────────────────────────────────────────────────────


def fired_at_s(during_s: float, prepare: Callable[[Bench], object]) -> list[float]:
    """When wakes go out while nobody answers, in seconds after the beginning."""

    async def story() -> list[float]:
        clock = LoopClock()
        bench = Bench(clock)
        begun = clock.now_ms()
        prepare(bench)
        await asyncio.sleep(during_s)
        await bench.stop()
        return [((wake.woken_at_ms or 0) - begun) / 1000 for wake in bench.wakes.published]

    return play(story())


def test_it_comes_again_after_2_seconds_and_doubles_to_a_minute():
    """As long as the state does not say that it left its phase."""
    times = fired_at_s(250, lambda bench: bench.driver.observe(A, 1, waiting(0)))
    assert times == pytest.approx([0, 2, 6, 14, 30, 62, 122, 182, 242], abs=0.1)


def test_a_publish_that_fails_comes_again_after_a_second():
    """Whether it was refused or its reply was lost, again and again."""

    def prepare(bench: Bench) -> None:
        bench.wakes.fail_next(Unavailable("away"), times=2)
        bench.wakes.fail_next(Ambiguous("no reply"))
        bench.driver.observe(A, 1, waiting(0))

    assert fired_at_s(3.5, prepare) == pytest.approx([3], abs=0.1)


@pytest.mark.parametrize("summary", [elapsed(T0), ended(T0)], ids=["elapsed", "ended"])
async def test_what_left_its_phase_is_not_woken_again(bench: ManualBench, summary: Summary):
    """The feed shows it; nothing more goes out."""
    bench.driver.observe(A, 1, waiting(T0))
    assert await bench.at(0) == [A]
    bench.driver.observe(A, 2, summary)
    assert await bench.at(50_000) == []


async def test_a_failure_that_comes_too_late_changes_nothing(bench: ManualBench):
    """When the phase was left while the publish was under way, its failure arms nothing."""
    bench.driver.observe(A, 1, waiting(T0))
    bench.wakes.fail_next(Ambiguous("no reply"), stored=True)
    bench.wakes.on_wake = lambda _: bench.driver.observe(A, 2, elapsed(T0))
    assert await bench.at(0) == [A]
    assert await bench.at(30_000) == []
    assert bench.looked_after == []


async def test_a_new_generation_starts_from_2_seconds_again(bench: ManualBench):
    """The doubling belongs to one occurrence."""
    bench.driver.observe(A, 1, waiting(T0))
    for at_ms in (0, 2_000, 6_000):
        assert await bench.at(at_ms) == [A]
    bench.driver.observe(A, 2, waiting(T0 + 7_000, generation=1))
    assert await bench.at(7_000) == [A]
    assert await bench.at(8_999) == []
    assert await bench.at(9_000) == [A]
    assert bench.wakes.published[-1].generation == 1


# ── at most so many without an answer ───────────────────────────────────────────────────────────────────────


async def test_at_most_so_many_wakes_are_unanswered(bench: ManualBench):
    """The rest waits, and each answer makes room for one more, in due order."""
    for number, ref in enumerate(REFS):
        bench.driver.observe(ref, number + 1, waiting(T0))
    assert await bench.at(0) == REFS[:MAX_UNANSWERED]
    for number in range(10):
        bench.driver.observe(REFS[number], 5_000 + number, elapsed(T0))
    assert await bench.now() == REFS[MAX_UNANSWERED : MAX_UNANSWERED + 10]
    bench.driver.disarm(REFS[20], 6_000)
    assert await bench.now() == [REFS[MAX_UNANSWERED + 10]]


async def test_places_of_wakes_that_nobody_answers_are_given_back(bench: ManualBench):
    """After 2 seconds they keep nobody waiting any longer; all get their turn, those that wait first."""
    for number, ref in enumerate(REFS):
        bench.driver.observe(ref, number + 1, waiting(T0))
    await bench.at(0)
    assert await bench.at(1_999) == []
    assert await bench.at(2_000) == REFS[MAX_UNANSWERED : 2 * MAX_UNANSWERED]
    third = await bench.at(4_000)
    assert third[: 3_000 - 2 * MAX_UNANSWERED] == REFS[2 * MAX_UNANSWERED :]
    assert len(third) == MAX_UNANSWERED


async def test_a_failed_publish_gives_its_place_back(bench: ManualBench):
    """Nobody will answer what was not stored."""
    bench.wakes.fail_next(Unavailable("away"), times=MAX_UNANSWERED)
    for number, ref in enumerate(REFS[: MAX_UNANSWERED + 5]):
        bench.driver.observe(ref, number + 1, waiting(T0))
    assert await bench.at(0) == REFS[MAX_UNANSWERED : MAX_UNANSWERED + 5]
    assert len(await bench.at(1_000)) == MAX_UNANSWERED - 5


# ── what the state says ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_newer_revision_moves_an_entry(bench: ManualBench):
    """Earlier or later, and it counts as arrived then."""
    bench.driver.observe(A, 1, waiting(T0 + 50))
    bench.driver.observe(B, 2, waiting(T0 + 20))
    bench.driver.observe(A, 3, waiting(T0 + 20, generation=1))
    bench.driver.observe(B, 4, waiting(T0 + 90, generation=1))
    assert await bench.at(89) == [A]
    assert await bench.at(90) == [B]


@pytest.mark.parametrize("revision", [4, 5])
async def test_an_older_revision_never_moves_an_entry(bench: ManualBench, revision: int):
    """Nor does the same one: what is known is not older than it."""
    armed = bench.driver.observe(A, 5, waiting(T0 + 50, generation=2))
    assert bench.driver.observe(A, revision, waiting(T0 + 10, generation=1)) is armed
    bench.driver.observe(A, revision, ended(T0))
    assert (armed.revision, armed.generation, armed.phase) == (5, 2, Phase.WAITING)
    assert await bench.at(49) == []
    assert await bench.at(50) == [A]


async def test_disarmed_is_disarmed(bench: ManualBench):
    """It fires no more, and its place in the heap is free; doing it again, or to the unknown, does nothing."""
    bench.driver.observe(A, 1, waiting(T0 + 10))
    bench.driver.observe(B, 2, waiting(T0 + 10))
    for _ in range(2):
        bench.driver.disarm(A, 3)
        bench.driver.disarm(C, 3)
    assert bench.driver.get(A) is None
    assert (len(bench.driver), bench.driver.revisions()) == (1, {B: 2})
    assert await bench.at(20) == [B]


async def test_an_older_removal_disarms_nothing(bench: ManualBench):
    """The entry was made anew since."""
    bench.driver.observe(A, 5, waiting(T0 + 10))
    bench.driver.disarm(A, 4)
    assert await bench.at(10) == [A]


async def test_revisions_are_forgotten_for_another_stream(bench: ManualBench):
    """A stream that began anew has small sequences: they count again, and nothing is lost meanwhile."""
    bench.driver.observe(A, 500, waiting(T0 + 50))
    bench.driver.forget_revisions()
    bench.driver.observe(A, 1, waiting(T0 + 10, generation=1))
    assert await bench.at(10) == [A]


async def test_looking_again(bench: ManualBench):
    """An entry comes back when it is told to, as long as it is armed."""
    armed = bench.driver.observe(A, 1, waiting(T0 + 50_000))
    bench.driver.look_again(armed, T0 + 10)
    assert await bench.at(10) == [A]
    bench.driver.disarm(A, 2)
    bench.driver.look_again(armed, T0 + 20)
    assert await bench.at(60_000) == []
    assert len(bench.driver) == 0


# ── what does not wait any more ─────────────────────────────────────────────────────────────────────────────


async def test_an_elapsed_timer_is_looked_after_when_its_answer_is_overdue(bench: ManualBench):
    """The resume time-out after it elapsed, and then again after as long; no wake goes out."""
    bench.driver.observe(A, 1, elapsed(T0 - 10_000))
    await bench.at(49_999)
    assert bench.looked_after == []
    await bench.at(50_000)
    assert bench.looked_after == [A]
    await bench.at(110_000)
    assert bench.looked_after == [A, A]
    assert bench.fired == []


async def test_a_long_overdue_answer_is_looked_after_at_once(bench: ManualBench):
    """As after a long absence."""
    bench.driver.observe(A, 1, elapsed(T0 - 3_600_000))
    await bench.at(0)
    assert bench.looked_after == [A]


async def test_an_ended_timer_is_looked_after_until_it_is_gone(bench: ManualBench):
    """2 seconds after it was seen, for as long as its entry stands."""
    bench.driver.observe(A, 1, ended(T0 - 5))
    await bench.at(1_999)
    assert bench.looked_after == []
    await bench.at(2_000)
    await bench.at(4_000)
    assert bench.looked_after == [A, A]
    bench.driver.disarm(A, 2)
    await bench.at(600_000)
    assert bench.looked_after == [A, A]


async def test_a_note_in_the_state_does_not_move_the_look(bench: ManualBench):
    """A newer revision of the same elapsed occurrence keeps its place and what is known of its resumes."""
    armed = bench.driver.observe(A, 1, elapsed(T0))
    armed.resumed = Resumed(T0, 1)
    armed.resume_seq = 9
    bench.driver.look_again(armed, T0 + 500_000)
    assert bench.driver.observe(A, 2, elapsed(T0)) is armed
    await bench.at(499_999)
    assert bench.looked_after == []
    assert (armed.revision, armed.resumed, armed.resume_seq) == (2, Resumed(T0, 1), 9)


async def test_the_next_occurrence_knows_nothing_of_the_last(bench: ManualBench):
    """Resumes, their place and the tries belong to one occurrence."""
    armed = bench.driver.observe(A, 1, elapsed(T0))
    armed.resumed, armed.resume_seq, armed.tries = Resumed(T0, 1), 9, 4
    bench.driver.observe(A, 2, waiting(T0 + 10, generation=1))
    assert [armed.resumed, armed.resume_seq, armed.tries] == [None, None, 0]


async def test_a_driver_without_the_lease_fires_nothing(bench: ManualBench):
    """It keeps its heap warm; with the lease it fires what became due meanwhile."""
    bench.driver.holds_lease = False
    bench.driver.observe(A, 1, waiting(T0 + 10))
    assert await bench.at(20) == []
    bench.driver.holds_lease = True
    bench.driver.wake()
    assert await bench.at(20) == [A]


async def test_a_driver_whose_lease_has_run_out_fires_nothing(bench: ManualBench):
    """Frozen meanwhile, it asks before it fires, and does not wait to be told; with the lease back it fires at once."""
    lasts = False
    bench.driver.lease_lasts = lambda: lasts
    bench.driver.observe(A, 1, waiting(T0 + 10))
    assert await bench.at(20) == []
    assert not bench.driver.holds_lease
    lasts, bench.driver.holds_lease = True, True
    assert await bench.at(20) == [A]


async def test_armed_entries_can_be_looked_at(bench: ManualBench):
    """By timer, or all; entries say what the state said."""
    armed = bench.driver.observe(A, 4, Summary(Phase.WAITING, 2, T0 + 10, snapshot_seq=8))
    assert isinstance(armed, Armed)
    assert bench.driver.get(A) is armed
    assert bench.driver.armed() == [armed]
    assert (armed.revision, armed.generation, armed.phase, armed.since_ms) == (4, 2, Phase.WAITING, T0 + 10)
    assert (armed.snapshot_seq, len(bench.driver)) == (8, 1)
