"""Who waits until a timer is due: the heap of this process, or the broker. This is all in which the drivers differ."""

from __future__ import annotations

from typing import Protocol

from timer_service.domain.identity import TimerRef


class Waits(Protocol):
    """What the driver and the services tell whoever waits. None of it takes time or fails."""

    def look_ms(self, due_ms: int) -> int:
        """When the heap is to look at a timer that waits until ``due_ms``; what still waits then is woken by it."""
        ...

    def wrote(self, timer_ref: TimerRef, waited_until_ms: int) -> None:
        """A write of our own is stored, and the driver knows it. ``waited_until_ms``: until when it waited before it,
        0 when it did not.
        """
        ...

    def came_early(self, timer_ref: TimerRef) -> None:
        """A wake has come before its time by our clock, and is gone."""
        ...


class HeapWaits:
    """The heap waits, and fires at the due time."""

    def look_ms(self, due_ms: int) -> int:
        return due_ms

    def wrote(self, timer_ref: TimerRef, waited_until_ms: int) -> None: ...

    def came_early(self, timer_ref: TimerRef) -> None: ...
