"""A lease has one holder, and another as soon as that one is gone; in virtual time, with frozen and dying processes."""

from __future__ import annotations

import pytest

from tests.support.contest import World
from timer_service.domain.lease import EXPIRY_S, HOLD_S, RENEW_S, UNREADABLE, Contender, Record, Step

TAKE_OVER_S = 3.0


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_one_takes_it_and_keeps_it(world: World) -> None:
    """It writes about every second and reads once; those who wait read once and write nothing."""
    first = world.start("a")
    world.run(0.1)
    second, third = world.start("b"), world.start("c")
    world.run(60)
    assert world.holders() == [first]
    assert (first.epoch, second.duplicate, third.duplicate) == (1, True, True)
    assert world.reads == 3
    assert world.writes == 1 + int(60 / RENEW_S)


def test_after_a_death_another_takes_over(world: World) -> None:
    """Its connection is gone with it, which is found out by asking; the epoch grows, and the others stay behind."""
    first = world.start("a")
    world.run(0.1)
    world.start("b"), world.start("c")
    world.run(20.7)
    first.kill()
    took = world.until(lambda: len(world.holders()) == 1, TAKE_OVER_S)
    assert took < EXPIRY_S - RENEW_S, "asking is faster than waiting"
    world.run(20)
    (holder,) = world.holders()
    assert holder.epoch == 2
    assert world.overlaps == 0


def test_a_holder_whose_connection_only_seems_to_live_is_waited_for(world: World) -> None:
    """A machine without power: the broker does not know yet; silence alone is enough after a while."""
    first = world.start("a")
    world.run(0.1)
    second = world.start("b")
    world.run(10)
    first.freeze()  # for ever
    took = world.until(lambda: second.holds, TAKE_OVER_S)
    assert took > HOLD_S - RENEW_S


def test_a_clean_stop_hands_it_over_at_once(world: World) -> None:
    """Those who wait hear it."""
    first = world.start("a")
    world.run(0.1)
    second = world.start("b")
    world.run(10.3)
    first.stop()
    assert world.until(lambda: second.holds, TAKE_OVER_S) < 0.2


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_restart_has_it_at_once(world: World, end: str) -> None:
    """Under the same name or another, nothing has to run out."""
    first = world.start("a")
    world.run(10.3)
    getattr(first, end)()
    world.run(0.01)
    again = world.start("a")
    assert world.until(lambda: again.holds, TAKE_OVER_S) < 0.2
    assert again.epoch == 2


def test_a_second_process_of_a_name_stands_by(world: World) -> None:
    """As long as the first lives, also where that one is slow to speak."""
    first = world.start("a")
    world.run(0.1)
    second = world.start("a")
    world.run(1)
    assert second.duplicate
    world.run(60)
    assert (world.holders(), second.duplicate, first.duplicate) == ([first], True, False)
    assert (world.record.process, world.record.epoch) == (first.name, 1)


def test_a_frozen_holder_has_stopped_before_another_begins(world: World) -> None:
    """And when it goes on, it learns that it is second; it takes over again when the other ends."""
    first = world.start("a")
    world.run(0.1)
    second = world.start("a")
    world.run(5)
    first.freeze()
    world.run(10)
    assert (first.holds, second.holds, world.overlaps) == (False, True, 0)
    first.thaw()
    world.run(1)
    assert (world.holders(), first.duplicate, world.overlaps) == ([second], True, 0)
    second.stop()
    assert world.until(lambda: first.holds, TAKE_OVER_S) < 0.2


def test_a_holder_that_was_frozen_alone_goes_on(world: World) -> None:
    """Nobody took it meanwhile: the same epoch, after one renewal."""
    first = world.start("a")
    world.run(5)
    first.freeze()
    world.run(100)
    assert not first.holds
    first.thaw()
    assert world.until(lambda: first.holds, 1) < 0.1
    assert first.epoch == 1


def test_a_holder_that_is_cut_off_does_not_rely_on_it(world: World) -> None:
    """Others may find it gone and begin; without others it has it again when it is back."""
    first = world.start("a")
    world.run(5)
    first.cut()
    assert not first.holds
    world.run(30)
    first.heal()
    assert world.until(lambda: first.holds, 1) < 0.1
    second = world.start("b")
    world.run(5)
    first.cut()
    world.until(lambda: second.holds, TAKE_OVER_S)
    first.heal()
    world.run(5)
    assert (world.holders(), world.overlaps, second.epoch) == ([second], 0, 2)


def test_all_were_away(world: World) -> None:
    """The broker restarts: whoever comes back first does not take the silence for a death."""
    first = world.start("a")
    world.run(0.1)
    second = world.start("b")
    world.run(10)
    for process in (first, second):
        process.cut()
    world.run(20)
    second.heal()
    world.run(0.5)
    first.heal()
    world.run(20)
    assert (world.holders(), first.epoch) == ([first], 1)


