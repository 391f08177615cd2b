"""What the moving parts need from the outside, as small protocols.

``timer_service.jetstream`` has the adapters for a real broker, ``timer_service.testing`` those in memory; one
suite (tests/contract) runs on both.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from timer_service.domain.identity import TimerRef
from timer_service.domain.model import JsonText, Timer
from timer_service.wire.records import Outcome, Rejection, Resume


class Stored(msgspec.Struct, frozen=True):
    """What stands under a key: a timer, or (``timer`` None) a removal marker, or nothing (``revision`` 0)."""

    timer: Timer | None
    revision: int


class Fill(msgspec.Struct, frozen=True):
    """How full a resource is: bytes used of bytes allowed."""

    used: int
    limit: int

    @property
    def percent(self) -> float:
        return 100 * self.used / self.limit if self.limit > 0 else 0.0


class StreamState(msgspec.Struct, frozen=True):
    """What the broker says of the state stream."""

    created: str
    last_seq: int
    subjects: int


class StateStore(Protocol):
    """The truth. Every write names the revision that it replaces."""

    async def get(self, timer_ref: TimerRef) -> Stored:
        """What stands now, never an older copy. Raises UnreadableState, BrokerError."""
        ...

    async def put(self, timer: Timer, expected: int) -> int:
        """Store ``timer`` over revision ``expected`` (0: nothing there) and return the new revision.

        Raises WrongRevision (nothing changed), Ambiguous (read back), StorageFull or another BrokerError.
        """
        ...

    async def remove(self, timer: Timer, expected: int) -> int:
        """Replace revision ``expected`` by a removal marker with the timer's generation and fence."""
        ...


class Archive(Protocol):
    """The memory of ended timers."""

    async def last(self, timer_ref: TimerRef) -> Stored:
        """The newest terminal record; ``revision`` is its sequence, 0 when there is none."""
        ...

    async def append(self, record: Timer, expected: int) -> int:
        """Store a terminal record after the one with sequence ``expected``; WrongRevision when another is newer."""
        ...


class Snapshots(Protocol):
    """Payloads too large to travel in the state."""

    async def add(self, timer_ref: TimerRef, generation: int, payload: JsonText) -> int:
        """Store a payload and return its sequence; no two calls share one."""
        ...

    async def get(self, seq: int) -> JsonText:
        """The payload. Raises NotFound."""
        ...

    async def delete(self, seq: int) -> None:
        """Remove it; removing it again does nothing."""
        ...


class Resumes(Protocol):
    """The way to the flow engine."""

    async def publish(self, resume: Resume, attempt: int) -> int:
        """Put a resume into the stream; ``attempt`` counts from 0. Returns its sequence.

        Inside the broker's duplicate window the same attempt is stored once.
        """
        ...

    async def stands(self, resume_id: str, seq: int | None) -> bool:
        """Whether an earlier message of this resume is still in the stream; ``seq`` is its place, if known."""
        ...

    async def unread(self) -> dict[str, int]:
        """The place of every resume that stands in the stream now, by ``resume_id``. Raises BrokerError."""
        ...

    async def drop(self, seq: int) -> None:
        """Take the message at this place out of the stream; where it is not any more, nothing happens."""
        ...


class Wakes(Protocol):
    """The driver's way to whichever replica takes a timer on."""

    async def publish(self, timer_ref: TimerRef, generation: int, woken_at_ms: int, revision: int) -> None:
        """Store a wake. Raises BrokerError: it is then to be published again."""
        ...


class Schedule(msgspec.Struct, frozen=True):
    """A schedule that stands at the broker. ``generation`` is -1 where it is none of ours."""

    seq: int
    generation: int
    at_ms: int


class ScheduleStream(msgspec.Struct, frozen=True):
    """What the broker says of the stream of schedules and wakes."""

    created: str
    last_seq: int
    fill: Fill


class Schedules(Protocol):
    """What the broker is to publish as wakes later on: one a timer, a later one takes an earlier one's place."""

    async def put(self, timer_ref: TimerRef, generation: int, at_ms: int, revision: int) -> int:
        """Let a wake of this occurrence be published at ``at_ms`` by the broker's clock, about 250 ms from now at
        the earliest. Returns its sequence. Raises BrokerError: it may stand nevertheless when that is Ambiguous.
        """
        ...

    async def find(self, timer_ref: TimerRef) -> Schedule | None:
        """The schedule that stands for this timer, never an older copy."""
        ...

    async def drop(self, seq: int) -> bool:
        """Remove this one schedule, and no later one; False when it is not there (any more)."""
        ...

    async def standing(self) -> dict[str, Schedule]:
        """All that stand, by the timer_ref in their subject."""
        ...

    async def look(self) -> ScheduleStream:
        """The stream as it is now. Raises BrokerError."""
        ...


class Publicity(Protocol):
    """What publishers are told, and the record of what was refused."""

    async def outcome(self, reply_to: str, outcome: Outcome) -> None:
        """Tell a publisher; best effort, once."""
        ...

    async def reject(self, rejection: Rejection) -> None:
        """Record a refusal. Raises BrokerError."""
        ...
