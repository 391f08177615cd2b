"""The ports of the timer service in memory, for tests: no broker, the same promises.

Each behaves as its JetStream counterpart does (tests/contract runs one suite over both). Every call gives way to
others once before it takes effect, so that races which a real broker allows can happen here too; what is
stored goes through the wire format. ``fail_next`` makes trouble on purpose:

    state = MemoryState()
    state.fail_next(Ambiguous("no reply"), stored=True)  # the next write is stored, and its reply is lost

Instances belong to one event loop. Nothing is ever forgotten by itself: call ``expire…`` where a test needs it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from timer_service.domain.identity import TimerRef
from timer_service.domain.model import JsonText, Timer, Wake
from timer_service.errors import BrokerError, NotFound, UnreadableState, WrongRevision
from timer_service.ports import Fill, Schedule, ScheduleStream, Stored
from timer_service.wire.records import (
    Outcome,
    Rejection,
    Removal,
    Resume,
    UnreadableRecord,
    decode_resume,
    decode_timer,
    decode_wake,
    encode,
    encode_wake,
)

T = TypeVar("T")


class _Trouble:
    """Adapters fail when they are told to."""

    def __init__(self) -> None:
        self._trouble: deque[tuple[BrokerError, bool]] = deque()
        self.calls = 0
        """How often this adapter was used, failures included."""

    def fail_next(self, error: BrokerError, *, stored: bool = False, times: int = 1) -> None:
        """Let the next ``times`` calls raise ``error``; with ``stored`` what they do takes effect all the same."""
        self._trouble.extend([(error, stored)] * times)

    async def _do(self, effect: Callable[[], T]) -> T:
        self.calls += 1
        await asyncio.sleep(0)
        if not self._trouble:
            return effect()
        error, stored = self._trouble.popleft()
        if stored:
            effect()
        raise error


class MemoryState(_Trouble):
    """``StateStore`` in memory: one value or removal marker a timer, each with a revision of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[TimerRef, tuple[bytes, bool, int]] = {}
        self._seq = 0
        self.on_written: Callable[[TimerRef, int], None] = lambda _ref, _revision: None
        """Called after each write with what was written: the change feed of this store."""

    async def get(self, timer_ref: TimerRef) -> Stored:
        return await self._do(lambda: self.peek(timer_ref))

    async def put(self, timer: Timer, expected: int) -> int:
        return await self._do(lambda: self._write(timer.timer_ref, encode(timer), False, expected))

    async def remove(self, timer: Timer, expected: int) -> int:
        marker = encode(Removal(v=1, generation=timer.generation, fence=timer.fence))
        return await self._do(lambda: self._write(timer.timer_ref, marker, True, expected))

    def peek(self, timer_ref: TimerRef) -> Stored:
        """What stands, at once and without trouble. Raises UnreadableState."""
        data, removed, revision = self._values.get(timer_ref, (b"", True, 0))
        return Stored(None, revision) if removed else Stored(_timer(data, timer_ref), revision)

    def marker(self, timer_ref: TimerRef) -> Removal | None:
        """What the removal marker of ``timer_ref`` says; None where none stands."""
        data, removed, _ = self._values.get(timer_ref, (b"", False, 0))
        return msgspec.json.decode(data, type=Removal) if removed else None

    def refs(self) -> list[TimerRef]:
        """The timers that have a state, in the order of their last write."""
        live = [(revision, ref) for ref, (_, removed, revision) in self._values.items() if not removed]
        return [ref for _, ref in sorted(live)]

    def overwrite(self, timer_ref: TimerRef, data: bytes) -> int:
        """Store any bytes, as a person or another program might; returns the revision."""
        return self._write(timer_ref, data, False, self._values.get(timer_ref, (b"", True, 0))[2])

    def expire_markers(self) -> None:
        """Removal markers run out."""
        self._values = {ref: value for ref, value in self._values.items() if not value[1]}

    def _write(self, timer_ref: TimerRef, data: bytes, removed: bool, expected: int) -> int:
        actual = self._values.get(timer_ref, (b"", True, 0))[2]
        if actual != expected:
            raise WrongRevision(f"the revision is {actual}, not {expected}", actual)
        self._seq += 1
        self._values[timer_ref] = (data, removed, self._seq)
        self.on_written(timer_ref, self._seq)
        return self._seq


