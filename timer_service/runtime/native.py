"""The native driver: the broker waits. Each occurrence that waits has a schedule there, which publishes its wake.

Whoever writes a state that waits publishes its schedule; a replacement takes the earlier one's place, an end before its
time drops it. Nothing rests on that: the heap looks at each timer a grace after it was due and wakes what still waits,
and a comparison of all schedules with all that waits (at the start, hourly, when the stream is not what it was) puts
what is missing and drops what has no timer. A schedule too many makes a wake that changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import islice
from typing import Any

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.identity import TimerRef, is_timer_ref
from timer_service.domain.model import Phase
from timer_service.errors import BrokerError, UnreadableState
from timer_service.fibers import start_fiber
from timer_service.metrics import Metrics
from timer_service.ports import Schedule, Schedules, StateStore, Wakes
from timer_service.runtime.driver import Armed, Driver

GRACE_MS = 1_000
"""So long after a timer was due the heap wakes it itself: four times what the broker takes when all is well."""
NEAR_MS = 1_000
"""What is due within this is woken from here, to the millisecond: a schedule takes 250 ms at least."""
FULL_PERCENT, ROOM_AGAIN_PERCENT = 90.0, 80.0
"""The stream of schedules drops its oldest messages when it is full: between these no more are put into it."""
LOOK_S = 2.0
COMPARE_AGAIN_MS = 5_000
"""Comparisons read all schedules (33,000 a second): at most one begins so long after another."""
_BATCH = 256
_TURN = 4_096
_OWED_A_TURN = 2_000
_Known = tuple[int, tuple[int, int] | None]
"""A generation, and the schedule that this process knows of it."""


class NativeWaits:
    """``Waits`` by the broker's schedules. Every replica sees to its own writes; run ``run`` beside the driver."""

    def __init__(
        self,
        clock: Clock,
        driver: Driver,
        schedules: Schedules,
        wakes: Wakes,
        store: StateStore,
        metrics: Metrics,
        log: Any,
        *,
        interval_ms: int,
        offset_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._driver = driver
        self._schedules = schedules
        self._wakes = wakes
        self._store = store
        self._metrics = metrics
        self._log = log
        self._interval_ms = interval_ms
        self._offset_ms = offset_ms
        self._owed: dict[TimerRef, None] = {}
        """Timers whose schedule is to be put or dropped as soon as the broker can."""
        self._created = ""
        self._newest = 0
        self._room = True
        driver.waits = self

    # -- what the others tell -----------------------------------------------------------------------------------

    def look_ms(self, due_ms: int) -> int:
        return due_ms + GRACE_MS

    def wrote(self, timer_ref: TimerRef, waited_until_ms: int) -> None:
        armed = self._waiting(timer_ref)
        far = armed is not None and self._far(armed.since_ms)
        if armed is not None and not far:
            self._wake_soon(timer_ref, armed.generation)
        if far or self._far(waited_until_ms, 0):
            self._start(self._set_right(timer_ref))

    def came_early(self, timer_ref: TimerRef) -> None:
        """The broker's clock is a little before ours."""
        armed = self._waiting(timer_ref)
        if armed is not None and not self._far(armed.since_ms):
            self._wake_soon(timer_ref, armed.generation)

    def _waiting(self, timer_ref: TimerRef) -> Armed | None:
        armed = self._driver.get(timer_ref)
        return armed if armed is not None and armed.phase is Phase.WAITING else None

    def _far(self, due_ms: int, near_ms: int = NEAR_MS) -> bool:
        return due_ms - self._clock.now_ms() > near_ms

    def _start(self, step: Coroutine[Any, Any, object]) -> None:
        start_fiber(step, self._on_error)

    def _on_error(self, error: BaseException | None) -> None:
        if error is not None:
            self._log.error(events.WORK_FAILED, exc_info=error)

    # -- what is due soon ---------------------------------------------------------------------------------------

    def _wake_soon(self, timer_ref: TimerRef, generation: int) -> None:
        """Publish the wake at its due time, from this replica, if it still waits then."""
        armed = self._waiting(timer_ref)
        if armed is None or armed.generation != generation:
            return
        wait_ms = armed.since_ms - self._clock.now_ms()
        if wait_ms > 0:
            asyncio.get_running_loop().call_later(wait_ms / 1000, self._wake_soon, timer_ref, generation)
        else:
            self._start(self._wake(armed))

    async def _wake(self, armed: Armed) -> None:
        try:
            await self._wakes.publish(armed.key, armed.generation, self._clock.now_ms(), armed.revision)
        except BrokerError as error:  # the heap looks at it after the grace
            self._log.warning(events.WAKE_FAILED, timer_ref=armed.key, error=str(error))

    # -- one schedule -------------------------------------------------------------------------------------------

    async def _set_right(self, timer_ref: TimerRef) -> bool:
        """Put the schedule of what waits, drop that of what does not; owed, and False, when the broker can't."""
        try:
            armed = self._waiting(timer_ref)
            if armed is None or not self._far(armed.since_ms):
                await self._drop_at_broker(timer_ref)
            elif self._room:
                await self._put(armed)
        except BrokerError as error:
            self._owe(timer_ref, error)
            return False
        return True

    def _owe(self, timer_ref: TimerRef, error: BrokerError) -> None:
        self._owed[timer_ref] = None
        self._log.warning(events.SCHEDULE_FAILED, timer_ref=timer_ref, error=str(error))

    async def _put(self, armed: Armed) -> None:
        generation, due_ms = armed.generation, armed.since_ms
        seq = await self._schedules.put(armed.key, generation, due_ms - self._offset_ms(), armed.revision)
        self._newest = max(self._newest, seq)
        now = self._waiting(armed.key)
        if now is None and self._far(due_ms, 0):
            await self._schedules.drop(seq)  # it ended while this was on its way
        elif now is not None and now.generation == generation:
            now.schedule = (generation, seq)

    async def _drop_at_broker(self, timer_ref: TimerRef) -> None:
        """What this process put itself it knows by its place; else it looks what stands, and who still needs it."""
        armed = self._driver.get(timer_ref)
        if armed is not None and armed.schedule is not None:
            (generation, seq), armed.schedule = armed.schedule, None
            if (armed.phase is not Phase.WAITING or generation < armed.generation) and await self._schedules.drop(seq):
                return
        standing = await self._schedules.find(timer_ref)
        if standing is not None and not await self._waits_for(timer_ref, standing):
            await self._schedules.drop(standing.seq)

    async def _waits_for(self, timer_ref: TimerRef, schedule: Schedule) -> bool:
        """Whether a timer waits for this schedule: by the state, which may know more than the heap."""
        if not is_timer_ref(timer_ref):
            return False
        armed = self._waiting(timer_ref)
        if armed is not None and armed.generation == schedule.generation:
            return True
        try:
            timer = (await self._store.get(timer_ref)).timer
        except UnreadableState:
            return True  # to be left as it is, with all that belongs to it
        return timer is not None and timer.phase is Phase.WAITING and timer.generation == schedule.generation

    # -- all schedules ------------------------------------------------------------------------------------------

    async def run(self, ready: asyncio.Event) -> None:
        """Compare when the heap is ``ready``, then watch the stream and settle what is owed, until cancelled."""
        await ready.wait()
        doubt, compared_at_ms, again_at_ms = True, 0, 0
        while True:
            doubt = await self._look() or doubt
            doubt = doubt or self._clock.now_ms() - compared_at_ms >= self._interval_ms
            if doubt and self._clock.now_ms() >= again_at_ms:
                doubt, compared_at_ms = not await self._compare(), self._clock.now_ms()
                again_at_ms = compared_at_ms + COMPARE_AGAIN_MS
            await self._settle_owed()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> bool:
        """Whether the stream gives a reason to compare: it is another one, older than it was, or has room again."""
        try:
            stream = await self._schedules.look()
        except BrokerError:
            return False
        room_again = self._note_room(stream.fill.percent)
        other = bool(self._created) and stream.created != self._created
        went_back = stream.last_seq < self._newest
        self._created = stream.created
        if other or went_back:
            self._newest = stream.last_seq
        return other or went_back or room_again

    def _note_room(self, percent: float) -> bool:
        """Take a reading; True when there is room again."""
        had, self._room = self._room, percent < (FULL_PERCENT if self._room else ROOM_AGAIN_PERCENT)
        if had and not self._room:
            self._log.warning(events.SCHEDULES_PAUSED, percent=round(percent, 1))
        return self._room and not had

    async def _compare(self) -> bool:
        """Put what is missing, drop what has no timer; False when the broker could not be read."""
        wanted = {
            armed.key: (armed.generation, armed.schedule) for armed in self._driver.armed() if self._due_far(armed)
        }
        try:
            standing = await self._schedules.standing()
            missing = await self._missing(wanted, standing)
            put = await self._each(self._put_missing, missing) if self._room else 0
            for timer_ref in wanted:
                standing.pop(timer_ref, None)
            dropped = await self._each(partial(self._drop_stray, standing), list(standing))
        except BrokerError as error:
            self._log.warning(events.WORK_FAILED, step="schedules", error=str(error))
            return False
        self._log.info(events.SCHEDULES_COMPARED, armed=len(wanted), put=put, dropped=dropped)
        return True

    def _due_far(self, armed: Armed) -> bool:
        return armed.phase is Phase.WAITING and self._far(armed.since_ms)

    async def _missing(self, wanted: dict[TimerRef, _Known], standing: dict[str, Schedule]) -> list[TimerRef]:
        missing = []
        for number, (timer_ref, before) in enumerate(wanted.items()):
            if number % _TURN == 0:
                await asyncio.sleep(0)  # wakes and commands get their turn
            if self._lacks(timer_ref, before, standing):
                missing.append(timer_ref)
        return missing

    def _lacks(self, timer_ref: TimerRef, before: _Known, standing: dict[str, Schedule]) -> bool:
        armed, schedule = self._waiting(timer_ref), standing.get(timer_ref)
        if armed is None or (armed.generation, armed.schedule) != before:
            return False  # it has gone on, or was put, while all were read
        if schedule is None or (schedule.generation, schedule.at_ms) != (before[0], armed.since_ms - self._offset_ms()):
            return True
        armed.schedule = (schedule.generation, schedule.seq)
        return False

    async def _each(self, step: Callable[[TimerRef], Awaitable[bool]], timers: Sequence[str]) -> int:
        """How many of ``timers`` the step did something for; so many at a time."""
        done = 0
        for first in range(0, len(timers), _BATCH):
            done += sum(await asyncio.gather(*(step(TimerRef(one)) for one in timers[first : first + _BATCH])))
        return done

    async def _put_missing(self, timer_ref: TimerRef) -> bool:
        armed = self._waiting(timer_ref)
        if armed is None or not self._due_far(armed):
            return False
        await self._put(armed)
        self._metrics.repair("schedule_missing")
        return True

    async def _drop_stray(self, standing: dict[str, Schedule], timer_ref: TimerRef) -> bool:
        schedule = standing[timer_ref]
        if await self._waits_for(timer_ref, schedule) or not await self._schedules.drop(schedule.seq):
            return False
        self._metrics.repair("schedule_without_timer")
        return True

    async def _settle_owed(self) -> None:
        """Up to the first for which the broker can't: so it would be with the others."""
        owed = list(islice(self._owed, _OWED_A_TURN))
        for timer_ref in owed:
            del self._owed[timer_ref]
        for first, timer_ref in enumerate(owed):
            if not await self._set_right(timer_ref):
                self._owed.update(dict.fromkeys(owed[first + 1 :]))
                return
