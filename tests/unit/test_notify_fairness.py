"""Slots are shared so that no flow keeps the others waiting."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notify_consumer.fairness import REMEMBERED, SLOW_S, Shares, allot
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


def test_among_equals_whose_turn_is_longest_ago_comes_first() -> None:
    """An old backlog does not come before a flow that had no turn yet, or had its last one earlier."""
    waiting = {"backlog": Waiting(9, 0), "newcomer": Waiting(9, 1_000), "earlier": Waiting(9, 500)}
    turns = {"backlog": 7, "earlier": 3}
    assert allot(waiting, {}, 1, turns=turns) == {"newcomer": 1}
    assert set(allot(waiting, {"newcomer": 1}, 2, turns=turns)) == {"earlier", "backlog"}
    assert allot(waiting, {"newcomer": 1}, 1, turns=turns) == {"earlier": 1}


def test_slow_flows_together_leave_room() -> None:
    """However many there are, they get no more than their room, and others what is left."""
    waiting = many(*(f"slow-{n}" for n in range(40)), "quick")
    slow = [lane for lane in waiting if lane != "quick"]
    granted = allot(waiting, {}, 32, slow=slow, slow_room=28)
    assert granted.pop("quick") >= 1
    assert sum(granted.values()) == 28
    assert allot(waiting, {}, 3, slow=slow, slow_room=0) == {"quick": 2}


# -- what is remembered ---------------------------------------------------------------------------------------


class Pool:
    """Slots that are filled by ``Shares``; time is what ``end`` says."""

    def __init__(self, slots: int) -> None:
        self.shares = Shares(slots)
        self.slots = slots
        self.running: list[str] = []
        self.waiting: dict[str, Waiting] = {}

    def fill(self) -> list[str]:
        granted = self.shares.allot(self.waiting, Counter(self.running), self.slots - len(self.running))
        begun = [lane for lane, count in granted.items() for _ in range(count)]
        for lane in begun:
            self.shares.begun(lane)
        self.running += begun
        return begun

    def end(self, lanes: list[str], seconds: float) -> None:
        for lane in lanes:
            self.running.remove(lane)
            self.shares.ended(lane, seconds)


@pytest.mark.parametrize("slots", [2, 3, 8, 32])
def test_a_newcomer_finds_a_slot_among_more_slow_flows_than_slots(slots: int) -> None:
    """Once they are known to be slow, an eighth of the slots (at least one) is never theirs."""
    pool = Pool(slots)
    pool.waiting = many(*(f"slow-{n}" for n in range(2 * slots)))
    for _ in range(4):
        pool.fill()
        pool.end(list(pool.running), 2.0)
    pool.fill()
    assert len(pool.running) == slots - -(-slots // 8)
    pool.waiting |= many("newcomer", oldest_ms=10**6)
    assert "newcomer" in pool.fill()


def test_slow_flows_take_turns() -> None:
    """None of them starves behind the others, nor behind quick ones, whatever the age of their backlogs."""
    pool = Pool(8)
    pool.waiting = {f"slow-{n}": Waiting(100, n) for n in range(20)} | many("q1", "q2", "q3", "q4", "q5", "q6")
    served: Counter[str] = Counter()
    for _ in range(60):
        served.update(pool.fill())
        slow = [lane for lane in pool.running if lane.startswith("slow")]
        pool.end([lane for lane in pool.running if lane.startswith("q")], 0.001)
        pool.end(slow[: len(slow) // 2 + 1], 2.0)
    assert set(served) == set(pool.waiting)
    counts = [served[f"slow-{n}"] for n in range(20)]
    assert max(counts) - min(counts) <= 2


def test_a_flow_that_became_quick_is_slow_no_longer() -> None:
    """One quick hand-off is enough."""
    pool = Pool(8)
    pool.waiting = many(*"abcdefghijkl")
    pool.fill()
    pool.end(list(pool.running), 2.0)
    pool.fill()
    pool.end(list(pool.running), 2.0)
    assert len(pool.fill()) == 7
    pool.end(list(pool.running), SLOW_S / 2)
    assert len(pool.fill()) == 8


def test_a_single_slot_serves_slow_flows_too() -> None:
    """Where there is nothing to set aside nothing is."""
    pool = Pool(1)
    pool.waiting = many("a")
    for _ in range(3):
        assert pool.fill() == ["a"]
        pool.end(["a"], 60.0)


def test_what_is_remembered_is_bounded() -> None:
    """Flows without end leave no trace for ever."""
    shares = Shares(8)
    for number in range(3 * REMEMBERED):
        shares.begun(f"flow-{number}")
        shares.ended(f"flow-{number}", 2.0)
        shares.ended(f"flow-{number - 2 * REMEMBERED}", 2.0)  # one that hung while it was forgotten
        assert not number or "busy" in shares._turns  # forgotten are those that had no turn for longest
        shares.begun("busy")
    assert len(shares._turns) == len(shares._slow) + 1 == REMEMBERED
    assert shares.allot(many("busy", "flow-0"), {}, 1) == {"flow-0": 1}
