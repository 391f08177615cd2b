"""A bounded memory of recent states, so that most writes need no read first.

What it says may be old: it may lead to a compare-and-set that loses, never to a refusal.
"""

from __future__ import annotations

from timer_service.domain.identity import TimerRef
from timer_service.ports import Stored

CAPACITY = 16_384


class Recent:
    """The last states written or read, oldest forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._stored: dict[TimerRef, Stored] = {}

    def get(self, timer_ref: TimerRef) -> Stored | None:
        return self._stored.get(timer_ref)

    def keep(self, timer_ref: TimerRef, stored: Stored) -> None:
        """Remember a state. That there is none is not remembered: a start would forget the archive over it."""
        self._stored.pop(timer_ref, None)
        if stored.timer is None:
            return
        self._stored[timer_ref] = stored
        if len(self._stored) > self._capacity:
            del self._stored[next(iter(self._stored))]

    def forget(self, timer_ref: TimerRef) -> None:
        self._stored.pop(timer_ref, None)

    def clear(self) -> None:
        self._stored.clear()
