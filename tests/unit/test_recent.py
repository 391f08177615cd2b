"""The memory of recent states is bounded, and forgets what it is told to."""

from __future__ import annotations

from tests.support.commands import command
from timer_service.domain.identity import NameKey, TimerRef, derive_timer_ref
from timer_service.domain.machine import Write, decide
from timer_service.ports import Stored
from timer_service.runtime.recent import CAPACITY, Recent

REFS = [derive_timer_ref(NameKey(f"timer-{number}")) for number in range(10)]


START = decide(None, command("start", 1_000))
assert isinstance(START, Write)
TIMER = START.timer


def stored(revision: int) -> Stored:
    """A state at some revision; which timer it is does not matter here."""
    return Stored(TIMER, revision)


def known(recent: Recent) -> list[TimerRef]:
    return [ref for ref in REFS if recent.get(ref)]


def test_what_was_kept_is_known():
    """The last state kept of a timer, None for others."""
    recent = Recent()
    recent.keep(REFS[0], stored(1))
    recent.keep(REFS[0], stored(2))
    assert recent.get(REFS[0]) == stored(2)
    assert recent.get(REFS[1]) is None


def test_the_oldest_make_room():
    """At most ``capacity`` are kept; what was kept anew is not the oldest any more."""
    recent = Recent(capacity=3)
    for number in (0, 1, 2):
        recent.keep(REFS[number], stored(number))
    recent.keep(REFS[0], stored(10))
    recent.keep(REFS[3], stored(3))
    assert known(recent) == [REFS[0], REFS[2], REFS[3]]
    for number, ref in enumerate(REFS):
        recent.keep(ref, stored(number))
    assert known(recent) == REFS[-3:]


def test_keeping_the_same_timer_again_displaces_nobody():
    """A busy timer has one place."""
    recent = Recent(capacity=2)
    recent.keep(REFS[0], stored(0))
    for revision in range(100):
        recent.keep(REFS[1], stored(revision))
    assert recent.get(REFS[0]) == stored(0)


def test_forgetting():
    """One, or all; forgetting the unknown does nothing."""
    recent = Recent()
    for ref in REFS:
        recent.keep(ref, stored(1))
    recent.forget(REFS[0])
    recent.forget(REFS[0])
    assert (recent.get(REFS[0]), recent.get(REFS[1])) == (None, stored(1))
    recent.clear()
    assert known(recent) == []


def test_that_there_is_nothing_is_not_remembered():
    """A removal makes it forget: a start must look for a former life."""
    recent = Recent()
    recent.keep(REFS[0], stored(1))
    recent.keep(REFS[0], Stored(None, 2))
    recent.keep(REFS[1], Stored(None, 3))
    assert known(recent) == []


def test_by_default_some_thousands_are_kept():
    """The newest ``CAPACITY`` of them."""
    recent = Recent()
    refs = [TimerRef(f"{number:026}") for number in range(CAPACITY + 5)]
    for ref in refs:
        recent.keep(ref, stored(1))
    assert [recent.get(ref) is not None for ref in (refs[4], refs[5], refs[-1])] == [False, True, True]
