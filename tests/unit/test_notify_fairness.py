"""Slots are shared so that no flow keeps the others waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from notify_consumer.fairness import allot
from notify_consumer.outbox.base import Waiting


def many(*lanes: str, oldest_ms: int = 0) -> dict[str, Waiting]:
    return {lane: Waiting(1_000, oldest_ms) for lane in lanes}


def test_one_flow_alone_gets_half() -> None:
    """However much of it waits, half of the slots stay free for whoever comes."""
    assert allot(many("a"), {}, 32) == {"a": 16}
    assert allot(many("a"), {"a": 16}, 16) == {}


def test_a_newcomer_finds_room() -> None:
    """While one flow holds its half, another gets slots at once."""
    assert allot(many("a", "b"), {"a": 16}, 16) == {"b": 8}


def test_waiting_flows_get_equal_shares() -> None:
    """Flows that wait together get the same number of slots."""
    assert allot(many("a", "b", "c"), {}, 32) == {"a": 8, "b": 8, "c": 8}


def test_few_rows_get_all_they_need() -> None:
    """What does not reach the limit is not held back by those who do."""
    waiting = many("a") | {"b": Waiting(2, 0)}
    assert allot(waiting, {}, 32) == {"a": 15, "b": 2}


def test_the_last_slot_goes_to_who_has_none() -> None:
    """With one slot left a flow that runs nothing may take it, one that runs something may not."""
    assert allot(many("a", "b"), {"a": 1}, 1) == {"b": 1}
    assert allot(many("a"), {"a": 1}, 1) == {}


def test_a_single_slot_is_used() -> None:
    """Concurrency 1 works."""
    assert allot(many("a"), {}, 1) == {"a": 1}


def test_among_equals_the_oldest_comes_first() -> None:
    """With fewer slots than flows, those are served first that have waited longest: nobody starves."""
    waiting = {f"l{n}": Waiting(1, 100 - n) for n in range(10)}
    assert set(allot(waiting, {}, 3)) == {"l9", "l8", "l7"}


lanes = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50))


@given(waiting=lanes, held=lanes, free=st.integers(0, 64))
def test_shares_are_sound(waiting: dict[str, int], held: dict[str, int], free: int) -> None:
    """Never more than is free or waits; and while anything is free, a flow that runs nothing and waits gets a slot."""
    granted = allot({lane: Waiting(count, 0) for lane, count in waiting.items()}, held, free)
    assert sum(granted.values()) <= free
    assert all(0 < count <= waiting[lane] for lane, count in granted.items())
    idle = [lane for lane, count in waiting.items() if count and not held.get(lane)]
    served = [lane for lane in idle if lane in granted]
    assert len(served) == min(len(idle), free) or sum(granted.values()) == free
