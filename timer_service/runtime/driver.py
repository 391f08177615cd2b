"""The driver: one heap for everything that is due later, and the loop that acts when it is.

Waiting timers are due at their due time, elapsed ones when their resume is to be looked after, ended ones
when their clean-up should long be over. The heap is fed from the state (by the feed, and by the acks of our own
writes); it is never trusted over the state: what it fires is checked there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.heap import Entry, IndexedHeap
from timer_service.domain.identity import TimerRef
from timer_service.domain.model import Phase, Resumed
from timer_service.domain.summary import Summary
from timer_service.errors import BrokerError, StorageFull
from timer_service.fibers import start_fiber
from timer_service.metrics import Metrics
from timer_service.ports import Wakes
from timer_service.runtime.waits import HeapWaits, Waits

MAX_UNANSWERED = 1024
"""Wakes on their way at most: beyond that the broker's queue would only make a burst later, not shorter."""
AGAIN_MS = 2_000
AFTER_FAILURE_MS = 1_000
MAX_AGAIN_MS = 60_000
MAX_SLEEP_S = 1.0
"""Nobody tells of a machine that was suspended or of a wall clock that was set: the clock is looked at this often."""
_FIRED_A_TURN = 128
_HURRIED = 2_000


def again_after_ms(tries: int) -> int:
    """How long to wait after so many tries: 2 s, doubling to a minute."""
    return min(AGAIN_MS << min(tries, 16), MAX_AGAIN_MS)


class Armed(Entry[TimerRef]):
    """What the heap knows of a timer; ``tries`` counts what was done for it in its present phase."""

    __slots__ = (
        "generation",
        "phase",
        "resume_seq",
        "resumed",
        "revision",
        "schedule",
        "since_ms",
        "snapshot_seq",
        "tries",
        "unanswered",
        "unsent",
    )

    def __init__(self, key: TimerRef, revision: int, summary: Summary, at: int, seq: int) -> None:
        super().__init__(key, at, seq)
        self.take(revision, summary)
        self.tries = 0
        self.unanswered = False
        self.resumed: Resumed | None = None
        self.resume_seq: int | None = None
        self.schedule: tuple[int, int] | None = None
        """Of which generation this process put a schedule, and its place; only with the native driver."""
        self.unsent = False
        """The first resume of this occurrence has failed, or its reply was lost."""

    def take(self, revision: int, summary: Summary) -> None:
        """Take over what the state says at ``revision``."""
        self.revision = revision
        self.phase = summary.phase
        self.generation = summary.generation
        self.since_ms = summary.at_ms
        self.snapshot_seq = summary.snapshot_seq


