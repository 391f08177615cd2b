"""The feed: every change of the state reaches the heap, whichever replica wrote it.

A scan is a second follower that reads all from the start beside the live one; when it has caught up it takes the live
one's place, and what is armed without a state behind it is disarmed. So normal work never waits for a scan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from timer_service import events
from timer_service.domain.identity import TimerRef, is_timer_ref
from timer_service.domain.model import Phase, Timer
from timer_service.domain.summary import summary_of
from timer_service.errors import UnreadableState
from timer_service.metrics import Metrics
from timer_service.runtime.archived import Archived
from timer_service.runtime.driver import Driver
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.wire.records import UnreadableRecord, decode_timer

_STATE_PREFIX_LENGTH = len("$KV.DURABLE_TIMER_STATE.")
_REMOVED_HEADER = "KV-Operation"


class Change(Protocol):
    """A state message as delivered."""

    subject: str
    seq: int
    data: bytes
    headers: dict[str, str] | None


class Following(Protocol):
    """A reader of the state stream, as ``timer_service.jetstream.follow`` has it."""

    last_seq: int

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    @property
    def caught_up(self) -> bool: ...
    @property
    def healthy(self) -> bool: ...


MakeFollower = Callable[[Callable[[Change], None], Callable[[], None]], Following]


class Feed:
    """Applies state changes to heap, memory of recent states, and list of problems."""

    def __init__(
        self,
        make_follower: MakeFollower,
        driver: Driver,
        recent: Recent,
        archived: Archived,
        problems: Problems,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._make_follower = make_follower
        self._driver = driver
        self._recent = recent
        self._archived = archived
        self._problems = problems
        self._metrics = metrics
        self._log = log
        self._live: Following | None = None
        self.ready = asyncio.Event()
        """Set when everything that stood at the start has been read."""
        self.entry_arrived: Callable[[TimerRef], None] = lambda _: None

    @property
    def last_seq(self) -> int:
        return 0 if self._live is None else self._live.last_seq

    @property
    def healthy(self) -> bool:
        return self._live is not None and self._live.healthy

    async def start(self) -> None:
        """Begin to follow; returns when the first scan has begun. Raises BrokerError."""
        self._live = self._make_follower(self.apply, self.ready.set)
        await self._live.start()

    async def stop(self) -> None:
        """Follow no more. Repeating it does nothing."""
        if self._live is not None:
            await self._live.stop()

    async def rescan(self, *, distrust: bool) -> int:
        """Read all anew and mend what differs; returns the number of repairs. Raises BrokerError.

        ``distrust`` forgets what was known first: the stream is not the one that it was learnt from.
        """
        if distrust:
            self._recent.clear()
            self._driver.forget_revisions()
        scan = _Scan(self)
        follower = self._make_follower(scan.apply, scan.done.set)
        known = self._driver.revisions()
        try:
            await follower.start()
            await scan.done.wait()
        except BaseException:
            await follower.stop()
            raise
        previous, self._live = self._live, follower
        if previous is not None:
            await previous.stop()
        return scan.repairs + self._disarm_missing(scan.seen, known)

    def _disarm_missing(self, seen: set[TimerRef], known: dict[TimerRef, int]) -> int:
        """What was armed before the scan, has not changed since, and was not seen in it, is not there."""
        missing = 0
        for timer_ref, revision in known.items():
            armed = self._driver.get(timer_ref)
            if timer_ref not in seen and armed is not None and armed.revision == revision:
                self._driver.disarm(timer_ref, revision)
                self.repaired("armed_without_state", timer_ref)
                missing += 1
        return missing

    def repaired(self, kind: str, timer_ref: TimerRef) -> None:
        self._metrics.repair(kind)
        self._log.info(events.REPAIR, kind=kind, timer_ref=timer_ref)

    # -- one change -----------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Take one state message. What is known already, from the acks of our own writes, costs next to nothing."""
        timer_ref = TimerRef(change.subject[_STATE_PREFIX_LENGTH:])
        armed = self._driver.get(timer_ref)
        if armed is not None and armed.revision >= change.seq:
            return
        self._forget_older(timer_ref, change.seq)
        if _REMOVED_HEADER in (change.headers or {}):
            self._removed(timer_ref, change.seq)
            return
        try:
            timer = self._read(timer_ref, change.data)
        except UnreadableState as error:
            self._driver.disarm(timer_ref, change.seq)
            self._problems.report(error)
            return
        self._problems.solved(timer_ref)
        self._driver.observe(timer_ref, change.seq, summary_of(timer))
        self.entry_arrived(timer_ref)

    def _read(self, timer_ref: TimerRef, data: bytes) -> Timer:
        if not is_timer_ref(timer_ref):
            raise UnreadableState(timer_ref[:100], "its key is no timer_ref")
        try:
            return decode_timer(data, timer_ref)
        except UnreadableRecord as error:
            raise UnreadableState(timer_ref, str(error)) from None

    def _removed(self, timer_ref: TimerRef, seq: int) -> None:
        self._driver.disarm(timer_ref, seq)
        self._problems.solved(timer_ref)
        if is_timer_ref(timer_ref):
            self._archived.add(timer_ref)

    def _forget_older(self, timer_ref: TimerRef, seq: int) -> None:
        known = self._recent.get(timer_ref)
        if known is not None and known.revision < seq:
            self._recent.forget(timer_ref)


class _Scan:
    """One pass over the state, beside the live feed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.seen: set[TimerRef] = set()
        self.done = asyncio.Event()
        self.repairs = 0

    def apply(self, change: Change) -> None:
        timer_ref = TimerRef(change.subject[_STATE_PREFIX_LENGTH:])
        if self.done.is_set():
            self._feed.apply(change)
            return
        before = self._feed._driver.get(timer_ref)
        revision = 0 if before is None else before.revision
        if _REMOVED_HEADER not in (change.headers or {}):
            self.seen.add(timer_ref)
        self._feed.apply(change)
        after = self._feed._driver.get(timer_ref)
        if after is not None and after.revision > revision and after.phase in (Phase.WAITING, Phase.ELAPSED):
            self.repairs += 1
            self._feed.repaired("armed" if before is None else "moved", timer_ref)
