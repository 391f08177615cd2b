"""Who gets the free slots."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from notify_consumer.outbox.base import Waiting


def allot(waiting: Mapping[str, Waiting], held: Mapping[str, int], free: int) -> dict[str, int]:
    """How many of ``free`` slots each waiting lane gets; ``held`` is what the lanes hold already.

    A lane may take a slot while it holds fewer than are free. So a single busy one takes half of all slots at
    most, two take a third each, and so on: whatever hangs or is slow, there is room for a flow that comes later,
    without setting slots aside for anyone. Slots go to the lane that holds fewest; among equals to the one that
    has waited longest.
    """
    queue = [(held.get(lane, 0), found.oldest_ms, lane) for lane, found in waiting.items() if found.count]
    heapq.heapify(queue)
    granted: dict[str, int] = {}
    while queue and queue[0][0] < free:
        holds, oldest_ms, lane = heapq.heappop(queue)
        free -= 1
        granted[lane] = granted.get(lane, 0) + 1
        if granted[lane] < waiting[lane].count:
            heapq.heappush(queue, (holds + 1, oldest_ms, lane))
    return granted
