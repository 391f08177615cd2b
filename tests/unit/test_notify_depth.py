"""How often the outbox is counted: what /metrics says must not be of a minute ago because of one bad moment."""

from __future__ import annotations

from typing import Any

import pytest

from notify_consumer.depth import MAX_PAUSE_S, Depth
from notify_consumer.errors import OutboxUnavailable
from notify_consumer.metrics import Metrics
from notify_consumer.outbox.base import State, Survey
from timer_service.clock import SystemClock


class Store:
    """Counts take as long as they are told to, by a clock of its own."""

    def __init__(self) -> None:
        self.at_s = 100.0
        self.takes_s = 0.0
        self.counted = 0
        self.looked = 0
        self.away = False

    async def survey(self, limit: int) -> Survey:
        self.looked += 1
        return Survey({}, None)

    async def counts(self) -> dict[State, int]:
        self.at_s += self.takes_s
        if self.away:
            raise OutboxUnavailable("away")
        self.counted += 1
        return {State.DONE: self.counted}


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def depth(store: Store) -> Depth:
    outbox: Any = store
    return Depth(outbox, Metrics(), SystemClock(), lambda: store.at_s)


async def counted(depth: Depth, store: Store, looks: int) -> int:
    """How many counts there are in so many looks, two seconds apart."""
    before = store.counted
    for _ in range(looks):
        await depth.look()
        store.at_s += 2.0
    return store.counted - before


async def test_a_quick_count_is_made_at_each_look(depth: Depth, store: Store) -> None:
    """What is known is two seconds old at most."""
    store.takes_s = 0.001
    assert await counted(depth, store, 10) == 10


async def test_one_slow_count_changes_nothing(depth: Depth, store: Store) -> None:
    """The process was frozen, or the store was busy."""
    for takes_s, counts in ((0.001, 3), (30.0, 1), (0.001, 3)):
        store.takes_s = takes_s
        assert await counted(depth, store, counts) == counts


async def test_a_count_that_fails_late_is_repeated_at_the_next_look(depth: Depth, store: Store) -> None:
    """After an outage the figures are right at once; until then those of before stand."""
    await depth.look()
    store.away, store.takes_s = True, 6.0
    for _ in range(3):
        with pytest.raises(OutboxUnavailable):
            await depth.look()
    assert depth.counts == {State.DONE: 1}
    store.away, store.takes_s = False, 0.001
    assert await counted(depth, store, 3) == 3


async def test_counts_that_take_long_are_rarer_and_looks_are_not(depth: Depth, store: Store) -> None:
    """At most a fiftieth of the time, but at least about once a minute; what waits is seen each time."""
    store.takes_s = 0.2
    await counted(depth, store, 2)
    assert 8 <= await counted(depth, store, 50) <= 10
    store.takes_s = 1_000.0
    await counted(depth, store, 20)
    looks_a_minute, before = round(MAX_PAUSE_S / 2), store.looked
    assert 2 <= await counted(depth, store, looks_a_minute * 3) <= 3
    assert store.looked == before + looks_a_minute * 3
