"""Who gets the free slots.

A lane may take a slot while it holds fewer than are free. So a single busy one takes half of all slots at most, two
take a third each, and so on: whatever hangs or is slow, there is room for a flow that comes later, without setting
slots aside for anyone. Only when as many lanes are busy as there are slots would none be left; therefore those that
are known to be slow never hold the last eighth of the slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

from notify_consumer.outbox.base import Waiting

SLOW_S = 0.25
REMEMBERED = 4_096


def allot(
    waiting: Mapping[str, Waiting],
    held: Mapping[str, int],
    free: int,
    *,
    turns: Mapping[str, int] | None = None,
    slow: Collection[str] = (),
    slow_room: int = 0,
) -> dict[str, int]:
    """How many of ``free`` slots each waiting lane gets; ``held`` is what the lanes hold already.

    Slots go to the lane that holds fewest; among equals to the one whose last turn (a number that grows, see
    ``turns``) is longest ago, one that had none before all others, and then to the one that has waited longest.
    Lanes in ``slow`` get ``slow_room`` slots together at most.
    """
    turns = turns or {}
    queue = [
        (held.get(lane, 0), turns.get(lane, 0), found.oldest_ms, lane) for lane, found in waiting.items() if found.count
    ]
    heapq.heapify(queue)
    granted: dict[str, int] = {}
    while queue and queue[0][0] < free:
        holds, turn, oldest_ms, lane = heapq.heappop(queue)
        if lane in slow:
            if slow_room <= 0:
                continue
            slow_room -= 1
        free -= 1
        granted[lane] = granted.get(lane, 0) + 1
        if granted[lane] < waiting[lane].count:
            heapq.heappush(queue, (holds + 1, turn, oldest_ms, lane))
    return granted


class Shares:
    """``slots`` slots, and what is remembered of the lanes that used them lately (the last 4,096)."""

    def __init__(self, slots: int) -> None:
        self._for_slow = slots - -(-slots // 8) if slots > 1 else slots
        self._turn = 0
        self._turns: dict[str, int] = {}
        self._slow: set[str] = set()

    def allot(self, waiting: Mapping[str, Waiting], held: Mapping[str, int], free: int) -> dict[str, int]:
        """As the function of this name."""
        room = self._for_slow - sum(held.get(lane, 0) for lane in self._slow)
        return allot(waiting, held, free, turns=self._turns, slow=self._slow, slow_room=room)

    def begun(self, lane: str) -> None:
        """A hand-off of ``lane`` has begun: it is the last to have had its turn."""
        self._turn += 1
        self._turns.pop(lane, None)
        self._turns[lane] = self._turn  # at the end: the order is that of the turns
        if len(self._turns) > REMEMBERED:
            forgotten = next(iter(self._turns))
            del self._turns[forgotten]
            self._slow.discard(forgotten)

    def ended(self, lane: str, seconds: float) -> None:
        """One of ``lane`` has ended, and took so long: the lane is slow until one is quick again."""
        if seconds < SLOW_S:
            self._slow.discard(lane)
        elif lane in self._turns:
            self._slow.add(lane)