def test_a_write_without_an_answer_is_recognised() -> None:
    """Stored or not: what stands there tells, by process and epoch."""
    contender = Contender("a", "p", "ask")
    assert contender.step(0) is Step.READ
    contender.found(None, 0, 0)
    assert contender.step(0) is Step.WRITE
    record = contender.propose()
    contender.unanswered(0.6)
    assert contender.step(0.6) is Step.WAIT
    assert contender.step(0.7) is Step.READ
    contender.found(record, 9, 0.7)
    assert contender.mine == record
    assert not contender.holds(0.7), "when it was stored is not known"
    assert contender.step(0.7) is Step.WRITE
    renewal = contender.propose()
    assert (renewal.epoch, renewal.beat, contender.revision) == (1, record.beat + 1, 9)


def test_without_room_a_holder_goes_on(world: World) -> None:
    """Renewals are refused, and heard all the same: nobody else begins."""
    first = world.start("a")
    world.run(0.1)
    second = world.start("b")
    world.run(5)
    world.full = True
    world.run(60)
    assert (world.holders(), second.duplicate, world.overlaps) == ([first], True, 0)
    world.full = False
    world.run(5)
    assert (world.holders(), world.record.epoch) == ([first], 1)


def test_without_room_a_dead_holder_is_replaced_too(world: World) -> None:
    """Nothing can be written: somebody drives without a record, one in the end, and writes it when there is room."""
    first = world.start("a")
    world.run(0.1)
    world.start("b"), world.start("c")
    world.run(5)
    world.full = True
    world.run(1)
    first.kill()
    world.until(lambda: bool(world.holders()), TAKE_OVER_S)
    world.run(3)
    (holder,) = world.holders()
    world.full = False
    world.run(3)
    assert world.holders() == [holder]
    assert world.record.process == holder.name


def test_without_a_bucket_a_holder_goes_on(world: World) -> None:
    """Deleted, and made anew a while later: the same one holds it; whoever comes meanwhile gets nothing."""
    first = world.start("a")
    world.run(5)
    world.bucket, world.stored = False, None
    world.run(5)
    second = world.start("b")
    world.run(5)
    assert world.holders() == [first]
    world.bucket = True
    world.run(5)
    assert (world.holders(), world.overlaps) == ([first], 0)
    assert world.record.process == first.name
    assert second.duplicate


def test_what_nobody_can_read_is_overwritten_after_a_while(world: World) -> None:
    """A record of nonsense holds nothing for ever."""
    world.stored, world.revision = UNREADABLE, 7
    first = world.start("a")
    took = world.until(lambda: first.holds, TAKE_OVER_S)
    assert took >= EXPIRY_S


def test_a_broker_with_older_data_changes_no_holder(world: World) -> None:
    """Its restored record is overwritten by who holds the lease."""
    first = world.start("a")
    world.run(5)
    world.stored, world.revision = Record("z", "old", 0, 4, "ask.z"), 3
    world.run(5)
    assert (world.holders(), world.record.process, first.epoch) == ([first], first.name, 1)


def test_a_sign_of_life_after_the_question_counts() -> None:
    """It was cut off and is back: that nobody listened a moment ago says nothing any more."""
    contender = Contender("a", "p", "ask")
    contender.found(Record("z", "q", 3, 5, "ask.z"), 8, 0)
    asked = contender.asking(0)
    contender.heard(Record("z", "q", 3, 6, "ask.z"), 0.1)
    contender.is_gone(asked)
    assert contender.step(0.1) is Step.WAIT
    assert contender.holder_lives


def test_what_was_given_up_is_read_before_it_is_taken() -> None:
    """What is heard has no revision yet."""
    contender = Contender("a", "p", "ask")
    contender.found(Record("z", "q", 3, 5, "ask.z"), 8, 0)
    given_up = Record("z", "q", 3, 6, "ask.z", given_up=True)
    contender.heard(given_up, 0.1)
    assert contender.step(0.1) is Step.READ
    contender.found(given_up, 9, 0.1)
    assert (contender.step(0.1), contender.revision, contender.holder_lives) == (Step.WRITE, 9, False)


def test_a_claim_that_was_not_stored_is_forgotten() -> None:
    """Heard, but not found: it is waited for as long as a holder's silence; then who stands there is asked."""
    holder = Record("z", "q", 3, 5, "ask.z")
    contender = Contender("a", "p", "ask")
    contender.found(holder, 8, 0)
    contender.heard(Record("y", "r", 4, 0, "ask.y"), 1)
    expiry_s = 1 + EXPIRY_S
    assert contender.step(expiry_s) is Step.READ
    contender.found(holder, 8, expiry_s)
    assert contender.step(expiry_s) is Step.ASK
    assert contender.asking(expiry_s) == holder
    assert contender.step(expiry_s) is Step.WAIT, "it may well live"
    contender.is_gone(holder)
    contender.found(holder, 8, expiry_s)
    assert contender.step(expiry_s) is Step.WRITE
    assert contender.propose().epoch == 5


def test_a_holder_who_may_not_read_goes_on_writing() -> None:
    """Lost permissions: each refusal is followed by a look, each look that fails by another try."""
    contender = Contender("a", "p", "ask")
    contender.found(None, 0, 0)
    contender.written(contender.propose(), 1, 0)
    now, tries = 0.0, 0
    while now < 30:
        step = contender.step(now)
        if step is Step.WRITE:
            contender.refused(contender.propose(), now, now)
            tries += 1
        elif step is Step.READ:
            contender.not_read(now)
        else:
            now = contender.due_s(now)
        assert contender.holds(now)
    assert 10 < tries < 60
