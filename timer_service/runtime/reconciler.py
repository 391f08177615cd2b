"""The reconciler: a scan of all state at the start, every hour, and whenever the broker gives reason to doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.identity import TimerRef
from timer_service.domain.model import Phase
from timer_service.errors import BrokerError
from timer_service.metrics import Metrics
from timer_service.ports import StreamState
from timer_service.runtime.driver import Armed, Driver
from timer_service.runtime.feed import Feed
from timer_service.runtime.lanes import Lanes
from timer_service.runtime.leftovers import Leftovers
from timer_service.runtime.problems import Problems
from timer_service.runtime.resumes import DUPLICATE_WINDOW_MS, ResumeService

EVIDENCE_INTERVAL_S = 2.0


class Sweeper(Protocol):
    """Removes what nothing refers to any more."""

    async def sweep(self, referred: set[int], spared: set[TimerRef], grace_ms: int) -> int:
        """Delete snapshots older than ``grace_ms`` that are neither ``referred`` to nor of a ``spared`` timer.

        Returns how many.
        """
        ...


class Reconciler:
    """Compares what is armed with what is stored, and mends the difference. It never blocks normal work."""

    def __init__(
        self,
        clock: Clock,
        feed: Feed,
        driver: Driver,
        lanes: Lanes,
        resumes: ResumeService,
        problems: Problems,
        sweeper: Sweeper,
        look: Callable[[], Awaitable[StreamState]],
        metrics: Metrics,
        log: Any,
        *,
        interval_ms: int,
        snapshot_grace_ms: int,
        leftovers: Leftovers | None = None,
    ) -> None:
        self._clock = clock
        self._feed = feed
        self._driver = driver
        self._lanes = lanes
        self._resumes = resumes
        self._problems = problems
        self._sweeper = sweeper
        self._look = look
        self._metrics = metrics
        self._log = log
        self._interval_ms = interval_ms
        self._grace_ms = snapshot_grace_ms
        self._leftovers = leftovers
        self._created = ""
        self._owed: str | None = None
        self._hint = asyncio.Event()

    async def run(self) -> None:
        """Mend what a crash left, then watch and scan until cancelled."""
        await self._feed.ready.wait()
        self._after_start()
        last_scan_ms = self._clock.now_ms()
        await self._sweep()
        while True:
            await self._pause()
            self._owed = await self._evidence() or self._owed
            if self._owed is not None or self._clock.now_ms() - last_scan_ms >= self._interval_ms:
                await self._scan(self._owed)
                last_scan_ms = self._clock.now_ms()

    def look_soon(self) -> None:
        """The broker was away: what it has now is to be looked at before much is written to it."""
        self._hint.set()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(EVIDENCE_INTERVAL_S):
                await self._hint.wait()
        except TimeoutError:
            return
        self._hint.clear()

    def _after_start(self) -> None:
        """Between "elapsed" in the state and the resume in its stream a crash may have come."""
        now_ms = self._clock.now_ms()
        for armed in self._driver.armed():
            if armed.phase is Phase.ELAPSED and armed.resumed is None and self._just_elapsed(armed, now_ms):
                self._lanes.run(armed.key, partial(self._resumes.ensure_first, armed))

    def _just_elapsed(self, armed: Armed, now_ms: int) -> bool:
        return now_ms - armed.since_ms < DUPLICATE_WINDOW_MS

    async def _evidence(self) -> str | None:
        """A reason to distrust what is armed, None when there is none (or the broker is not there to ask)."""
        position, armed = self._feed.position, len(self._driver)  # while the answer is on its way both may grow
        try:
            state = await self._look()
        except BrokerError:
            return None
        armed = min(armed, len(self._driver))
        await self._feed.look(state.last_seq)
        previous, self._created = self._created, state.created
        if previous and state.created != previous:
            return "the state stream was created anew"
        if state.last_seq < position:
            return f"the state stream went back from {position} to {state.last_seq}"
        if self._feed.went_back:
            return "the state stream gives out sequences again that it gave out before"
        if armed > state.subjects:
            return f"{armed} are armed, and the state has {state.subjects} keys"
        return None

    async def _scan(self, evidence: str | None) -> None:
        if evidence is not None:
            self._log.warning(events.EVIDENCE, reason=evidence)
        try:
            repairs = await self._feed.rescan(distrust=evidence is not None)
            await self._sweep()
        except BrokerError as error:
            self._log.warning(events.WORK_FAILED, step="scan", error=str(error))
            return
        if evidence is not None:
            self._owed = None
            self._after_start()
        self._log.info(events.SCAN_FINISHED, repairs=repairs, armed=len(self._driver))

    async def _sweep(self) -> None:
        """Snapshots that lost a race, or whose removal a crash prevented; what an unreadable state needs, stays.

        And resumes whose occurrence was answered before anybody read them.
        """
        referred = {armed.snapshot_seq for armed in self._driver.armed() if armed.snapshot_seq}
        try:
            swept = await self._sweeper.sweep(referred, self._problems.known(), self._grace_ms)
        except BrokerError as error:
            self._log.info(events.WORK_FAILED, step="sweep", error=str(error))
            return
        for _ in range(swept):
            self._metrics.repair("snapshot_unreferenced")
        if self._leftovers is not None:
            await self._leftovers.sweep()
