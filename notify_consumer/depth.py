"""How much is in the outbox, for people and metrics only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from notify_consumer.metrics import Metrics
from notify_consumer.outbox.base import Outbox, State
from timer_service.clock import Clock

COUNT_PART, MAX_PAUSE_S = 50, 60.0
"""Counting takes at most one part in so many of the time, unless it is done once a minute."""


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


class Depth:
    """What waits is looked at each time. All rows are counted less often where that takes long, twice running: once
    says only that the store was busy or away, or this process stood still. ``time_s`` grows by one a second."""

    def __init__(self, outbox: Outbox, metrics: Metrics, clock: Clock, time_s: Callable[[], float] = _loop_s) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._time_s = time_s
        self._took_s = 0.0
        self._again_at_s = 0.0
        self.counts: dict[State, int] = {}
        """Rows in each state when they were last counted."""

    async def look(self) -> None:
        """Raises OutboxUnavailable; what was known stays then."""
        self._metrics.waiting(await self._outbox.survey(1), self._clock.now_ms())
        begun_s = self._time_s()
        if begun_s < self._again_at_s:
            return
        self.counts = await self._outbox.counts()
        self._metrics.rows(self.counts)
        former_s, self._took_s = self._took_s, self._time_s() - begun_s
        self._again_at_s = self._time_s() + min(former_s * COUNT_PART, self._took_s * COUNT_PART, MAX_PAUSE_S)
