"""What every outbox store promises. tests/contract/test_outbox.py holds each of them to it.

A row goes

    pending ──claim──► claimed ──store_outcome──► answered ──finish──► done
       ▲                  │  └───────────┐           │ ▲                 │
       └─back_off/release─┘          kill┴──► dead ◄─┘ └─requeue_feedback┘
       ▲                                       │
       └────────────────revive─────────────────┘

A row in ``claimed``, and one in ``answered`` that is being sent, is leased: it has an owner, a random token and an
expiry by the store's own clock. Every write of a claim is fenced by the token: once somebody else has claimed the
row, or it is settled, the former owner gets LeaseLost and nothing is written. A lease that ran out while nobody took
the row is still good, so an owner that was merely late loses nothing.

Rows wait in lanes, which is what fairness is about: a row's lane is its flow while its handler has yet to answer,
and FEEDBACK_LANE from then on. ``survey`` tells what waits, ``claim`` takes so many of each.

Every operation may be repeated, and raises OutboxUnavailable when the store does not carry it out or does not say
so. Any number of processes work on one store side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec

FEEDBACK_LANE = ""
"""Where answered rows wait. No flow has this name."""


CLOCK_STEP_MS = 1_000
"""A store's clock that goes back by less than this is no step: what was to happen is not put off for it."""


def storable(text: str) -> str:
    """``text`` with what not every store takes (NUL, half a surrogate pair) replaced: it must not hold up a row."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


class State(StrEnum):
    """Where a row stands."""

    PENDING = "pending"
    CLAIMED = "claimed"
    ANSWERED = "answered"
    DONE = "done"
    DEAD = "dead"


class NewRow(msgspec.Struct, frozen=True):
    """A resume to be taken in. With ``unreadable`` set it is kept as a dead row, with that as the reason."""

    resume_id: str
    flow: str
    body: bytes
    unreadable: str | None = None


FeedbackKind = Literal["complete", "retry", "fail"]


class Feedback(msgspec.Struct, frozen=True):
    """The command that tells a handler's answer: its kind and its whole body."""

    kind: FeedbackKind
    body: dict[str, Any]


def read_feedback(text: str | None) -> Feedback | None:
    """The feedback that a store keeps as JSON."""
    return None if text is None else msgspec.json.decode(text, type=Feedback)


class Claim(msgspec.Struct, frozen=True):
    """A leased row. ``waited_ms`` is how long it could have been claimed before it was.

    ``attempts`` counts the hand-offs begun, this one included; ``sends`` the feedbacks begun. ``feedback`` is None
    while the handler has yet to answer.
    """

    resume_id: str
    flow: str
    lane: str
    body: bytes
    attempts: int
    sends: int
    feedback: Feedback | None
    owner: str
    token: str
    expires_at_ms: int
    waited_ms: int


class Row(msgspec.Struct, frozen=True):
    """A row as people look at it. Instants are by the store's clock; ``body`` is empty once the row is done."""

    resume_id: str
    flow: str
    state: State
    attempts: int
    sends: int
    body: bytes
    feedback: Feedback | None
    settled: str | None
    last_error: str | None
    owner: str | None
    claimable_at_ms: int | None
    inserted_at_ms: int
    updated_at_ms: int


class Waiting(msgspec.Struct, frozen=True):
    """What can be claimed in one lane now: how many (counted up to a limit), and since when the oldest."""

    count: int
    oldest_ms: int


class Survey(msgspec.Struct, frozen=True):
    """What can be claimed now, by lane, and in how many milliseconds the next row can be (None: none will)."""

    lanes: Mapping[str, Waiting]
    next_in_ms: int | None


class Outbox(Protocol):
    """A store of resumes on their way. Use it from one event loop."""

    async def open(self) -> None:
        """Make the store usable, creating or migrating what is needed. Repeating it does nothing."""
        ...

    async def close(self) -> None:
        """Let go of the store. What was claimed stays claimed until its lease runs out."""
        ...

    async def insert(self, rows: Sequence[NewRow]) -> set[str]:
        """Take rows in, all of them when it returns; the resume_ids that were new. A known one is left as it is.

        When it raises none are in, or (NATS, MongoDB) some, which a repetition finds known.
        Only a row that was unreadable is replaced by a readable one of the same id.
        """
        ...

    async def survey(self, limit: int) -> Survey:
        """What waits, counting at most ``limit`` rows a lane."""
        ...

    async def claim(self, owner: str, wanted: Mapping[str, int], lease_ms: int) -> list[Claim]:
        """Lease up to ``wanted[lane]`` rows of each lane to ``owner``, those first that could be claimed first.

        Rows whose lease ran out are among them. Two callers never get the same row.
        """
        ...

    async def renew(self, claims: Sequence[Claim], lease_ms: int) -> set[str]:
        """Let leases run for ``lease_ms`` from now; returns the resume_ids of those that were lost."""
        ...

    async def store_outcome(self, claim: Claim, feedback: Feedback) -> Claim:
        """Record what the handler answered; the row stays leased, and its first send has begun. LeaseLost."""
        ...

    async def finish(self, claim: Claim, settled: str) -> None:
        """The feedback is settled, as ``settled`` tells: the row is done. LeaseLost."""
        ...

    async def back_off(self, claim: Claim, delay_ms: int, error: str) -> None:
        """Give the row back, to be claimed again after ``delay_ms``; ``error`` says why. LeaseLost."""
        ...

    async def kill(self, claim: Claim, reason: str) -> None:
        """Move the row to the dead state, where it stays until it is revived. LeaseLost."""
        ...

    async def release(self, claim: Claim) -> None:
        """Give the row back as if it had not been claimed: it can be claimed at once. LeaseLost."""
        ...

    async def requeue_feedback(self, resume_ids: Sequence[str]) -> set[str]:
        """Have the stored feedback of those that are done sent again; returns which they were."""
        ...

    async def revive(self, resume_id: str) -> bool:
        """Hand a dead, readable row to its handler anew, its attempts forgotten; False when there is none such."""
        ...

    async def prune_done(self, older_than_ms: int) -> int:
        """Remove rows that have been done for longer than this; returns how many."""
        ...

    async def get(self, resume_id: str) -> Row | None:
        """One row, None when it is not there."""
        ...

    async def browse(self, state: State | None, limit: int) -> list[Row]:
        """Rows, the latest change first; of one state, or of all."""
        ...

    async def counts(self) -> dict[State, int]:
        """How many rows there are in each state, 0 included."""
        ...
