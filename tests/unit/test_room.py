"""Keeping room: admission counts along, what is held comes back in order, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.commands import body_of, command
from tests.support.ring import Log, Ring, play
from timer_service.domain.identity import TimerRef
from timer_service.domain.machine import Write, decide
from timer_service.errors import StorageFull
from timer_service.jetstream.stores import JetStreamState
from timer_service.metrics import Metrics
from timer_service.ports import Fill
from timer_service.runtime.admission import Admission
from timer_service.runtime.held import HOLD_MS, Held
from timer_service.testing import MemoryDelivery

EMPTY = Fill(0, 1_000_000)
A, B = TimerRef("a" * 26), TimerRef("b" * 26)


@pytest.fixture
def admission() -> Admission:
    opened = Admission(50, Metrics(), Log(), state="state", snapshots="snapshots")
    opened.begin()
    opened.update({"state": EMPTY, "snapshots": EMPTY}, EMPTY)
    return opened


def reading(admission: Admission, used: int, commands: Fill = EMPTY) -> None:
    admission.update({"state": Fill(used, 1_000_000), "snapshots": EMPTY}, commands)


def admitted(admission: Admission, most: int = 1_000) -> int:
    """How many starts of 10,000 bytes go on before one is held."""
    return next((n for n in range(most) if not admission.admit(10_000, 0)), most)


def test_a_burst_between_two_readings_stops_at_the_watermark(admission: Admission) -> None:
    """What starts take is counted along: no reading is needed to close."""
    assert admitted(admission) == 49
    assert (admission.open, admission.resource) == (False, "state")


def test_what_a_reading_may_have_missed_is_counted_once_more(admission: Admission) -> None:
    """Starts that were on their way when the broker was asked are not in its answer."""
    for _ in range(30):
        assert admission.admit(10_000, 0)
    admission.begin()
    reading(admission, 0)
    assert admitted(admission) == 19
    admission.begin()
    reading(admission, 300_000)
    admission.begin()
    reading(admission, 300_000)
    assert admitted(admission) == 19, "and what a reading has seen is not counted twice for ever"


def test_a_refused_write_closes_until_nobody_is_refused_any_more(admission: Admission) -> None:
    """Whatever the readings say: it is full, it says so, and it opens by itself."""
    admission.refused("nats-server")
    assert (admission.open, admission.resource, admission.full) == (False, "nats-server", "nats-server")
    reading(admission, 0)
    admission.refused("nats-server")
    for _ in range(2):
        reading(admission, 0)
        assert not admission.open
    reading(admission, 0)
    assert (admission.open, admission.full, admission.resource) == (True, None, None)


@pytest.mark.parametrize(("used", "full"), [(980_000, None), (990_000, "state"), (996_500, "state")])
def test_full_is_more_than_short(admission: Admission, used: int, full: str | None) -> None:
    """From the watermark on starts wait; without room for even one more message it is full."""
    reading(admission, used)
    assert (admission.open, admission.full) == (False, full)


# -- held -----------------------------------------------------------------------------------------------------


def delivery(seq: int) -> MemoryDelivery:
    return MemoryDelivery("durable_timer.commands.start.v1", b"x" * 1_000, seq=seq, stored_at_ms=0)


def test_many_come_back_less_often() -> None:
    """A few come back after two seconds, a hundred thousand so that they are 500 a second."""
    held = Held(lambda: 0.0)
    assert held.note(A, delivery(1), start=True) == HOLD_MS
    delay_ms = 0
    for seq in range(2, 100_001):
        delay_ms = held.note(TimerRef(f"{seq:026}"), delivery(seq), start=True)
    assert delay_ms == pytest.approx(200_000, rel=0.01)


def test_those_held_are_asked_back_oldest_first_without_their_bodies() -> None:
    """Whatever order they were given back in; each once."""
    held = Held(lambda: 0.0)
    for seq in (9, 3, 7):
        held.note(A, delivery(seq), start=True)
    held.note(B, delivery(5), start=False)
    taken = held.take(2, starts=True)
    assert [(one.seq, one.data) for one in taken] == [(3, b""), (7, b"")]
    assert [one.seq for one in held.take(5, starts=False)] == [5]
    held.arrived(9)
    assert held.take(5, starts=True) == []


def test_a_timer_is_remembered_as_long_as_its_command_is_away() -> None:
    """For longer than the command stays away, and not for ever; the oldest one counts until it is settled."""
    now = [0.0]
    held = Held(lambda: now[0])
    held.note(A, delivery(4), start=True)
    held.note(A, delivery(8), start=True)
    assert (held.older(A, 4), held.older(A, 8), held.older(B, 8)) == (False, True, False)
    now[0] += HOLD_MS / 1000 + 1
    assert A in held
    held.settled(A, 4)
    assert not held.older(A, 8)
    held.note(A, delivery(8), start=True)
    now[0] += 60
    assert A not in held


# -- in the ring ----------------------------------------------------------------------------------------------


def test_a_start_without_room_for_its_state_leaves_no_payload() -> None:
    """However often it is tried, in the end there is one payload: the one that the state refers to."""

    async def story() -> None:
        async with Ring() as ring:
            ring.state.fail_next(StorageFull("no room"), times=3)
            body = body_of("start", timer={"name": "large"}, due={"delay_ms": 60_000}, payload="x" * 5_000)
            seq = ring.publish("durable_timer.commands.start.v1", body)
            await ring.until(lambda: ring.outcomes(seq), "an outcome")
            assert len(ring.snapshots) == 1
            assert not ring.log.mistakes

    play(story())


def test_what_is_held_comes_back_with_the_first_reading_that_shows_room() -> None:
    """Not when its time is over: starts as soon as admission is open, ends as soon as nothing is full."""

    async def story() -> None:
        async with Ring() as ring:
            service = ring.replicas[0]
            first = ring.publish("durable_timer.commands.start.v1", body_of("start"))
            await ring.until(lambda: ring.outcomes(first), "an outcome")
            ring.state.fail_next(StorageFull("no room"))
            cancel = ring.publish("durable_timer.commands.cancel.v1", body_of("cancel", command_id="c-2"))
            service.admission.update({"state": Fill(600_000, 1_000_000)}, EMPTY)
            body = body_of("start", timer={"name": "held"}, due={"delay_ms": 60_000})
            start = ring.publish("durable_timer.commands.start.v1", body)
            await ring.until(lambda: service.commands.held == 2, "two that are held")
            before_ms = ring.clock.now_ms()
            service.admission.update({"state": Fill(100_000, 1_000_000)}, EMPTY)
            service.commands.room_read()
            await ring.until(lambda: ring.outcomes(cancel) and ring.outcomes(start), "both outcomes")
            assert ring.clock.now_ms() - before_ms < HOLD_MS // 2
            assert {one.status for one in ring.outcomes(cancel) + ring.outcomes(start)} == {"accepted"}

    play(story())


def test_a_resume_without_room_goes_out_as_soon_as_there_is_some() -> None:
    """It is tried less and less often; told of room, it does not wait for its next turn."""

    async def story() -> None:
        async with Ring() as ring:
            ring.resumes.fail_next(StorageFull("no room"), times=6)
            ring.publish("durable_timer.commands.start.v1", body_of("start"))
            await ring.until(lambda: not ring.resumes._trouble, "six refusals")
            before_ms = ring.clock.now_ms()
            ring.replicas[0].driver.hurry()
            await ring.until(ring.resumes.standing, "the resume")
            assert ring.clock.now_ms() - before_ms < 1_000

    play(story())


async def test_a_purge_in_place_of_a_marker_is_fenced() -> None:
    """Only what is not newer than the ended entry goes: between refusal and purge a new life may have begun."""
    asked: list[tuple[str, object]] = []

    class Full:
        async def publish(self, *_: object) -> None:
            raise StorageFull("no room")

        async def api(self, name: str, body: object) -> None:
            asked.append((name, body))

    full: Any = Full()
    decision = decide(None, command("start", 1_000))
    assert isinstance(decision, Write)
    await JetStreamState(full, replicas=3, tombstone_ttl_s=60).remove(decision.timer, 7)
    subject = f"$KV.DURABLE_TIMER_STATE.{decision.timer.timer_ref}"
    assert asked == [("STREAM.PURGE.KV_DURABLE_TIMER_STATE", {"filter": subject, "seq": 8})]
