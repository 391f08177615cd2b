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
        self._on_error = on_error
        self._lanes: dict[TimerRef, deque[Work]] = {}
        self._idle: Callable[[], None] | None = None

    def __len__(self) -> int:
        """How many timers have work under way."""
        return len(self._lanes)

    def run(self, key: TimerRef, work: Work) -> None:
        """Start ``work`` now, or after what is under way for ``key``."""
        lane = self._lanes.get(key)
        if lane is not None:
            lane.append(work)
            return
        self._lanes[key] = deque()
        self._start(key, work)

    def on_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when nothing is under way any more; at once when that is so."""
        if self._lanes:
            self._idle = callback
        else:
            callback()

    def _start(self, key: TimerRef, work: Work) -> None:
        """A loop, not a recursion: pieces that end without waiting must not deepen the stack."""
        state = _Turn()
        current: Work | None = work
        while current is not None:
            state.ended = False
            state.inline = True
            start_fiber(current(), lambda error: self._ended(key, state, error))
            state.inline = False
            if not state.ended:
                return
            current = self._next(key)

    def _ended(self, key: TimerRef, turn: _Turn, error: BaseException | None) -> None:
        if error is not None:
            self._on_error(key, error)
        turn.ended = True
        if not turn.inline:
            following = self._next(key)
            if following is not None:
                self._start(key, following)

    def _next(self, key: TimerRef) -> Work | None:
        lane = self._lanes[key]
        if lane:
            return lane.popleft()
        del self._lanes[key]
        if not self._lanes and self._idle is not None:
            callback, self._idle = self._idle, None
            callback()
        return None


class _Turn:
    """Whether the piece at hand has ended, and whether its starter is still on the stack to see that."""

    __slots__ = ("ended", "inline")

    def __init__(self) -> None:
        self.ended = False
        self.inline = False