class Driver:
    """Arms, moves, disarms and fires. ``look_after`` is called for what is not waiting and has become due."""

    def __init__(
        self,
        clock: Clock,
        wakes: Wakes,
        metrics: Metrics,
        log: Any,
        *,
        resume_timeout_ms: int,
    ) -> None:
        self._clock = clock
        self._wakes = wakes
        self._log = log
        self._resume_timeout_ms = resume_timeout_ms
        self._heap: IndexedHeap[TimerRef] = IndexedHeap()
        metrics.armed = self._heap.__len__
        self._armed: dict[TimerRef, Armed] = {}
        self._seq = 0
        self._unanswered = 0
        self._asked: deque[tuple[int, Armed]] = deque()
        self._short_of_room: dict[TimerRef, None] = {}
        self._paused_until_ms = 0
        self._changed = asyncio.Event()
        self._next_at: int | None = None
        self.look_after: Callable[[Armed], None] = lambda _: None
        self._holds_lease = True
        self.lease_lasts: Callable[[], bool] = lambda: True
        """Asked at each turn: a lease also runs out in a process that is frozen."""
        self.waits: Waits = HeapWaits()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def holds_lease(self) -> bool:
        """Whether this process is to fire; setting it makes the driver look at once."""
        return self._holds_lease and self.lease_lasts()

    @holds_lease.setter
    def holds_lease(self, holds: bool) -> None:
        self._holds_lease = holds
        self._changed.set()

    def get(self, timer_ref: TimerRef) -> Armed | None:
        return self._armed.get(timer_ref)

    def armed(self) -> list[Armed]:
        """All entries, in no order."""
        return list(self._armed.values())

    def revisions(self) -> dict[TimerRef, int]:
        """What is armed, and by which revision of the state."""
        return {timer_ref: armed.revision for timer_ref, armed in self._armed.items()}

    def forget_revisions(self) -> None:
        """The state stream is another one: what is armed gives way to whatever is read now."""
        for armed in self._armed.values():
            armed.revision = 0

    # -- arming ---------------------------------------------------------------------------------------------

    def observe(self, timer_ref: TimerRef, revision: int, summary: Summary) -> Armed:
        """The state of ``timer_ref`` at ``revision``: arm or move it. An older revision than known changes nothing."""
        armed = self._armed.get(timer_ref)
        if armed is not None and armed.revision >= revision:
            return armed
        self._seq += 1
        at = self._first_look(summary)
        if armed is None:
            armed = self._armed[timer_ref] = Armed(timer_ref, revision, summary, at, self._seq)
            self._heap.push(armed)
        else:
            self._update(armed, revision, summary, at)
        if self._next_at is None or at < self._next_at:
            self._changed.set()
        return armed

    def _update(self, armed: Armed, revision: int, summary: Summary, at: int) -> None:
        self._answered(armed)
        if (armed.generation, armed.phase) != (summary.generation, summary.phase):
            armed.resumed, armed.resume_seq, armed.tries, armed.unsent = None, None, 0, False
            self._heap.update(armed, at, self._seq)
        elif summary.phase is Phase.WAITING:
            self._heap.update(armed, at, self._seq)
        armed.take(revision, summary)

    def disarm(self, timer_ref: TimerRef, revision: int) -> None:
        """The entry is gone as of ``revision``. Disarming what is not armed, or is newer, does nothing."""
        armed = self._armed.get(timer_ref)
        if armed is None or armed.revision > revision:
            return
        self._answered(armed)
        self._heap.remove(armed)
        del self._armed[timer_ref]

    def wake(self) -> None:
        """Look at the clock anew (after a shift)."""
        self._changed.set()

    def look_again(self, armed: Armed, at_ms: int) -> None:
        """Come back to ``armed`` at ``at_ms``, if it is still armed."""
        if armed.index >= 0:
            self._heap.update(armed, at_ms, armed.seq)
            self._changed.set()

    def come_back(self, timer_ref: TimerRef) -> None:
        """A step of this timer failed since the broker was not able to: try again soon, however often it was tried."""
        armed = self._armed.get(timer_ref)
        if armed is not None:
            self.look_again(armed, self._clock.now_ms() + AGAIN_MS)

    def wait_for_room(self, timer_ref: TimerRef) -> None:
        """A step of this timer was refused for want of room: come back less and less often, or when ``hurry`` says."""
        armed = self._armed.get(timer_ref)
        if armed is not None:
            self._short_of_room[timer_ref] = None
            self.look_again(armed, self._clock.now_ms() + again_after_ms(armed.tries))

    def hurry(self, most: int = _HURRIED) -> None:
        """There may be room again: come back now to up to ``most`` of those that wait for some, longest first."""
        now_ms = self._clock.now_ms()
        for timer_ref in list(islice(self._short_of_room, most)):
            del self._short_of_room[timer_ref]
            armed = self._armed.get(timer_ref)
            if armed is not None and armed.at > now_ms and not _has_gone_on(armed, now_ms):
                self.look_again(armed, now_ms)

    def _first_look(self, summary: Summary) -> int:
        if summary.phase is Phase.WAITING:
            return self.waits.look_ms(summary.at_ms)
        now_ms = self._clock.now_ms()
        if summary.phase is Phase.ELAPSED:
            return max(now_ms, summary.at_ms + self._resume_timeout_ms)
        return now_ms + AGAIN_MS

    def _answered(self, armed: Armed) -> None:
        if armed.unanswered:
            armed.unanswered = False
            if self._unanswered == MAX_UNANSWERED:
                self._changed.set()
            self._unanswered -= 1

    def _give_back(self, now_ms: int) -> None:
        """Free the places of wakes that nobody answered: they must not keep others waiting."""
        while self._asked and (not self._asked[0][1].unanswered or self._asked[0][0] + AGAIN_MS <= now_ms):
            self._answered(self._asked.popleft()[1])

    # -- firing ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fire what is due, in due order, until cancelled."""
        while True:
            self._changed.clear()
            fired = self._fire_due() if self.holds_lease else 0
            if fired == _FIRED_A_TURN:
                await asyncio.sleep(0)  # acks and commands get their turn
            else:
                await self._sleep()

    async def _sleep(self) -> None:
        head = self._heap.peek()
        self._next_at = None if head is None else head.at
        delay_s = self._delay_s(head)
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        alarm = asyncio.get_running_loop().call_later(delay_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()
            self._next_at = None

    def _delay_s(self, head: Entry[TimerRef] | None) -> float:
        if head is None or not self.holds_lease:
            return MAX_SLEEP_S
        at_ms = head.at
        at_ms = max(at_ms, self._paused_until_ms)
        if self._unanswered >= MAX_UNANSWERED and self._asked:
            at_ms = max(at_ms, self._asked[0][0] + AGAIN_MS)
        return min((at_ms - self._clock.now_ms()) / 1000, MAX_SLEEP_S)

    def _fire_due(self) -> int:
        """Fire up to a turn's worth of what is due; each is armed again before it is fired."""
        now_ms = self._clock.now_ms()
        self._give_back(now_ms)
        if now_ms < self._paused_until_ms:
            return 0
        for fired in range(_FIRED_A_TURN):
            head = self._heap.peek()
            if head is None or head.at > now_ms:
                return fired
            assert isinstance(head, Armed)
            if head.phase is Phase.WAITING and self._unanswered >= MAX_UNANSWERED:
                return fired
            self._fire(head, now_ms)
        return _FIRED_A_TURN

    def _fire(self, armed: Armed, now_ms: int) -> None:
        again_ms = again_after_ms(armed.tries)
        if armed.phase is Phase.ELAPSED:
            again_ms = self._resume_timeout_ms
        armed.tries += 1
        self._heap.update(armed, now_ms + again_ms, armed.seq)
        if armed.phase is Phase.WAITING:
            self._ask_for_answer(armed, now_ms)
            start_fiber(self._publish_wake(armed, now_ms), self._on_wake_error)
        else:
            self.look_after(armed)

    def _ask_for_answer(self, armed: Armed, now_ms: int) -> None:
        if not armed.unanswered:
            armed.unanswered = True
            self._unanswered += 1
        self._asked.append((now_ms, armed))

    async def _publish_wake(self, armed: Armed, now_ms: int) -> None:
        try:
            await self._wakes.publish(armed.key, armed.generation, now_ms, armed.revision)
        except BrokerError as error:
            self._log.warning(events.WAKE_FAILED, timer_ref=armed.key, error=str(error))
            if isinstance(error, StorageFull):  # so it would be with all others
                self._paused_until_ms = self._clock.now_ms() + AFTER_FAILURE_MS
            if armed.phase is Phase.WAITING:
                armed.tries = max(0, armed.tries - 1)  # nothing went out: what follows must not come late for it
                self._answered(armed)
                self.look_again(armed, self._clock.now_ms() + AFTER_FAILURE_MS)

    def _on_wake_error(self, error: BaseException | None) -> None:
        if error is not None:
            self._log.error(events.WORK_FAILED, exc_info=error)


def _has_gone_on(armed: Armed, now_ms: int) -> bool:
    """Whether what was refused has been done since: it waits for another time, or its resume is out."""
    if armed.phase is Phase.WAITING:
        return armed.since_ms > now_ms
    return armed.phase is Phase.ELAPSED and armed.resumed is not None