def _timer(data: bytes, timer_ref: TimerRef) -> Timer:
    try:
        return decode_timer(data, timer_ref)
    except UnreadableRecord as error:
        raise UnreadableState(timer_ref, str(error)) from None


class MemoryArchive(_Trouble):
    """``Archive`` in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._records: dict[TimerRef, list[tuple[bytes, int]]] = {}
        self._seq = 0

    async def last(self, timer_ref: TimerRef) -> Stored:
        return await self._do(lambda: self._last(timer_ref))

    async def append(self, record: Timer, expected: int) -> int:
        return await self._do(lambda: self._append(record, expected))

    def records(self, timer_ref: TimerRef) -> list[Timer]:
        """All terminal records of one timer, oldest first."""
        return [_timer(data, timer_ref) for data, _ in self._records.get(timer_ref, [])]

    def expire(self, timer_ref: TimerRef) -> None:
        """The archive's age is over for this timer."""
        self._records.pop(timer_ref, None)

    def _last(self, timer_ref: TimerRef) -> Stored:
        records = self._records.get(timer_ref)
        return Stored(_timer(records[-1][0], timer_ref), records[-1][1]) if records else Stored(None, 0)

    def _append(self, record: Timer, expected: int) -> int:
        records = self._records.setdefault(record.timer_ref, [])
        actual = records[-1][1] if records else 0
        if actual != expected:
            raise WrongRevision(f"the last sequence is {actual}, not {expected}", actual)
        self._seq += 1
        records.append((encode(record), self._seq))
        return self._seq


class MemorySnapshots(_Trouble):
    """``Snapshots`` in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._payloads: dict[int, bytes] = {}
        self._seq = 0

    def __len__(self) -> int:
        return len(self._payloads)

    async def add(self, timer_ref: TimerRef, generation: int, payload: JsonText) -> int:  # noqa: ARG002
        return await self._do(lambda: self._add(bytes(payload)))

    async def get(self, seq: int) -> JsonText:
        return await self._do(lambda: self._get(seq))

    async def delete(self, seq: int) -> None:
        await self._do(lambda: self._payloads.pop(seq, None))

    def _add(self, payload: bytes) -> int:
        self._seq += 1
        self._payloads[self._seq] = payload
        return self._seq

    def _get(self, seq: int) -> JsonText:
        if seq not in self._payloads:
            raise NotFound(f"snapshot {seq} is not there")
        return JsonText(self._payloads[seq])


class MemoryResumes(_Trouble):
    """``Resumes`` in memory: a queue from which a test takes what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: dict[int, bytes] = {}
        self._window: dict[tuple[str, int], int] = {}
        self._seq = 0

    async def publish(self, resume: Resume, attempt: int) -> int:
        return await self._do(lambda: self._publish(resume, attempt))

    async def stands(self, resume_id: str, seq: int | None) -> bool:
        return await self._do(lambda: self._stands(resume_id, seq))

    async def unread(self) -> dict[str, int]:
        return await self._do(lambda: {decode_resume(data).resume_id: seq for seq, data in self._queue.items()})

    async def drop(self, seq: int) -> None:
        await self._do(lambda: self._queue.pop(seq, None))

    def standing(self) -> list[Resume]:
        """What stands unread, in order."""
        return [decode_resume(data) for data in self._queue.values()]

    def read(self) -> Resume | None:
        """Take the next one out, as a consumer that acknowledges it; None when nothing stands."""
        return decode_resume(self._queue.pop(next(iter(self._queue)))) if self._queue else None

    def expire_window(self) -> None:
        """The broker's duplicate window is over for all that was published."""
        self._window.clear()

    def _publish(self, resume: Resume, attempt: int) -> int:
        known = self._window.get((resume.resume_id, attempt))
        if known is not None:
            return known
        self._seq += 1
        self._window[resume.resume_id, attempt] = self._seq
        self._queue[self._seq] = encode(resume)
        return self._seq

    def _stands(self, resume_id: str, seq: int | None) -> bool:
        places = self._queue if seq is None else self._queue.keys() & {seq}
        return any(decode_resume(self._queue[place]).resume_id == resume_id for place in places)


