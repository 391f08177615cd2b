"""Clocks: the only place that reads the time.

A clock answers ``now_ms()`` in epoch milliseconds and never goes back while the process lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

MAX_OFFSET_MS = 7_258_118_400_000  # the clock never shows more than the year 2200 plus today


class Clock(Protocol):
    """Epoch milliseconds, never going back."""

    def now_ms(self) -> int: ...


class SystemClock:
    """The wall clock, made steady: it follows steps forward, and runs on at its own pace over steps back.

    A suspended machine counts as a step forward, so deadlines that passed meanwhile are due at once.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._anchor_wall = wall()
        self._anchor_monotonic = monotonic()

    def now_ms(self) -> int:
        wall, monotonic = self._wall(), self._monotonic()
        steady = self._anchor_wall + (monotonic - self._anchor_monotonic)
        if wall > steady:
            self._anchor_wall, self._anchor_monotonic = wall, monotonic
            steady = wall
        return int(steady * 1000)


class OffsetClock:
    """A base clock plus an offset that only grows; ``on_shift`` callbacks run after each shift."""

    def __init__(self, base: Clock) -> None:
        self._base = base
        self._listeners: list[Callable[[], None]] = []
        self.offset_ms = 0

    def now_ms(self) -> int:
        return self._base.now_ms() + self.offset_ms

    def shift(self, by_ms: int) -> int:
        """Move forward by ``by_ms`` and return the total offset. Raises ValueError for what is absurd."""
        if by_ms < 0:
            raise ValueError("time never goes back: the offset must not be negative")
        if self.offset_ms + by_ms > MAX_OFFSET_MS:
            raise ValueError(f"the total offset must not exceed {MAX_OFFSET_MS} ms")
        self.offset_ms += by_ms
        for listener in self._listeners:
            listener()
        return self.offset_ms

    def on_shift(self, listener: Callable[[], None]) -> None:
        """``listener`` is called after every shift."""
        self._listeners.append(listener)


class ManualClock:
    """A clock that stands until it is told otherwise; for tests."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms
        self._listeners: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, by_ms: int) -> None:
        """Let ``by_ms`` pass. Raises ValueError when negative."""
        if by_ms < 0:
            raise ValueError("time never goes back")
        self._now_ms += by_ms
        for listener in self._listeners:
            listener()

    def on_shift(self, listener: Callable[[], None]) -> None:
        """``listener`` is called after every advance."""
        self._listeners.append(listener)
