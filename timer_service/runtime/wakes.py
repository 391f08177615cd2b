"""The wake service: a due timer elapses, in the state first, and then its resume goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.machine import elapse
from timer_service.domain.model import Phase, Timer, Wake
from timer_service.domain.summary import summary_of
from timer_service.errors import Ambiguous, BrokerError, StorageFull, UnreadableState, WrongRevision
from timer_service.fibers import start_fiber
from timer_service.metrics import Metrics
from timer_service.ports import StateStore, Stored
from timer_service.runtime.driver import Driver
from timer_service.runtime.lanes import Lanes
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.runtime.resumes import ResumeService
from timer_service.runtime.settling import Delivery
from timer_service.wire.records import UnreadableRecord, decode_wake

_MAX_TRIES = 8
_BACKOFF_S = 0.1


class WakeService:
    """Settles wakes. A wake that is early, stale or repeated changes nothing: the state decides."""

    def __init__(
        self,
        clock: Clock,
        store: StateStore,
        resumes: ResumeService,
        driver: Driver,
        lanes: Lanes,
        recent: Recent,
        problems: Problems,
        metrics: Metrics,
        log: Any,
        *,
        offset_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._store = store
        self._resumes = resumes
        self._driver = driver
        self._lanes = lanes
        self._recent = recent
        self._problems = problems
        self._metrics = metrics
        self._log = log
        self._offset_ms = offset_ms

    def handle(self, delivery: Delivery) -> None:
        """Take one wake; returns at once."""
        try:
            wake = decode_wake(delivery.data)
        except UnreadableRecord as error:
            self._log.warning(events.WAKE_DROPPED, subject=delivery.subject[:200], reason=str(error))
            self._metrics.wake("unreadable")
            start_fiber(delivery.ack(), self._on_ack_error)
            return
        if wake.woken_at_ms is None:
            woken_at_ms = min(delivery.stored_at_ms + self._offset_ms(), self._clock.now_ms())
            wake = replace(wake, woken_at_ms=woken_at_ms)
        self._lanes.run(wake.timer_ref, partial(self._wake, wake, delivery))

    def _on_ack_error(self, error: BaseException | None) -> None:
        if error is not None:
            self._log.error(events.WORK_FAILED, exc_info=error)

    async def _wake(self, wake: Wake, delivery: Delivery) -> None:
        try:
            result = await self._elapse(wake)
        except UnreadableState as error:
            self._problems.report(error)
            result = "unreadable_state"
        except StorageFull:
            self._driver.wait_for_room(wake.timer_ref)
            result = "deferred"
        except BrokerError:
            self._driver.come_back(wake.timer_ref)
            result = "deferred"
        self._metrics.wake(result)
        await delivery.ack()

    async def _elapse(self, wake: Wake) -> str:
        stored = self._recent.get(wake.timer_ref)
        for attempt in range(_MAX_TRIES):
            fresh = stored is None
            if stored is None:
                stored = await self._read(wake)
            write = elapse(stored.timer, wake, self._clock.now_ms())
            if write is not None:
                revision = await self._try_put(write.timer, stored.revision, attempt)
                if revision is not None:
                    await self._elapsed(write.timer, revision)
                    return "elapsed"
            elif fresh:
                return await self._not_due(wake, stored)
            stored = None
        raise WrongRevision(f"the state of {wake.timer_ref} keeps changing")

    async def _read(self, wake: Wake) -> Stored:
        stored = await self._store.get(wake.timer_ref)
        self._recent.keep(wake.timer_ref, stored)
        return stored

    async def _try_put(self, timer: Timer, expected: int, attempt: int) -> int | None:
        try:
            revision = await self._store.put(timer, expected)
        except WrongRevision:
            self._recent.forget(timer.timer_ref)
            return None
        except Ambiguous:
            self._recent.forget(timer.timer_ref)
            await asyncio.sleep(_BACKOFF_S * attempt)
            return None
        self._recent.keep(timer.timer_ref, Stored(timer, revision))
        return revision

    async def _elapsed(self, timer: Timer, revision: int) -> None:
        armed = self._driver.observe(timer.timer_ref, revision, summary_of(timer))
        self._metrics.lateness(timer.current.lateness_ms or 0)
        await self._resumes.publish_first(timer, armed)

    async def _not_due(self, wake: Wake, stored: Stored) -> str:
        """The state says otherwise: arm by what it says, and see to the resume if it may be missing."""
        timer = stored.timer
        if timer is None:
            self._driver.disarm(wake.timer_ref, stored.revision or wake.revision)
            return "stale"
        armed = self._driver.observe(wake.timer_ref, stored.revision, summary_of(timer))
        if timer.phase is Phase.ELAPSED and timer.generation == wake.generation:
            if armed.resumed is None:
                await self._resumes.publish_first(timer, armed)
            return "repeated"
        if timer.phase is Phase.WAITING and timer.generation == wake.generation:
            self._driver.waits.came_early(wake.timer_ref)
            return "early"
        return "stale"
