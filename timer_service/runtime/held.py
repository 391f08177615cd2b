"""Which timers have a start that waits in its queue for want of room."""

from __future__ import annotations

from collections.abc import Callable

from timer_service.domain.identity import TimerRef


class Held:
    """Remembers each for at least ``keep_s`` seconds and at most twice that; noting and asking cost the same always."""

    def __init__(self, keep_s: float, now_s: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._now_s = now_s
        self._young: set[TimerRef] = set()
        self._old: set[TimerRef] = set()
        self._turned_at = 0.0

    def note(self, timer_ref: TimerRef) -> None:
        self._turn()
        self._young.add(timer_ref)

    def __contains__(self, timer_ref: TimerRef) -> bool:
        self._turn()
        return timer_ref in self._young or timer_ref in self._old

    def _turn(self) -> None:
        age_s = self._now_s() - self._turned_at
        if age_s >= self._keep_s:
            self._old = self._young if age_s < 2 * self._keep_s else set()
            self._young = set()
            self._turned_at = self._now_s()
