"""Keyed lanes: work for one timer runs one at a time, in arrival order; different timers do not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from timer_service.domain.identity import TimerRef
from timer_service.fibers import start_fiber

Work = Callable[[], Coroutine[Any, Any, None]]
OnError = Callable[[TimerRef, BaseException], None]


class Lanes:
    """Runs each piece of work as a fiber. A piece that raises is reported to ``on_error`` and its lane goes on."""

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self._lanes: dict[TimerRef, _Lane] = {}
        self._idle: Callable[[], None] | None = None

    def __len__(self) -> int:
        """How many timers have work under way."""
        return len(self._lanes)

    def run(self, key: TimerRef, work: Work) -> None:
        """Start ``work`` now, or after what is under way for ``key``."""
        lane = self._lanes.get(key)
        if lane is not None:
            lane.waiting.append(work)
            return
        lane = self._lanes[key] = _Lane(self, key)
        lane.run(work)

    def on_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when nothing is under way any more; at once when that is so."""
        if self._lanes:
            self._idle = callback
        else:
            callback()

    def close(self, key: TimerRef) -> None:
        """A lane has come to its end."""
        del self._lanes[key]
        if not self._lanes and self._idle is not None:
            callback, self._idle = self._idle, None
            callback()


class _Lane:
    """The work of one timer. It loops over pieces that end without waiting: they must not deepen the stack."""

    __slots__ = ("_ended", "_key", "_lanes", "_starting", "waiting")

    def __init__(self, lanes: Lanes, key: TimerRef) -> None:
        self._lanes = lanes
        self._key = key
        self._starting = False
        self._ended = False
        self.waiting: deque[Work] = deque()

    def run(self, work: Work) -> None:
        while True:
            self._starting, self._ended = True, False
            start_fiber(work(), self._on_done)
            self._starting = False
            if not self._ended:
                return  # it waits for something; ``_on_done`` goes on with the lane
            if not self.waiting:
                self._lanes.close(self._key)
                return
            work = self.waiting.popleft()

    def _on_done(self, error: BaseException | None) -> None:
        if error is not None:
            self._lanes.on_error(self._key, error)
        self._ended = True
        if self._starting:
            return
        if self.waiting:
            self.run(self.waiting.popleft())
        else:
            self._lanes.close(self._key)
