"""Clocks: the only place that reads the time.

A clock answers ``now_ms()`` in epoch milliseconds and never goes back while the process lives.

All clocks here may be read and moved from any thread. Listeners run in the thread that moves the clock, after the move,
in the order in which they came; all of them, also when one raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

MAX_OFFSET_MS = 7_258_118_400_000  # the clock never shows more than the year 2200 plus today


class Clock(Protocol):
    """Epoch milliseconds, never going back."""

    def now_ms(self) -> int: ...


@runtime_checkable
class ShiftingClock(Protocol):
    """A clock that jumps, and tells: who waits on it has to look at it anew then."""

    def now_ms(self) -> int: ...

    def on_shift(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every jump; what comes back ends that, and does nothing when called again."""
        ...


class SystemClock:
    """The wall clock, made steady: it follows steps forward, and runs on at its own pace over steps back.

    A suspended machine counts as a step forward, so deadlines that passed meanwhile are due at once. It tells nobody
    of a step: who waits on it has to look at it now and then.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wall`` and ``monotonic`` give seconds; others than the machine's own are for tests."""
        self._wall = wall
        self._monotonic = monotonic
        self._lock = threading.RLock()  # a signal handler may ask while its thread is asking
        self._anchor_wall = wall()
        self._anchor_monotonic = monotonic()

    def now_ms(self) -> int:
        """Epoch milliseconds, rounded down; never less than an earlier answer, in whichever thread."""
        with self._lock:  # two threads at a step of the wall clock could mix up their anchors, and go back
            wall, monotonic = self._wall(), self._monotonic()
            steady = self._anchor_wall + (monotonic - self._anchor_monotonic)
            if wall > steady:
                self._anchor_wall, self._anchor_monotonic = wall, monotonic
                steady = wall
            return int(steady * 1000)


class OffsetClock:
    """A base clock plus an offset that only grows; ``on_shift`` callbacks run after each shift.

    They also run after each jump of a base that tells of its own. The base is a ``SystemClock`` when none is given.
    """

    def __init__(self, base: Clock | None = None) -> None:
        self._base = base = SystemClock() if base is None else base
        self._lock = threading.Lock()
        self._listeners = _Listeners()
        self.offset_ms = 0
        """The total of all shifts, in milliseconds. Only ``shift`` changes it."""
        if isinstance(base, ShiftingClock):
            base.on_shift(self._listeners.tell)

    def now_ms(self) -> int:
        """The time of the base plus the offset."""
        return self._base.now_ms() + self.offset_ms

    def shift(self, by_ms: int) -> int:
        """Move forward by ``by_ms`` and return the total offset.

        ValueError, with nothing changed, when it is negative or the total would exceed ``MAX_OFFSET_MS``, TypeError
        unless it is an int. When listeners raise, the clock has moved and all have heard: an ExceptionGroup of what
        they raised.
        """
        _check_ms(by_ms)
        if by_ms < 0:
            raise ValueError("time never goes back: the offset must not be negative")
        with self._lock:
            if self.offset_ms + by_ms > MAX_OFFSET_MS:
                raise ValueError(f"the total offset must not exceed {MAX_OFFSET_MS} ms")
            self.offset_ms += by_ms
            total_ms = self.offset_ms
        self._listeners.tell()
        return total_ms

    def on_shift(self, listener: Callable[[], None]) -> Callable[[], None]:
        """``listener`` is called after every shift, until what this returns is called."""
        return self._listeners.add(listener)


class ManualClock:
    """A clock that stands until it is told otherwise; for tests."""

    def __init__(self, now_ms: int = 0) -> None:
        _check_ms(now_ms)
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._listeners = _Listeners()

    def now_ms(self) -> int:
        """What it was set to, plus all advances."""
        return self._now_ms

    def advance(self, by_ms: int) -> None:
        """Let ``by_ms`` pass, 0 included.

        ValueError, with nothing changed, when it is negative, TypeError unless it is an int. When listeners raise, the
        clock has moved and all have heard: an ExceptionGroup of what they raised.
        """
        _check_ms(by_ms)
        if by_ms < 0:
            raise ValueError("time never goes back")
        with self._lock:
            self._now_ms += by_ms
        self._listeners.tell()

    def set(self, now_ms: int) -> None:
        """Let time pass until it is ``now_ms``; otherwise as ``advance``."""
        _check_ms(now_ms)
        with self._lock:
            if now_ms < self._now_ms:
                raise ValueError("time never goes back")
            self._now_ms = now_ms
        self._listeners.tell()

    def on_shift(self, listener: Callable[[], None]) -> Callable[[], None]:
        """``listener`` is called after every advance, until what this returns is called."""
        return self._listeners.add(listener)


def _check_ms(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):  # NaN passes every comparison that would refuse it
        raise TypeError(f"milliseconds are an int, not {type(value).__name__}")


class _Listeners:
    """Who is to hear of a jump. One that came twice hears twice."""

    def __init__(self) -> None:
        self._calls: dict[object, Callable[[], None]] = {}

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        token = object()
        self._calls[token] = listener

        def remove() -> None:
            self._calls.pop(token, None)

        return remove

    def tell(self) -> None:
        """Call all that are there now. Raises an ExceptionGroup of what they raised, after the last one."""
        errors: list[Exception] = []
        for listener in list(self._calls.values()):
            try:
                listener()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("the clock has moved, but listeners failed", errors)
