"""Who may have an archive record: never wrongly no, also for a process that slept."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.commands import REF
from timer_service.clock import ManualClock
from timer_service.domain.identity import NameKey, TimerRef, derive_timer_ref
from timer_service.runtime.archived import Archived

HOUR_MS = 3_600_000


ALL = Archived()
ALL.complete = True


def refs(number: int) -> list[TimerRef]:
    return [derive_timer_ref(NameKey(f"{number}/{n}")) for n in range(2_000)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def archived(clock: ManualClock) -> Archived:
    """Filled by its scan, in a process that has followed the state so far."""
    made = Archived(clock.now_ms, HOUR_MS)
    made.complete = True
    return made


def test_before_the_scan_everybody_may_have_one(clock: ManualClock) -> None:
    """Until the archive has been read no start may rely on the filter."""
    assert Archived(clock.now_ms, HOUR_MS).may_have(REF)


def test_what_was_added_is_known_and_little_else(archived: Archived) -> None:
    """Never a wrong no; and a wrong yes is rare."""
    for ref in refs(1):
        archived.add(ref)
    assert all(archived.may_have(ref) for ref in refs(1))
    assert sum(archived.may_have(ref) for ref in refs(2)) <= 2


def test_the_ends_of_the_alphabet(archived: Archived) -> None:
    """The smallest and the largest ref, and refs that differ in the last place only, are kept apart."""
    archived.add(TimerRef("7" * 26))
    assert archived.may_have(TimerRef("7" * 26))
    assert not archived.may_have(TimerRef("a" * 26))
    assert not archived.may_have(TimerRef("7" * 25 + "6"))


@settings(max_examples=200, deadline=None)
@given(st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=26, max_size=26).map(TimerRef))
def test_no_ref_is_ever_denied(ref: TimerRef) -> None:
    """Any ref, whatever was added before it; adding it again does nothing."""
    ALL.add(ref)
    ALL.add(ref)
    assert ALL.may_have(ref)


def test_a_no_does_not_outlive_half_a_marker(archived: Archived, clock: ManualClock) -> None:
    """Without a proof of having followed the state, removals may have come and gone unseen."""
    clock.advance(HOUR_MS // 2)
    assert not archived.may_have(REF)
    clock.advance(1)
    assert archived.may_have(REF)


def test_following_without_a_gap_keeps_the_filter(archived: Archived, clock: ManualClock) -> None:
    """Proofs in time extend it, for as long as they come."""
    for _ in range(10):
        clock.advance(HOUR_MS // 4)
        archived.followed(clock.now_ms())
    assert not archived.may_have(REF)
    assert not archived.doubted.is_set()


def test_after_a_gap_the_archive_is_scanned_again(archived: Archived, clock: ManualClock) -> None:
    """What happened in a gap longer than that is nowhere but in the archive."""
    clock.advance(HOUR_MS)
    archived.followed(clock.now_ms())
    assert archived.doubted.is_set()
    assert archived.may_have(REF)
    archived.complete = True
    assert not archived.may_have(REF)


def test_short_markers_prove_nothing(clock: ManualClock) -> None:
    """Markers that may run out between two looks: every start looks into the archive; nothing is scanned in vain."""
    archived = Archived(clock.now_ms, 19_000)
    archived.complete = True
    assert archived.may_have(REF)
    clock.advance(HOUR_MS)
    archived.followed(clock.now_ms())
    assert not archived.doubted.is_set()
