"""Handing over: the resume of an elapsed timer goes out, and goes out again while nobody answers."""

from __future__ import annotations

from typing import Any

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.identity import TimerRef, occurrence_id
from timer_service.domain.machine import note_resumed
from timer_service.domain.model import Absent, JsonText, Phase, Resumed, Timer
from timer_service.domain.summary import summary_of
from timer_service.errors import BrokerError, NotFound, StorageFull, UnreadableState
from timer_service.metrics import Metrics
from timer_service.ports import Resumes, Snapshots, StateStore, Stored
from timer_service.runtime.driver import AGAIN_MS, Armed, Driver, again_after_ms
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.wire.canonical import MalformedJson, payload_sha256, strict_loads
from timer_service.wire.records import resume_of

MAX_RESUME_TIMEOUT_MS = 3_600_000
DUPLICATE_WINDOW_MS = 100_000
"""A little less than the broker's: inside it a resume may be published again under its first id at no cost."""
_NULL = JsonText(b"null")


class ResumeService:
    """Publishes resumes. Each method may be repeated; receivers drop duplicates by ``resume_id``."""

    def __init__(
        self,
        clock: Clock,
        store: StateStore,
        snapshots: Snapshots,
        resumes: Resumes,
        driver: Driver,
        recent: Recent,
        problems: Problems,
        metrics: Metrics,
        log: Any,
        *,
        resume_timeout_ms: int,
    ) -> None:
        self._clock = clock
        self._store = store
        self._snapshots = snapshots
        self._resumes = resumes
        self._driver = driver
        self._recent = recent
        self._problems = problems
        self._metrics = metrics
        self._log = log
        self._timeout_ms = resume_timeout_ms

    async def publish_first(self, timer: Timer, armed: Armed) -> None:
        """Publish the resume of a timer that has just elapsed; when that fails, the heap comes back to it soon."""
        await self._publish(timer, armed, attempt=0, count=max(1, timer.current.resumes))

    async def look_after(self, armed: Armed) -> None:
        """An elapsed timer got no answer in time: publish again, unless the earlier message still stands."""
        stored = await self._elapsed(armed)
        if stored is None or stored.timer is None:
            return
        timer = stored.timer
        if armed.unsent and self._clock.now_ms() - armed.since_ms < DUPLICATE_WINDOW_MS:
            if await self._publish(timer, armed, attempt=0, count=max(1, timer.current.resumes)):
                self._driver.look_again(armed, self._next_look(timer))
            return
        try:
            stands = await self._resumes.stands(occurrence_id(timer.timer_ref, timer.generation), armed.resume_seq)
        except BrokerError:
            self._driver.look_again(armed, self._clock.now_ms() + AGAIN_MS)
            return
        if stands or await self._repeat(timer, stored.revision, armed):
            self._driver.look_again(armed, self._next_look(timer))

    async def ensure_first(self, armed: Armed) -> None:
        """After a crash the first resume may be missing: the broker's duplicate window drops what is not."""
        stored = await self._elapsed(armed)
        if stored is not None and stored.timer is not None:
            await self.publish_first(stored.timer, armed)

    async def _elapsed(self, armed: Armed) -> Stored | None:
        """The state that ``armed`` stands for, as long as it is elapsed; else arm by what is really there."""
        try:
            stored = await self._store.get(armed.key)
        except UnreadableState as error:
            self._problems.report(error)
            return None
        except BrokerError:
            self._driver.look_again(armed, self._clock.now_ms() + AGAIN_MS)
            return None
        if stored.timer is None:
            self._driver.disarm(armed.key, max(stored.revision, armed.revision))
            return None
        self._driver.observe(armed.key, stored.revision, summary_of(stored.timer))
        same = stored.timer.phase is Phase.ELAPSED and stored.timer.generation == armed.generation
        return stored if same else None

    async def _repeat(self, timer: Timer, revision: int, armed: Armed) -> bool:
        """Publish one more copy; False when that failed, and the heap comes back to it by itself."""
        count = max(timer.current.resumes, armed.resumed.count if armed.resumed else 0, 1) + 1
        if not await self._publish(timer, armed, attempt=count - 1, count=count):
            return False
        self._log.info(events.RESUME_REPEATED, timer_ref=timer.timer_ref, generation=timer.generation, resumes=count)
        self._metrics.repair("resume_repeated")
        if armed.resumed is None:
            return True
        noted = note_resumed(timer, armed.resumed)
        try:
            new_revision = await self._store.put(noted, revision)
        except BrokerError:
            self._recent.forget(timer.timer_ref)  # only a note: the next write carries it
        else:
            self._recent.keep(timer.timer_ref, Stored(noted, new_revision))
            self._driver.observe(timer.timer_ref, new_revision, summary_of(noted))
        return True

    async def _publish(self, timer: Timer, armed: Armed, *, attempt: int, count: int) -> bool:
        try:
            payload = await self._payload(timer)
            armed.resume_seq = await self._resumes.publish(resume_of(timer, payload), attempt)
        except NotFound as error:
            self._problems.report(UnreadableState(timer.timer_ref, f"its payload is gone: {error}"))
            self._driver.look_again(armed, self._next_look(timer))
            return False
        except StorageFull as error:
            self._log.debug(events.RESUME_FAILED, timer_ref=timer.timer_ref, error=str(error))
            armed.unsent = attempt == 0
            self._driver.wait_for_room(timer.timer_ref)
            return False
        except BrokerError as error:
            self._log.warning(events.RESUME_FAILED, timer_ref=timer.timer_ref, error=str(error))
            armed.unsent = attempt == 0
            self._driver.look_again(armed, self._clock.now_ms() + again_after_ms(armed.tries))
            return False
        armed.unsent = False
        armed.resumed = Resumed(self._clock.now_ms(), count)
        self._metrics.resume()
        return True

    async def _payload(self, timer: Timer) -> JsonText:
        if not isinstance(timer.payload, Absent):
            return timer.payload
        if timer.snapshot_seq is None:
            return _NULL
        payload = await self._snapshots.get(timer.snapshot_seq)
        if not _hashes_to(payload, timer.payload_sha256):
            raise NotFound(f"snapshot {timer.snapshot_seq} is another one's")
        return payload

    def _next_look(self, timer: Timer) -> int:
        """60 s after it elapsed, then after twice as long each time, up to an hour (with the default time-out)."""
        now_ms = self._clock.now_ms()
        at_ms, wait_ms = (timer.current.elapsed_at_ms or now_ms), self._timeout_ms
        limit_ms = max(self._timeout_ms, MAX_RESUME_TIMEOUT_MS)
        while at_ms <= now_ms and wait_ms < limit_ms:
            at_ms += wait_ms
            wait_ms = min(wait_ms * 2, limit_ms)
        missed = (now_ms - at_ms) // limit_ms + 1 if at_ms <= now_ms else 0
        return at_ms + missed * limit_ms


def _hashes_to(payload: JsonText, expected: str) -> bool:
    """Whether this is the payload that was snapshotted: a stream that was made anew gives out its sequences again."""
    try:
        return payload_sha256(strict_loads(bytes(payload))) == expected
    except MalformedJson:
        return False


def resumed_of(driver: Driver, timer: Timer) -> Resumed | None:
    """What this process knows of the resumes of the timer's present occurrence."""
    armed = driver.get(TimerRef(timer.timer_ref))
    if armed is None or armed.generation != timer.generation or armed.phase is not Phase.ELAPSED:
        return None
    return armed.resumed
