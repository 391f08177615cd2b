"""The native driver in virtual time: the broker's schedules wake, and nothing rests on them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.support.commands import NAME, REF
from tests.support.ring import Process, Ring, fail_nth, play
from timer_service.domain.model import Phase
from timer_service.errors import Ambiguous, BrokerError, StorageFull, Unavailable
from timer_service.ports import Fill, Schedule
from timer_service.runtime.native import COMPARE_AGAIN_MS, GRACE_MS, NEAR_MS

LONG_MS = 300_000
CENTURY_MS = 100 * 365 * 24 * 3_600_000


def ring_of(replicas: int = 1, **settings: Any) -> Ring:
    return Ring(replicas, native=True, **settings)


async def start(ring: Ring, delay_ms: int) -> int:
    """Start (or replace) the one timer; returns its due time."""
    outcome = await ring.ask("start", timer=NAME, due={"delay_ms": delay_ms}, if_exists="replace", max_retries=9)
    assert outcome.status == "accepted"
    assert outcome.due_at_ms is not None
    return outcome.due_at_ms


def schedule(ring: Ring) -> Schedule | None:
    """What stands at the broker for the one timer."""
    return ring.schedules.standing_now.get(REF, (None, b""))[0]


async def resumed(ring: Ring, generation: int = 0) -> tuple[int, int | None]:
    """Wait for the resume; returns how late it elapsed, and how much later than due it was woken."""
    await ring.resume(REF, generation)
    timer = ring.state.peek(REF).timer
    assert timer is not None
    current = timer.current
    assert current.lateness_ms is not None
    assert ring.resumes.read() is None, "one occurrence, one resume"
    return current.lateness_ms, None if current.woken_at_ms is None else current.woken_at_ms - timer.due_at_ms


def repairs(ring: Ring, kind: str) -> int:
    return sum(replica.metrics._repairs[kind] for replica in ring.replicas)


# -- the usual way ----------------------------------------------------------------------------------------------


def test_the_broker_wakes_and_nobody_else() -> None:
    """The schedule is for the due time, carries its occurrence, and its firing is the one wake there is."""

    async def story() -> None:
        async with ring_of() as ring:
            due_ms = await start(ring, LONG_MS)
            standing = schedule(ring)
            assert standing is not None
            assert (standing.generation, standing.at_ms) == (0, due_ms)
            late_ms, woken_ms = await resumed(ring)
            assert late_ms == woken_ms == 0, "when the broker published it is when it was woken"
            await asyncio.sleep(2 * GRACE_MS / 1000)
            assert ring.fired == [(REF, 0)]
            assert ring.wakes.published == [], "the heap had nothing to do"
            ring.sound()

    play(story())


@pytest.mark.parametrize("delay_ms", [1, 249, NEAR_MS])
def test_what_is_due_soon_is_woken_from_here(delay_ms: int) -> None:
    """A schedule takes 250 ms at least: what is due within a second has none, and is not late."""

    async def story() -> None:
        async with ring_of() as ring:
            await start(ring, delay_ms)
            assert await resumed(ring) == (0, 0)
            await asyncio.sleep(2 * GRACE_MS / 1000)
            assert len(ring.wakes.published) == 1
            assert ring.schedules.calls == 3, "read twice at the start, looked at since; nothing was put"
            ring.sound()

    play(story())


def test_a_standby_is_as_good() -> None:
    """Without the lease a replica still sees to what it wrote: near by itself, far by the broker."""

    async def story() -> None:
        async with ring_of(2) as ring:
            owner, standby = ring.replicas
            standby.driver.holds_lease = False
            ring.replicas = [standby]
            await start(ring, 500)
            assert await resumed(ring) == (0, 0)
            await start(ring, LONG_MS)
            assert await resumed(ring, 1) == (0, 0)
            assert ring.fired == [(REF, 1)]
            ring.replicas = [owner, standby]
            ring.sound()

    play(story())


@pytest.mark.parametrize(("delay_ms", "port"), [(500, "wakes"), (60_000, "schedules")])
def test_the_lease_holder_wakes_what_a_dead_replica_left(delay_ms: int, port: str) -> None:
    """It wrote the state and died before it woke what was near, or before it put the schedule."""

    async def story() -> None:
        async with ring_of(2) as ring:
            owner, dying = ring.replicas
            dying.driver.holds_lease = False
            await asyncio.sleep(3)
            ring.replicas = [dying]
            getattr(ring, port).fail_next(Unavailable("dying"))
            due_ms = await start(ring, delay_ms)
            await dying.stop()
            ring.replicas = [owner]
            await ring.resume(REF, 0)
            assert GRACE_MS <= ring.clock.now_ms() - due_ms < 2 * GRACE_MS
            assert ring.fired == []
            ring.sound()

    play(story())


def test_replaced_within_the_last_second_it_is_woken_once() -> None:
    """The alarm of the occurrence before finds another one, and leaves it alone."""

    async def story() -> None:
        async with ring_of() as ring:
            await start(ring, 400)
            await start(ring, 900)
            assert await resumed(ring, 1) == (0, 0)
            await asyncio.sleep(2 * GRACE_MS / 1000)
            assert [wake.generation for wake in ring.wakes.published] == [1]
            ring.sound()

    play(story())


def test_a_retry_gets_a_schedule_of_its_own() -> None:
    """The next occurrence has the next generation, and its own due time; due in the past it fires at once."""

    async def story() -> None:
        async with ring_of() as ring:
            await start(ring, LONG_MS)
            first = await ring.resume(REF, 0)
            fields = {"timer_ref": REF, "generation": 0, "fence": first.fence}
            again = await ring.ask("retry", due={"delay_ms": LONG_MS}, **fields)
            standing = schedule(ring)
            assert standing is not None
            assert (standing.generation, standing.at_ms) == (1, again.due_at_ms)
            second = await ring.resume(REF, 1)
            fields = {"timer_ref": REF, "generation": 1, "fence": second.fence}
            await ring.ask("retry", due={"at_ms": ring.clock.now_ms() - LONG_MS}, **fields)
            assert schedule(ring) is None
            await ring.resume(REF, 2)
            assert ring.fired == [(REF, 0), (REF, 1)]
            ring.sound()

    play(story())


def test_replaced_twice_only_the_last_fires() -> None:
    """C39: one schedule a timer, the newest."""

    async def story() -> None:
        async with ring_of() as ring:
            await start(ring, 10_000)
            await start(ring, 20_000)
            due_ms = await start(ring, 30_000)
            assert [one.at_ms for one, _ in ring.schedules.standing_now.values()] == [due_ms]
            await resumed(ring, 2)
            assert ring.fired == [(REF, 2)]
            assert ring.clock.now_ms() >= due_ms
            ring.sound()

    play(story())


# -- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_cancelled_century_leaves_no_schedule(replicas: int) -> None:
    """Whichever replica takes the cancel, also one that put none."""

    async def story() -> None:
        async with ring_of(replicas) as ring:
            for _ in range(3):
                await start(ring, CENTURY_MS)
                assert schedule(ring) is not None
                await ring.ask("cancel", timer_ref=REF)
                await ring.settle()
                await ring.until(lambda: schedule(ring) is None, "the end of the schedule", within_s=1)
            ring.sound()

    play(story())


def test_a_cancel_right_after_the_start_leaves_no_schedule() -> None:
    """The schedule is still on its way when the timer ends: who put it takes it away again."""

    async def story() -> None:
        async with ring_of() as ring:
            ring.send("start", timer=NAME, due={"delay_ms": CENTURY_MS})
            ring.send("cancel", timer_ref=REF)
            await ring.settle()
            await ring.until(lambda: schedule(ring) is None, "the end of the schedule", within_s=1)
            assert ring.schedules._seq == 1, "one was put"
            ring.sound()

    play(story())


def test_a_schedule_that_arrives_after_the_end_is_taken_away() -> None:
    """The broker takes its time: nothing stood yet when the cancel looked."""

    async def story() -> None:
        async with ring_of() as ring:
            slow_puts(ring, 1.0)
            await start(ring, CENTURY_MS)
            await ring.ask("cancel", timer_ref=REF)
            await ring.settle()
            assert ring.schedules._seq == 0
            await asyncio.sleep(2)
            assert (ring.schedules._seq, schedule(ring)) == (1, None)
            ring.sound()

    play(story())


def slow_puts(ring: Ring, delay_s: float) -> None:
    usual = ring.schedules.put

    async def put(*what: Any) -> int:
        await asyncio.sleep(delay_s)
        return await usual(*what)

    ring.schedules.put = put  # type: ignore[method-assign, assignment]


def test_replaced_by_something_near_the_far_schedule_goes() -> None:
    """What is due within a second has no schedule: the one before would stay for ever."""

    async def story() -> None:
        async with ring_of(2) as ring:
            for _ in range(4):
                await start(ring, CENTURY_MS)
                due_ms = await start(ring, 500)
                await ring.until(lambda: schedule(ring) is None, "the end of the schedule", within_s=0.4)
                assert ring.clock.now_ms() < due_ms
                await ring.ask("cancel", timer_ref=REF)
            ring.sound()

    play(story())


# -- schedules are disposable -----------------------------------------------------------------------------------


def test_a_schedule_deleted_by_hand_fires_once() -> None:
    """C39: the heap looks a second after it was due."""

    async def story() -> None:
        async with ring_of() as ring:
            await start(ring, 60_000)
            ring.schedules.lose(anew=False)
            late_ms, woken_ms = await resumed(ring)
            assert late_ms == woken_ms == GRACE_MS
            await asyncio.sleep(60)
            assert (ring.fired, len(ring.wakes.published)) == ([], 1)
            ring.sound()

    play(story())


def test_schedules_of_a_stream_made_anew_are_put_again() -> None:
    """Within seconds, and counted; what is due soon is left to the heap."""

    async def story() -> None:
        async with ring_of() as ring:
            due_ms = await start(ring, LONG_MS)
            await asyncio.sleep(5)
            ring.schedules.lose(anew=True)
            await ring.until(lambda: schedule(ring) is not None, "the schedule", within_s=5)
            standing = schedule(ring)
            assert standing is not None
            assert (standing.generation, standing.at_ms) == (0, due_ms)
            assert repairs(ring, "schedule_missing") == 1
            assert await resumed(ring) == (0, 0)
            ring.sound()

    play(story())


def test_a_stream_that_went_back_is_compared() -> None:
    """A broker restored to an older copy gives out sequences again."""

    async def story() -> None:
        async with ring_of() as ring:
            for _ in range(5):
                await start(ring, LONG_MS)
            await asyncio.sleep(5)
            ring.schedules.lose(anew=False)
            ring.schedules._seq = 1
            await ring.until(lambda: schedule(ring) is not None, "the schedule", within_s=5)
            calls = ring.schedules.calls
            await asyncio.sleep(60)
            assert repairs(ring, "schedule_missing") == 1
            assert ring.schedules.calls - calls <= 31, "looked at, and not read anew at each look"
            ring.sound()

    play(story())


def test_the_start_puts_what_is_missing_and_drops_what_has_no_timer() -> None:
    """As after a crash between state and schedule, a cancel whose drop got lost, or years with the other driver."""

    async def story() -> None:
        async with Ring() as ring:
            due_ms = await start(ring, LONG_MS)  # by the heap: without a schedule
        strays = {"b" * 26: 0, "c" * 26: 7}
        for other, generation in strays.items():
            await ring.schedules.put(other, generation, due_ms + CENTURY_MS, 1)  # type: ignore[arg-type]
        ring.schedules.standing_now["not a timer"] = (Schedule(99, -1, 0), b"")
        native = ring_of()
        native.state, native.schedules = ring.state, ring.schedules
        native.replicas = [Process(native, native=True)]
        async with native:
            await native.until(lambda: set(native.schedules.standing_now) == {REF}, "one schedule", within_s=5)
            assert schedule(native) == Schedule(3, 0, due_ms)
            assert repairs(native, "schedule_missing") == 1
            assert repairs(native, "schedule_without_timer") == 3
            native.sound()

    play(story())


def test_what_another_replica_has_just_started_is_no_stray() -> None:
    """The state decides, not what this process has heard of so far."""

    async def story() -> None:
        async with ring_of(2) as ring:
            busy, deaf = ring.replicas
            await ring.until(lambda: deaf.feed.quiet, "a quiet feed")
            ring.replicas = [busy]
            await start(ring, CENTURY_MS)
            assert deaf.driver.get(REF) is None
            assert deaf.native is not None
            assert await deaf.native._compare()
            assert await deaf.native._set_right(REF)
            assert schedule(ring) is not None
            ring.replicas = [busy, deaf]
            assert repairs(ring, "schedule_without_timer") == 0
            ring.sound()

    play(story())


def test_what_is_put_while_all_are_read_is_not_missing() -> None:
    """Nothing to mend, and nothing counted."""

    async def story() -> None:
        async with ring_of() as ring:
            slow_puts(ring, 1.0)
            await start(ring, LONG_MS)
            usual = ring.schedules.standing

            async def standing() -> dict[str, Schedule]:
                before = await usual()
                await asyncio.sleep(2)
                return before

            ring.schedules.standing = standing  # type: ignore[method-assign]
            (replica,) = ring.replicas
            assert replica.native is not None
            assert await replica.native._compare()
            assert ring.schedules._seq == 1
            assert repairs(ring, "schedule_missing") == 0
            ring.sound()

    play(story())


def test_a_schedule_for_another_time_is_put_right() -> None:
    """Forged, or of an older generation: it would have been early, or stale."""

    async def story() -> None:
        async with ring_of() as ring:
            due_ms = await start(ring, LONG_MS)
            for generation, at_ms in ((0, due_ms + CENTURY_MS), (5, due_ms)):
                await ring.schedules.put(REF, generation, at_ms, 1)
                (replica,) = ring.replicas
                assert replica.native is not None
                assert await replica.native._compare()
                standing = schedule(ring)
                assert standing is not None
                assert (standing.generation, standing.at_ms) == (0, due_ms)
            assert await resumed(ring) == (0, 0)
            ring.sound()

    play(story())


# -- never early ------------------------------------------------------------------------------------------------


def test_a_broker_whose_clock_is_ahead_wakes_nobody_early() -> None:
    """Its wake is refused, and comes again from here at the due time: not late by the grace."""

    async def story() -> None:
        async with ring_of() as ring:
            due_ms = await start(ring, LONG_MS)
            standing = schedule(ring)
            assert standing is not None
            loop = asyncio.get_running_loop()

            def ahead() -> None:
                wake = ring.schedules.fire(REF, standing.seq)
                assert wake is not None
                ring.wake(wake)

            loop.call_later((due_ms - 200 - ring.clock.now_ms()) / 1000, ahead)
            assert await resumed(ring) == (0, 0)
            (replica,) = ring.replicas
            assert replica.metrics._wakes["early"] == 1
            ring.sound()

    play(story())


# -- the broker can't -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Unavailable("away"), Ambiguous("no reply"), StorageFull("no room")])
def test_what_could_not_be_put_is_put_later(error: BrokerError) -> None:
    """Nothing is lost and nothing doubled, for however long it lasts."""

    async def story() -> None:
        async with ring_of() as ring:
            await asyncio.sleep(3)
            ring.schedules.fail_next(error, times=5)
            await start(ring, LONG_MS)
            await ring.until(lambda: schedule(ring) is not None, "the schedule", within_s=30)
            assert await resumed(ring) == (0, 0)
            ring.sound()

    play(story())


def test_while_the_broker_can_not_one_at_a_time_is_tried() -> None:
    """What is owed waits behind the first; all of it is put in the end."""

    async def story() -> None:
        async with ring_of() as ring:
            await asyncio.sleep(3)
            usual, tries, away = ring.schedules.put, 0, True

            async def put(*what: Any) -> int:
                nonlocal tries
                tries += 1
                if away:
                    raise Unavailable("away")
                return await usual(*what)

            ring.schedules.put = put  # type: ignore[method-assign, assignment]
            for number in range(20):
                await ring.ask("start", timer={"name": f"n-{number}"}, due={"delay_ms": CENTURY_MS})
            tries = 0
            await asyncio.sleep(60)
            assert 25 <= tries <= 35, "one every two seconds"
            away = False
            await ring.until(lambda: len(ring.schedules.standing_now) == 20, "all schedules", within_s=5)
            ring.sound()

    play(story())


def test_what_can_not_be_put_at_all_is_woken_by_the_heap() -> None:
    """A stream that takes no schedules: late by the grace, once."""

    async def story() -> None:
        async with ring_of() as ring:
            await asyncio.sleep(3)
            ring.schedules.fail_next(StorageFull("no room"), times=10_000)
            await start(ring, 60_000)
            assert (await resumed(ring))[0] == GRACE_MS
            ring.sound()

    play(story())


def test_a_stream_that_is_nearly_full_gets_no_more_schedules() -> None:
    """It would drop its oldest ones. When there is room again all that wait are given theirs."""

    async def story() -> None:
        async with ring_of() as ring:
            ring.schedules.fill = Fill(91, 100)
            await asyncio.sleep(5)
            await start(ring, LONG_MS)
            ring.schedules.fill = Fill(85, 100)
            await asyncio.sleep(10)
            assert schedule(ring) is None
            ring.schedules.fill = Fill(79, 100)
            await ring.until(lambda: schedule(ring) is not None, "the schedule", within_s=5)
            ring.sound()

    play(story())


def test_schedules_that_can_not_be_read_are_not_read_in_a_loop() -> None:
    """All of them is a lot to read: every few seconds, until it works."""

    async def story() -> None:
        async with ring_of() as ring:
            readings, usual = [], ring.schedules.standing

            async def standing() -> dict[str, Schedule]:
                readings.append(ring.clock.now_ms())
                if len(readings) < 5:
                    raise Unavailable("away")
                return await usual()

            ring.schedules.standing = standing  # type: ignore[method-assign]
            await asyncio.sleep(300)
            assert len(readings) == 5
            assert min(later - earlier for earlier, later in pairwise(readings)) >= COMPARE_AGAIN_MS
            ring.sound()

    play(story())


ERRORS: list[tuple[BrokerError, bool]] = [
    (Unavailable("away"), False),
    (Ambiguous("no reply"), True),
    (Ambiguous("no reply"), False),
]


@pytest.mark.parametrize(("error", "stored"), ERRORS, ids=["refused", "reply lost", "request lost"])
@pytest.mark.parametrize("port", ["schedules", "state", "wakes"])
@pytest.mark.parametrize("number", range(12))
def test_a_fault_at_any_call_changes_nothing(port: str, number: int, error: BrokerError, stored: bool) -> None:
    """A life of starts, a replacement, a retry, a cancel: what is due elapses, and no schedule is left."""

    async def story() -> None:
        async with ring_of() as ring:
            fail_nth(getattr(ring, port), number, error, stored=stored, times=3)
            await start(ring, CENTURY_MS)
            await start(ring, 5_000)
            first = await ring.resume(REF, 1)
            again = {"timer_ref": REF, "generation": 1, "fence": first.fence}
            outcome = await ring.ask("retry", due={"delay_ms": 5_000}, **again)
            assert outcome.status == "accepted", outcome
            await ring.resume(REF, 2)
            await start(ring, CENTURY_MS)
            await ring.ask("cancel", timer_ref=REF)
            await ring.settle()
            await ring.until(lambda: not ring.schedules.standing_now, "no schedule", within_s=60)
            (record,) = ring.archive.records(REF)
            assert [one.generation for one in record.timeline if one.elapsed_at_ms] == [1, 2]
            ring.sound()

    play(story())


def test_two_replicas_fire_each_once_when_one_stops() -> None:
    """Schedules are nobody's: what one put wakes the other."""

    async def story() -> None:
        async with ring_of(2) as ring:
            names = [{"name": f"n-{number}"} for number in range(40)]
            for number, key in enumerate(names):
                await ring.ask("start", timer=key, due={"delay_ms": 60_000 + 100 * number})
            await ring.replicas.pop().stop()
            await ring.until(lambda: len(ring.resumes.standing()) == len(names), "all resumes")
            await asyncio.sleep(5)
            assert len(ring.fired) == len({one.resume_id for one in ring.resumes.standing()}) == len(names)
            phases = {ring.state.peek(timer_ref).timer.phase for timer_ref in ring.state.refs()}  # type: ignore[union-attr]
            assert phases == {Phase.ELAPSED}
            ring.sound()

    play(story())
