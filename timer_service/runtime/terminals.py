"""Ends: the receipt is in the state; then the archive, then the removal, then the snapshot. Each step may repeat."""

from __future__ import annotations

from typing import Any

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.model import Timer
from timer_service.domain.summary import summary_of
from timer_service.errors import BrokerError, StorageFull, UnreadableState, WrongRevision
from timer_service.metrics import Metrics
from timer_service.ports import Archive, Snapshots, StateStore
from timer_service.runtime.archived import Archived
from timer_service.runtime.driver import AGAIN_MS, Armed, Driver
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.wire.records import terminal_record

_MAX_TRIES = 5


class Terminals:
    """Takes ended timers out of the live state, without losing what happened to them."""

    def __init__(
        self,
        clock: Clock,
        store: StateStore,
        archive: Archive,
        snapshots: Snapshots,
        driver: Driver,
        recent: Recent,
        archived: Archived,
        problems: Problems,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._clock = clock
        self._store = store
        self._archive = archive
        self._snapshots = snapshots
        self._driver = driver
        self._recent = recent
        self._archived = archived
        self._problems = problems
        self._metrics = metrics
        self._log = log

    async def finish(self, timer: Timer, revision: int) -> None:
        """Archive, remove and clean up an ended timer. When a step fails the heap comes back to it."""
        try:
            await self.archive(timer)
            removed = await self._store.remove(timer, revision)
        except (BrokerError, UnreadableState) as error:
            self._recent.forget(timer.timer_ref)
            if isinstance(error, StorageFull):
                self._driver.wait_for_room(timer.timer_ref)
            return  # the entry is still armed: resumed in seconds, and at the next start
        self._recent.forget(timer.timer_ref)
        self._driver.disarm(timer.timer_ref, removed)
        await self.drop_snapshot(timer)

    async def archive(self, timer: Timer) -> int:
        """Store the terminal record once per occurrence; returns its sequence. Raises BrokerError."""
        record, expected = terminal_record(timer), timer.archive_seq
        for _ in range(_MAX_TRIES):
            try:
                seq = await self._archive.append(record, expected)
            except WrongRevision:
                last = await self._archive.last(timer.timer_ref)
                if last.timer is not None and last.timer.generation >= timer.generation:
                    seq = last.revision  # an earlier try of this step got through
                else:
                    expected = last.revision
                    continue
            self._archived.add(timer.timer_ref)
            return seq
        raise WrongRevision(f"the archive of {timer.timer_ref} keeps changing")

    async def resume(self, armed: Armed) -> None:
        """An ended timer still stands in the state: take up where it stopped."""
        try:
            stored = await self._store.get(armed.key)
        except UnreadableState as error:
            self._problems.report(error)
            return
        except BrokerError:
            self._driver.look_again(armed, self._clock.now_ms() + AGAIN_MS)
            return
        if stored.timer is None:
            self._driver.disarm(armed.key, max(stored.revision, armed.revision))
        elif stored.timer.phase.ended:
            self._metrics.repair("end_resumed")
            self._log.info(events.REPAIR, kind="end_resumed", timer_ref=armed.key)
            await self.finish(stored.timer, stored.revision)
        else:
            self._driver.observe(armed.key, stored.revision, summary_of(stored.timer))

    async def drop_snapshot(self, timer: Timer) -> None:
        """Remove the payload that only ``timer`` referred to; one that stays is found by the reconciler."""
        if timer.snapshot_seq is not None:
            await self.delete_snapshot(timer.snapshot_seq)

    async def delete_snapshot(self, seq: int) -> None:
        """Remove a payload that nothing refers to; one that stays is found by the reconciler."""
        try:
            await self._snapshots.delete(seq)
        except BrokerError as error:
            self._log.info(events.WORK_FAILED, step="snapshot", error=str(error))
