"""Resumes that nobody needs to read any more: the occurrence was answered, and the message still stands unread.

So it goes with every durable sleep where no notify consumer runs, and with every resume that was answered by hand. The
resume stream would fill up with them, and close admission. A resume goes only when the state or the archive proves that
its occurrence is over; where neither knows the timer it may be the last word of it, and stays.
"""

from __future__ import annotations

from typing import Any

from timer_service import events
from timer_service.domain.identity import TimerRef, parse_occurrence_id
from timer_service.domain.model import Phase
from timer_service.errors import BrokerError, UnreadableState
from timer_service.metrics import Metrics
from timer_service.ports import Archive, Resumes, StateStore
from timer_service.runtime.driver import Driver


class Leftovers:
    """Dropped by the reconciler's scans, so what piles up is what is left over in one interval."""

    def __init__(
        self, store: StateStore, archive: Archive, resumes: Resumes, driver: Driver, metrics: Metrics, log: Any
    ) -> None:
        self._store = store
        self._archive = archive
        self._resumes = resumes
        self._driver = driver
        self._metrics = metrics
        self._log = log

    async def sweep(self) -> None:
        """Drop what is over. A broker that can't answer now is asked at the next scan."""
        try:
            for resume_id, seq in (await self._resumes.unread()).items():
                await self._look_at(resume_id, seq)
        except BrokerError as error:
            self._log.info(events.WORK_FAILED, step="leftovers", error=str(error))

    async def _look_at(self, resume_id: str, seq: int) -> None:
        try:
            timer_ref, generation = parse_occurrence_id(resume_id)
        except ValueError:
            return  # none of ours: the notify consumer says what is wrong with it
        if not self._awaited(timer_ref, generation) and await self._over(timer_ref, generation):
            await self._resumes.drop(seq)
            self._metrics.repair("resume_dropped")
            self._log.info(events.REPAIR, kind="resume_dropped", timer_ref=timer_ref, generation=generation)

    def _awaited(self, timer_ref: TimerRef, generation: int) -> bool:
        """Known to be elapsed still: nothing needs to be read."""
        armed = self._driver.get(timer_ref)
        return armed is not None and armed.phase is Phase.ELAPSED and armed.generation == generation

    async def _over(self, timer_ref: TimerRef, generation: int) -> bool:
        try:
            timer = (await self._store.get(timer_ref)).timer
            if timer is not None:
                return timer.generation > generation
            record = (await self._archive.last(timer_ref)).timer
        except UnreadableState:
            return False
        return record is not None and record.generation >= generation
