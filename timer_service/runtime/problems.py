"""State entries that can't be read: reported, left untouched, and in nobody's way."""

from __future__ import annotations

from typing import Any

from timer_service import events
from timer_service.domain.identity import TimerRef
from timer_service.errors import UnreadableState
from timer_service.metrics import Metrics


class Problems:
    """What is known to be unreadable. An entry leaves when a readable one, or a removal, takes its place."""

    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._known: dict[TimerRef, str] = {}
        self._metrics = metrics
        self._log = log

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, timer_ref: TimerRef) -> bool:
        return timer_ref in self._known

    def known(self) -> set[TimerRef]:
        """The entries that are unreadable now."""
        return set(self._known)

    def report(self, error: UnreadableState) -> None:
        """Remember and log; saying the same again does nothing."""
        timer_ref = TimerRef(error.timer_ref)
        if self._known.get(timer_ref) == error.message:
            return
        self._known[timer_ref] = error.message
        self._metrics.problems = len(self._known)
        self._log.error(events.STATE_UNREADABLE, timer_ref=timer_ref, reason=error.message)

    def solved(self, timer_ref: TimerRef) -> None:
        """The entry is readable again, or gone."""
        if self._known and self._known.pop(timer_ref, None) is not None:
            self._metrics.problems = len(self._known)
            self._log.info(events.STATE_READABLE, timer_ref=timer_ref)
