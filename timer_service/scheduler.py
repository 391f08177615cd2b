"""The in-process scheduler: the deterministic core of waiting, without a broker and without memory of a crash.

``IndexedHeap`` orders, ``TimerQueue`` waits on an event loop, ``DelayedScheduler`` runs callbacks from threads or when
its caller says so. Nothing here reads the time by itself: a clock, or the caller, says what time it is, so that tests
pass a ``ManualClock``. docs/scheduler.md shows each of them at work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from inspect import isawaitable
from typing import Any, Generic, Protocol, TypeVar

from timer_service.clock import Clock, ShiftingClock
from timer_service.domain.heap import Entry, IndexedHeap
from timer_service.errors import AlreadyRunning, SchedulerFull

__all__ = ["MAX_SLEEP_S", "AlreadyRunning", "DelayedScheduler", "Entry", "IndexedHeap", "SchedulerFull", "TimerQueue"]

MAX_SLEEP_S = 5.0
"""Nobody sleeps longer without a look at the clock. A machine that was suspended, and a wall clock that was set, show
only there: what became due meanwhile fires within this time."""

_SHORTEST_S = 0.001
_NAMED = 10


class _Orderable(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K")
Id = TypeVar("Id", bound=_Orderable)


class TimerQueue(Generic[K]):
    """Keys that become due, fired in order by a coroutine.

    Times are epoch milliseconds of ``clock``. Keys are hashable; each is armed at most once. They fire by time, those
    of equal times in the order in which they were scheduled; keys are never compared with ``<``.

    For one event loop: call everything in its thread (``loop.call_soon_threadsafe(queue.schedule, …)`` from another);
    only ``wake`` may be called from any. Without ``run`` nothing fires, but everything else works.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: IndexedHeap[K] = IndexedHeap()
        self._armed: dict[K, Entry[K]] = {}
        self._seq = 0
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def __len__(self) -> int:
        """How many keys are armed."""
        return len(self._heap)

    def schedule(self, key: K, at_ms: int) -> None:
        """Arm ``key`` for ``at_ms``, or move it there if it is armed; what is past is due at once. O(log n).

        Scheduling it again counts as scheduled now: among equal times it comes last. A key that is being fired, or
        was taken out to be, is armed anew and fires again. TypeError, with nothing changed, unless ``at_ms`` is an int.
        """
        _check_time(at_ms)
        self._seq += 1
        entry = self._armed.get(key)
        if entry is None:
            entry = self._armed[key] = Entry(key, at_ms, self._seq)
            self._heap.push(entry)
        else:
            self._heap.update(entry, at_ms, self._seq)
        if entry.index == 0:
            self._changed.set()

    def cancel(self, key: K) -> bool:
        """Disarm ``key``: True if it was armed. False otherwise, also once it was taken out to be fired. O(log n)."""
        entry = self._armed.pop(key, None)
        if entry is None:
            return False
        self._heap.remove(entry)
        return True

    def wake(self) -> None:
        """Look at the clock anew, since it jumped. From any thread; does nothing while nobody runs the queue.

        A clock with ``on_shift`` (``OffsetClock``, ``ManualClock``) does so by itself.
        """
        loop = self._loop
        if threading.get_ident() == self._thread:
            self._changed.set()
        elif loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._changed.set)

    async def run(self, fire: Callable[[K], object]) -> None:
        """Fire what is due until cancelled: ``fire(key)``, awaited when it returns an awaitable, one after the other.

        All keys with a time not after now are taken out before the first of them is fired, so what ``fire`` schedules
        waits for the next look at the clock, and cancelling a key that was taken out comes too late. The loop gets
        its turn between two looks.

        An Exception of ``fire`` ends ``run`` and comes out of it. Its key is gone; those that were taken out and not
        fired are armed as before, unless they have been armed anew. Cancelled while ``fire`` awaits, the interrupted
        key is armed again as well: its work was not finished. So nothing is lost, and ``run`` may be called again.

        AlreadyRunning, with nothing changed, while another ``run`` of this queue is under way.
        """
        if self._loop is not None and not self._loop.is_closed():  # a loop closed over its run left it unfinished
            raise AlreadyRunning("this queue is being run already")
        loop = asyncio.get_running_loop()
        forget = self._clock.on_shift(self.wake) if isinstance(self._clock, ShiftingClock) else None
        self._loop, self._thread = loop, threading.get_ident()
        self._changed = asyncio.Event()  # an Event belongs to the loop that first waited for it
        try:
            await self._drive(loop, fire)
        finally:
            if self._loop is loop:
                self._loop, self._thread = None, 0
            if forget is not None:
                forget()

    async def _drive(self, loop: asyncio.AbstractEventLoop, fire: Callable[[K], object]) -> None:
        pace = _Pace(units_per_s=1_000)
        while True:
            await self._fire(self._take_due(), fire)
            await self._sleep(loop, pace)

    def _take_due(self) -> list[Entry[K]]:
        due: list[Entry[K]] = []
        now_ms = self._clock.now_ms()
        while (head := self._heap.peek()) is not None and head.at <= now_ms:
            self._heap.pop()
            del self._armed[head.key]
            due.append(head)
        return due

    async def _fire(self, due: Sequence[Entry[K]], fire: Callable[[K], object]) -> None:
        for place, entry in enumerate(due):
            try:
                answer = fire(entry.key)
                if isawaitable(answer):
                    await answer
            except Exception:
                self._put_back(due[place + 1 :])
                raise
            except BaseException:  # interrupted, not failed
                self._put_back(due[place:])
                raise

    def _put_back(self, entries: Iterable[Entry[K]]) -> None:
        """Arm again as before what was taken out, each at its old place. What was armed anew since stays so."""
        for entry in entries:
            if self._armed.setdefault(entry.key, entry) is entry:
                self._heap.push(entry)

    async def _sleep(self, loop: asyncio.AbstractEventLoop, pace: _Pace) -> None:
        """Until the first key may be due, something changed, or ``MAX_SLEEP_S`` have passed."""
        self._changed.clear()  # nothing is awaited from here until it is waited for: no change can fall in between
        head, now_ms = self._heap.peek(), self._clock.now_ms()
        if head is not None and head.at <= now_ms:
            await asyncio.sleep(0)
            return
        until = loop.time() + pace.sleep_s(now_ms, None if head is None else head.at)
        alarm = loop.call_at(until, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()
        pace.slept(now_ms, through=loop.time() >= until)


class _Pending(Entry[Id]):
    """A callback with its due time. ``seq`` is not used: what is claimed is ordered by id."""

    __slots__ = ("callback",)

    def __init__(self, key: Id, due: int, callback: Callable[[], object]) -> None:
        super().__init__(key, due, 0)
        self.callback = callback


class DelayedScheduler(Generic[Id]):
    """At most ``capacity`` callbacks under ids, run by whoever calls ``run_due``, or by one thread in ``run``.

    Due times are plain integers in a unit of the caller's choice (in ``run``: nanoseconds of its clock). Ids are
    hashable and can be compared with each other; callbacks, which get no argument, are never compared.

    From any thread, also from callbacks: no callback and no clock is called under the lock. ValueError when
    ``capacity`` is negative, TypeError unless it is an int.
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int:
            raise TypeError(f"a capacity is an int, not {type(capacity).__name__}")
        if capacity < 0:
            raise ValueError("the capacity must not be negative")
        self._capacity = capacity
        self._heap: IndexedHeap[Id] = IndexedHeap()
        self._pending: dict[Id, _Pending[Id]] = {}
        self._lock = threading.RLock()  # stop may come from a signal handler, while its thread holds the lock
        self._changed = threading.Condition(self._lock)
        self._running = self._stopping = self._woken = False

    def __len__(self) -> int:
        """How many ids are pending."""
        return len(self._pending)

    def schedule(self, id: Id, due: int, callback: Callable[[], object]) -> None:
        """Run ``callback`` once when ``due`` has come. A pending ``id`` gets both anew, in one step. O(log n).

        An id whose callback is claimed is not pending any more: it is scheduled beside. Raises, with nothing changed,
        SchedulerFull for a new id at capacity, TypeError unless ``due`` is an int and ``callback`` can be called.
        """
        _check_time(due)
        if not callable(callback):
            raise TypeError(f"a callback is called without arguments; a {type(callback).__name__} can't be")
        with self._lock:
            pending = self._pending.get(id)
            if pending is not None:
                pending.callback = callback
                self._heap.update(pending, due, pending.seq)
            elif len(self._pending) < self._capacity:
                pending = self._pending[id] = _Pending(id, due, callback)
                self._heap.push(pending)
            else:
                raise SchedulerFull(f"{self._capacity} ids are pending, there is no room for another")
            if pending.index == 0:
                self._changed.notify()

    def cancel(self, id: Id) -> bool:
        """Forget ``id``: True if it was pending. False otherwise, also once its callback is claimed. O(log n)."""
        with self._lock:
            pending = self._pending.pop(id, None)
            if pending is None:
                return False
            self._heap.remove(pending)
            return True

    def next(self) -> int | None:
        """Return the earliest due time, None when nothing is pending. O(1)."""
        with self._lock:
            head = self._heap.peek()
            return None if head is None else head.at

    def run_due(self, now: int) -> int:
        """Run everything that is due at ``now`` in the order of (due, id), and return how many callbacks that were.

        All of it is claimed first, under the lock, and runs outside it, in this thread: each callback runs once, in
        however many threads this is called. What a callback schedules waits for the next call, and cancelling
        what is claimed comes too late.

        The first exception of a callback comes out as it is. The rest of what was claimed is dropped: it does not
        run, now or later; a note at the exception names it. To go on in spite of failures, catch them in the callback.
        TypeError, with nothing claimed, when ids of equal due times can't be compared.
        """
        claimed = self._claim(now)
        for place, pending in enumerate(claimed):
            try:
                pending.callback()
            except BaseException as error:
                _note_dropped(error, claimed[place + 1 :])
                raise
        return len(claimed)

    def _claim(self, now: int) -> list[_Pending[Id]]:
        claimed: list[_Pending[Id]] = []
        with self._lock:
            while (head := self._heap.peek()) is not None and head.at <= now:
                self._heap.pop()
                claimed.append(self._pending[head.key])
            try:
                claimed.sort(key=lambda pending: (pending.at, pending.key))
            except BaseException:
                for pending in claimed:
                    self._heap.push(pending)
                raise
            for pending in claimed:
                del self._pending[pending.key]
        return claimed

    def run(self, clock: Callable[[], int]) -> None:
        """Run what is due, as ``run_due`` does, in this thread until ``stop``. ``clock()`` gives nanoseconds.

        Waits for the earliest due time, and looks at once when an earlier one is scheduled or ``wake`` is called. A
        clock that is moved by hand must be followed by ``wake``; without it the move is noticed within
        ``MAX_SLEEP_S``, as are a suspended machine and a wall clock that was set.

        An exception of a callback, or of the clock, comes out and ends it; it may be called again. AlreadyRunning,
        with nothing changed, while another ``run`` of this scheduler is under way, in whichever thread.
        """
        with self._lock:
            if self._running:
                raise AlreadyRunning("this scheduler is being run already")
            self._running = True
        pace = _Pace(units_per_s=1_000_000_000)
        try:
            while not self._stopping:
                self.run_due(clock())
                self._wait(clock, pace)
        finally:
            with self._lock:
                self._running = self._stopping = False

    def _wait(self, clock: Callable[[], int], pace: _Pace) -> None:
        self._woken = False  # before the clock is read: a move after that leaves its mark here
        now = clock()
        with self._lock:
            head = self._heap.peek()
            if self._stopping or self._woken or (head is not None and head.at <= now):
                return
            told = self._changed.wait(pace.sleep_s(now, None if head is None else head.at))
        pace.slept(now, through=not told)

    def wake(self) -> None:
        """Make ``run`` look at its clock anew, since it jumped. Call it after the jump."""
        with self._lock:
            self._woken = True
            self._changed.notify()

    def stop(self) -> None:
        """End ``run`` when what it has claimed is done; at once while it waits. What is pending stays so.

        From any thread, a callback or a signal handler, and more than once. While nobody is in ``run`` it counts for
        the next one, which returns without running anything: a stop that overtakes the thread it is meant for
        is not lost.
        """
        with self._lock:
            self._stopping = True
            self._changed.notify()


class _Pace:
    """How long to sleep when nobody tells how fast a clock runs: never more than ``MAX_SLEEP_S``.

    A clock that stood still all through a sleep is moved by hand: it is looked at half as often each time.
    """

    def __init__(self, units_per_s: int) -> None:
        self._units_per_s = units_per_s
        self._slept_at: int | None = None
        self._pause_s = 0.0

    def sleep_s(self, now: int, until: int | None) -> float:
        """Seconds from ``now`` to ``until``, as far as it goes."""
        stands = self._slept_at == now
        self._pause_s = max(2 * self._pause_s, _SHORTEST_S) if stands else 0.0
        if until is None or until - now >= MAX_SLEEP_S * self._units_per_s:
            return MAX_SLEEP_S
        return min(max((until - now) / self._units_per_s, self._pause_s), MAX_SLEEP_S)

    def slept(self, now: int, *, through: bool) -> None:
        """A sleep that began at ``now`` is over; ``through`` if nothing cut it short."""
        self._slept_at = now if through else None


def _check_time(at: int) -> None:
    if type(at) is not int:  # True, 1.5 and NaN would be taken by the heap, the last of them to its ruin
        raise TypeError(f"a time is an int, not {type(at).__name__}")


def _note_dropped(error: BaseException, dropped: Sequence[_Pending[Any]]) -> None:
    if dropped:
        named = ", ".join(repr(pending.key) for pending in dropped[:_NAMED])
        more = ", …" if len(dropped) > _NAMED else ""
        error.add_note(f"{len(dropped)} callbacks that were due with it did not run: {named}{more}")
