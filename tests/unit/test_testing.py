"""What the ports in memory offer to tests beyond the ports: trouble on purpose, and a look behind."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.support.commands import REF, command
from timer_service.domain.machine import Write, decide
from timer_service.domain.model import JsonText, Phase, Timer, Wake
from timer_service.errors import Ambiguous, StorageFull, WrongRevision
from timer_service.ports import Stored
from timer_service.testing import (
    MemoryArchive,
    MemoryDelivery,
    MemoryResumes,
    MemorySnapshots,
    MemoryState,
    MemoryWakes,
)
from timer_service.wire.records import resume_of, terminal_record


def timer() -> Timer:
    decision = decide(None, command("start", 1_000))
    assert isinstance(decision, Write)
    return decision.timer


async def test_a_write_can_be_stored_and_its_reply_lost():
    """``fail_next(…, stored=True)``: the call raises, and what it wrote stands."""
    state = MemoryState()
    state.fail_next(Ambiguous("lost"), stored=True)
    with pytest.raises(Ambiguous):
        await state.put(timer(), 0)
    assert state.peek(REF) == Stored(timer(), 1)


async def test_a_failed_call_stores_nothing():
    """``fail_next``: so many calls raise and change nothing; then all is well again."""
    state = MemoryState()
    state.fail_next(StorageFull("full"), times=2)
    for _ in range(2):
        with pytest.raises(StorageFull):
            await state.put(timer(), 0)
    assert await state.put(timer(), 0) == 1
    assert state.calls == 3


async def test_stored_trouble_is_still_fenced():
    """A write that would have lost anyway says so."""
    state = MemoryState()
    await state.put(timer(), 0)
    state.fail_next(Ambiguous("lost"), stored=True)
    with pytest.raises(WrongRevision):
        await state.put(timer(), 0)


async def test_each_call_lets_others_go_first():
    """Between call and effect there is a turn: two writers can both have read before one of them writes."""
    state = MemoryState()
    write = asyncio.ensure_future(state.put(timer(), 0))
    await asyncio.sleep(0)
    assert state.peek(REF) == Stored(None, 0)
    assert await write == 1


async def test_markers_expire_when_told():
    """Then the timer is unknown again, and may be created."""
    state = MemoryState()
    await state.remove(timer(), await state.put(timer(), 0))
    assert state.marker(REF) is not None
    state.expire_markers()
    assert (state.marker(REF), state.peek(REF)) == (None, Stored(None, 0))
    assert await state.put(timer(), 0) == 3


async def test_every_write_is_announced():
    """``on_written`` is the feed: puts, removals and foreign writes, in order."""
    state, seen = MemoryState(), []
    state.on_written = lambda ref, revision: seen.append((ref, revision, state.refs()))
    await state.remove(timer(), await state.put(timer(), 0))
    state.overwrite(REF, b"{")
    assert seen == [(REF, 1, [REF]), (REF, 2, []), (REF, 3, [REF])]


async def test_the_archive_shows_and_loses_its_records():
    """All records of a timer can be looked at; at the end of the archive's age there are none."""
    archive = MemoryArchive()
    ended = replace(timer(), phase=Phase.CANCELLED, ended_at_ms=5, failure_code=None, message=None)
    seq = await archive.append(terminal_record(ended), 0)
    await archive.append(terminal_record(replace(ended, generation=1)), seq)
    assert [record.generation for record in archive.records(REF)] == [0, 1]
    archive.expire(REF)
    assert archive.records(REF) == []
    assert await archive.last(REF) == Stored(None, 0)


async def test_resumes_are_read_in_order_and_the_window_ends_when_told():
    """After ``expire_window`` the same attempt is stored again."""
    resumes = MemoryResumes()
    one = resume_of(timer(), JsonText(b"null"))
    other = replace(one, resume_id=f"{REF}.1", generation=1)
    await resumes.publish(one, 0)
    await resumes.publish(other, 0)
    assert resumes.standing() == [one, other]
    assert [resumes.read(), resumes.read(), resumes.read()] == [one, other, None]
    await resumes.publish(one, 0)
    assert resumes.standing() == []
    resumes.expire_window()
    await resumes.publish(one, 0)
    assert resumes.standing() == [one]


async def test_wakes_can_be_handed_on():
    """``on_wake`` gets each as it is published."""
    wakes = MemoryWakes()
    handed: list[Wake] = []
    wakes.on_wake = handed.append
    await wakes.publish(REF, 1, 5, 7)
    assert handed == wakes.published
    assert len(handed) == 1


async def test_snapshots_are_counted():
    """How many stand."""
    snapshots = MemorySnapshots()
    seq = await snapshots.add(REF, 0, JsonText(b"1"))
    assert len(snapshots) == 1
    await snapshots.delete(seq)
    assert len(snapshots) == 0


async def test_a_delivery_remembers_how_it_was_settled():
    """Acknowledged or given back, with which delay, and whether it was kept alive before."""
    settled: list[MemoryDelivery] = []
    delivery = MemoryDelivery("s", b"{}", seq=1, stored_at_ms=5, on_settled=settled.append)
    await delivery.in_progress()
    assert not delivery.settled
    await delivery.nak(300)
    assert (delivery.settled, delivery.nak_delay_ms, delivery.answers) == (True, 300, ["in_progress", "nak"])
    assert settled == [delivery]