class MemoryWakes(_Trouble):
    """``Wakes`` in memory; ``on_wake`` may hand each on to a wake service."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[Wake] = []
        self.on_wake: Callable[[Wake], object] = lambda _: None

    async def publish(self, timer_ref: TimerRef, generation: int, woken_at_ms: int, revision: int) -> None:
        wake = decode_wake(encode_wake(Wake(timer_ref, generation, woken_at_ms, revision)))
        await self._do(lambda: self._publish(wake))

    def _publish(self, wake: Wake) -> None:
        self.published.append(wake)
        self.on_wake(wake)


class MemorySchedules(_Trouble):
    """``Schedules`` in memory. ``on_put`` may set an alarm that calls ``fire`` with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.standing_now: dict[str, tuple[Schedule, bytes]] = {}
        self.created = "first"
        self.fill = Fill(0, 0)
        self.on_put: Callable[[TimerRef, Schedule], object] = lambda _ref, _schedule: None
        self._seq = 0

    async def put(self, timer_ref: TimerRef, generation: int, at_ms: int, revision: int) -> int:
        wake = encode_wake(Wake(timer_ref, generation, None, revision))
        return await self._do(lambda: self._put(timer_ref, generation, at_ms, wake))

    async def find(self, timer_ref: TimerRef) -> Schedule | None:
        return await self._do(lambda: self.standing_now.get(timer_ref, (None, b""))[0])

    async def drop(self, seq: int) -> bool:
        return await self._do(lambda: self._drop(seq))

    async def standing(self) -> dict[str, Schedule]:
        return await self._do(lambda: {ref: schedule for ref, (schedule, _) in self.standing_now.items()})

    async def look(self) -> ScheduleStream:
        return await self._do(lambda: ScheduleStream(self.created, self._seq, self.fill))

    def fire(self, timer_ref: TimerRef, seq: int) -> bytes | None:
        """Take a schedule that still stands away; returns the wake that is in it."""
        schedule, wake = self.standing_now.get(timer_ref, (None, b""))
        if schedule is None or schedule.seq != seq:
            return None
        del self.standing_now[timer_ref]
        return wake

    def lose(self, *, anew: bool) -> None:
        """All schedules are gone: purged by hand, or with the stream, which was made ``anew``."""
        self.standing_now.clear()
        if anew:
            self.created = f"{self.created} again"

    def _put(self, timer_ref: TimerRef, generation: int, at_ms: int, wake: bytes) -> int:
        self._seq += 1
        schedule = Schedule(self._seq, generation, at_ms)
        self.standing_now[timer_ref] = (schedule, wake)
        self.on_put(timer_ref, schedule)
        return self._seq

    def _drop(self, seq: int) -> bool:
        found = [ref for ref, (schedule, _) in self.standing_now.items() if schedule.seq == seq]
        for timer_ref in found:
            del self.standing_now[timer_ref]
        return bool(found)


class MemoryPublicity(_Trouble):
    """``Publicity`` in memory: what publishers were told, and what was recorded as refused."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[tuple[str, Outcome]] = []
        self.rejections: list[Rejection] = []

    async def outcome(self, reply_to: str, outcome: Outcome) -> None:
        self.outcomes.append((reply_to, outcome))

    async def reject(self, rejection: Rejection) -> None:
        await self._do(lambda: self.rejections.append(rejection))


class MemoryDelivery:
    """One delivery of a message to a service, which remembers how it was settled."""

    def __init__(
        self,
        subject: str,
        data: bytes,
        *,
        seq: int,
        stored_at_ms: int,
        headers: dict[str, str] | None = None,
        on_settled: Callable[[MemoryDelivery], Any] = lambda _: None,
    ) -> None:
        self.subject = subject
        self.data = data
        self.headers = headers
        self.seq = seq
        self.stored_at_ms = stored_at_ms
        self.answers: list[str] = []
        """``ack``, ``nak``, ``park`` and ``in_progress``, in order."""
        self.nak_delay_ms: int | None = None
        self._on_settled = on_settled

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged or given back."""
        return "ack" in self.answers or "nak" in self.answers

    async def ack(self) -> None:
        self.answers.append("ack")
        self._on_settled(self)

    async def nak(self, delay_ms: int = 0) -> None:
        self.answers.append("nak")
        self.nak_delay_ms = delay_ms
        self._on_settled(self)

    async def park(self) -> None:
        self.answers.append("park")

    async def in_progress(self) -> None:
        self.answers.append("in_progress")
