"""The values that the core decides about: a timer, its past, and what may happen to it.

All are frozen msgspec structs: data classes whose constructor, comparison and ``replace`` are C code.
JSON that the service only carries (key, payload, edges) stays text here; the core never looks inside.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from timer_service.domain.identity import TimerRef

STATE_VERSION = 1
MAX_RECEIPTS = 16
MAX_TIMELINE = 16
MAX_DELAY_MS = 3_155_760_000_000  # 100 years of 365.25 days
MIN_DUE_MS = 0
MAX_DUE_MS = 7_258_118_400_000  # 2200-01-01T00:00:00Z

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""An integer in a stored record. What lies outside was never written by us, and could break arithmetic."""
EpochMs = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
DueMs = Annotated[int, msgspec.Meta(ge=MIN_DUE_MS, le=MAX_DUE_MS)]

JsonText = msgspec.Raw
"""JSON as its sender wrote it, carried unread."""

Absent = msgspec.UnsetType
ABSENT = msgspec.UNSET


class Phase(StrEnum):
    """Where a timer stands; the last three are ends."""

    WAITING = "waiting"
    ELAPSED = "elapsed"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED})

Answer = Literal["complete", "retry", "fail", "cancel", "replace"]


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of one accepted command: its id, a hash of its content, the code it was told."""

    command_id: str
    content: str
    code: str | None = None


class Occurrence(msgspec.Struct, frozen=True, gc=False):
    """One generation in the timeline. Instants are epoch milliseconds; null is "not yet" or "not known"."""

    generation: Number
    accepted_at_ms: EpochMs
    due_at_ms: DueMs
    woken_at_ms: EpochMs | None = None
    elapsed_at_ms: EpochMs | None = None
    resumed_at_ms: EpochMs | None = None
    resumes: Number = 0
    answer: Answer | None = None
    answered_at_ms: EpochMs | None = None
    lateness_ms: Number | None = None


class Order(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """When the broker stored a command: its millisecond, and its stream sequence within that."""

    stored_at_ms: EpochMs
    seq: Number


class Timer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A timer as stored: the state value in KV and, with ``status``, the terminal record.

    ``delay_ms`` is the last delay that a start or retry gave, ``applied`` the newest start or cancel,
    ``archive_seq`` the stream sequence of this timer's newest archive record (0: none),
    ``snapshot_seq`` where a payload too large to travel inline is kept. An end sets ``failure_code`` and
    ``message``, to null where there is nothing to say.
    """

    v: int
    timer_ref: TimerRef
    timer: JsonText
    phase: Phase
    generation: Number
    fence: Number
    due_at_ms: DueMs
    retries_used: Number
    max_retries: Number | None
    payload_sha256: str
    timeline: tuple[Occurrence, ...]
    receipts: tuple[Receipt, ...]
    applied: Order
    start_content: str
    delay_ms: Number | None = None
    payload: JsonText | Absent = ABSENT
    snapshot_seq: Number | None = None
    edges: JsonText | Absent = ABSENT
    runtime_sha256: str | None = None
    cancel_requested: bool = False
    archive_seq: Number = 0
    status: Phase | None = None
    failure_code: str | Absent | None = ABSENT
    message: str | Absent | None = ABSENT
    ended_at_ms: EpochMs | None = None

    @property
    def current(self) -> Occurrence:
        return self.timeline[-1]


class Due(msgspec.Struct, frozen=True, gc=False):
    """When a timer is due: ``delay_ms`` after the command was stored, or at an instant. Exactly one is set."""

    delay_ms: int | None = None
    at_ms: int | None = None

    def instant(self, accepted_at_ms: int) -> int:
        return self.at_ms if self.at_ms is not None else accepted_at_ms + (self.delay_ms or 0)


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What every command carries.

    ``content`` is a hash over its kind and all its fields but the id, ``order`` when the broker stored it,
    ``accepted_at_ms`` the same instant on the service's clock (a test clock adds its offset).
    """

    command_id: str
    timer_ref: TimerRef
    content: str
    order: Order
    accepted_at_ms: int


class Start(Command, frozen=True, kw_only=True):
    """Begin a timer, or the next generation of one."""

    timer: JsonText
    lineage: bool
    replace: bool
    due: Due
    max_retries: int | None
    payload: JsonText
    payload_sha256: str
    edges: JsonText | Absent
    runtime_sha256: str | None


class Cancel(Command, frozen=True, kw_only=True):
    """End a waiting timer. ``generation`` narrows it to that one; ``wait_ms`` is how long its start may be away."""

    generation: int | None
    reason: str | None
    wait_ms: int


class Feedback(Command, frozen=True, kw_only=True):
    """An answer to a resume: it must name the occurrence as the resume carried it."""

    generation: int
    fence: int


class Complete(Feedback, frozen=True, kw_only=True):
    """The work is done."""


class Retry(Feedback, frozen=True, kw_only=True):
    """Wait again: for ``due``, or for the last delay when absent."""

    due: Due | None


class Fail(Feedback, frozen=True, kw_only=True):
    """The work failed for good."""

    failure_code: str
    message: str | None


AnyCommand = Start | Cancel | Complete | Retry | Fail


class Wake(msgspec.Struct, frozen=True):
    """The driver says: this generation is due."""

    timer_ref: TimerRef
    generation: int
    woken_at_ms: int | None
    """When the driver published it; None in one that the broker publishes by a schedule."""
    revision: int = 0


class Resumed(msgspec.Struct, frozen=True, gc=False):
    """What is known of the resumes published for the present occurrence, carried into the next write."""

    at_ms: int
    count: int
