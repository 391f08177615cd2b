"""The feed: every change of the state reaches the heap, whichever replica wrote it.

While other processes write, a follower reads the state stream live. As long as nobody else does, the acks of our own
writes say all there is to say and the feed is quiet: it costs no message. It listens to the state's subjects (without
an echo of our own) for the first foreign write, and the reconciler's look at the stream every other second
finds what the ear missed; either makes it live again from where the account ended.

A scan is a second follower that reads all from the start beside the live one; when it has caught up it takes the live
one's place, and what is armed without a state behind it is disarmed. So normal work never waits for a scan.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol

from timer_service import events
from timer_service.domain.identity import TimerRef, is_timer_ref
from timer_service.domain.model import Phase, Timer
from timer_service.domain.summary import summary_of
from timer_service.errors import BrokerError, UnreadableState
from timer_service.jetstream.topology import KV_OPERATION_HEADER, STATE_PREFIX
from timer_service.metrics import Metrics
from timer_service.runtime.archived import Archived
from timer_service.runtime.driver import Driver
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.runtime.tally import Tally
from timer_service.wire.records import UnreadableRecord, decode_timer

_STATE_PREFIX_LENGTH = len(STATE_PREFIX)
_CALM_LOOKS = 3
"""So many looks in a row without a foreign write, and the feed goes quiet."""
_RETRY_S = 0.25


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


MakeFollower = Callable[[Callable[[Change], None], Callable[[], None], int], Following]
"""From what to call for each change, what to call once when caught up, and after which sequence to begin."""


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
        *,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self._now_ms = now_ms
        self._looked_at_ms = 0
        self._make_follower = make_follower
        self._driver = driver
        self._recent = recent
        self._archived = archived
        self._problems = problems
        self._metrics = metrics
        self._log = log
        self._live: Following | None = None
        self._tally = Tally()
        self._foreign = False
        self._calm = 0
        self._seen_last_seq = 0
        self._waking: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()
        """Set when everything that stood at the start has been read."""
        self.entry_arrived: Callable[[TimerRef], None] = lambda _: None

    @property
    def position(self) -> int:
        """The sequence up to which every change is accounted for."""
        return self._tally.position

    @property
    def went_back(self) -> bool:
        """Whether the stream has given out sequences again that it gave to us before."""
        return self._tally.went_back

    @property
    def quiet(self) -> bool:
        return self.ready.is_set() and self._live is None

    @property
    def healthy(self) -> bool:
        return self.quiet or (self._live is not None and self._live.healthy)

    async def start(self) -> None:
        """Begin to follow; returns when the first scan has begun. Raises BrokerError."""
        self._live = self._make_follower(self.apply, self.ready.set, 0)
        await self._live.start()

    async def stop(self) -> None:
        """Follow no more. Repeating it does nothing."""
        live, self._live = self._live, None
        if live is not None:
            await live.stop()

    def wrote(self, seq: int) -> None:
        """The broker has acknowledged a write of our own."""
        self._tally.wrote(seq)

    def heard(self) -> None:
        """Another process writes to the state (or the connection was away): read from where the account ends."""
        self._foreign = True
        if self.quiet and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._go_live(), name="feed.wake")

    async def look(self, last_seq: int) -> None:
        """Take the stream's newest sequence, every other second: be live when it is needed, quiet when it is not."""
        foreign = bool(self._tally.take_unclaimed()) or self._foreign
        self._foreign = False
        if self.ready.is_set() and self._tally.position >= self._seen_last_seq:
            self._archived.followed(self._looked_at_ms)
        self._looked_at_ms = self._now_ms()
        behind = last_seq > max(self._tally.position, self._seen_last_seq)
        self._seen_last_seq, missed = last_seq, last_seq > self._tally.position and not behind
        self._calm = 0 if foreign else self._calm + 1
        if self.quiet and missed:
            self.heard()
        elif self._live is not None and self._live.caught_up and self._calm >= _CALM_LOOKS:
            live, self._live = self._live, None
            await live.stop()

    async def _go_live(self) -> None:
        while self.quiet:
            follower = self._make_follower(self.apply, lambda: None, self._tally.position)
            try:
                await follower.start()
            except BrokerError:
                await follower.stop()
                await asyncio.sleep(_RETRY_S)
            else:
                self._calm = 0
                self._live = follower

    async def rescan(self, *, distrust: bool) -> int:
        """Read all anew and mend what differs; returns the number of repairs. Raises BrokerError.

        ``distrust`` forgets what was known first: the stream is not the one that it was learnt from.
        """
        accounted: float = self._tally.position
        if distrust:
            accounted = math.inf
            self._recent.clear()
            self._driver.forget_revisions()
            self._tally.reset()
        scan = _Scan(self, accounted)
        follower = self._make_follower(scan.apply, scan.done.set, 0)
        known, problems = self._driver.revisions(), self._problems.known()
        try:
            await follower.start()
            await scan.done.wait()
        except BaseException:
            await follower.stop()
            raise
        self._calm = 0
        previous, self._live = self._live, follower
        if previous is not None:
            await previous.stop()
        for timer_ref in problems - scan.seen:
            self._problems.solved(timer_ref)  # purged by hand: the stream leaves no trace of that
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
        if self._tally.read(change.seq):
            return
        self.take(change)

    def take(self, change: Change) -> None:
        """Apply what a state message says, unless something newer is known."""
        timer_ref = TimerRef(change.subject[_STATE_PREFIX_LENGTH:])
        armed = self._driver.get(timer_ref)
        if armed is not None and armed.revision >= change.seq:
            return
        self._forget_older(timer_ref, change.seq)
        if KV_OPERATION_HEADER in (change.headers or {}):
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
    """One pass over the state, beside the live feed.

    Up to ``accounted`` everything should be armed as it is; what comes after are the changes of the meantime.
    """

    def __init__(self, feed: Feed, accounted: float) -> None:
        self._feed = feed
        self._accounted = accounted
        self.seen: set[TimerRef] = set()
        self.done = asyncio.Event()
        self.repairs = 0

    def apply(self, change: Change) -> None:
        timer_ref = TimerRef(change.subject[_STATE_PREFIX_LENGTH:])
        if self.done.is_set():
            self._feed.apply(change)
            return
        self._feed._tally.read(change.seq)
        before = self._feed._driver.get(timer_ref)
        revision = 0 if before is None else before.revision
        if KV_OPERATION_HEADER not in (change.headers or {}):
            self.seen.add(timer_ref)
        self._feed.take(change)
        if change.seq > self._accounted:
            return
        after = self._feed._driver.get(timer_ref)
        if after is not None and after.revision > revision and after.phase in (Phase.WAITING, Phase.ELAPSED):
            self.repairs += 1
            self._feed.repaired("armed" if before is None else "moved", timer_ref)
