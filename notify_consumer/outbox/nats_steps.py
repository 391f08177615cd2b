"""What each operation of the port makes of a row. Nothing here knows the broker.

Every function raises LeaseLost where the row does not stand as the operation needs it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from notify_consumer.errors import LeaseLost
from notify_consumer.outbox.base import Claim, Feedback, NewRow, State, storable
from notify_consumer.outbox.nats_record import VERSION, Place, Record


class Lease(msgspec.Struct, frozen=True):
    owner: str
    token: str
    lease_ms: int


def inserted(row: NewRow, by: str) -> Record:
    readable = row.unreadable is None
    state = State.PENDING if readable else State.DEAD
    place = Place(VERSION, state, storable(row.flow), 0 if readable else None)
    error = row.unreadable and storable(row.unreadable)
    return Record(row.resume_id, by, readable=readable, last_error=error, place=place, body=row.body)


def leased(record: Record, lease: Lease, by: str) -> Record:
    answered = record.place.state is State.ANSWERED
    return moved(
        record,
        State.ANSWERED if answered else State.CLAIMED,
        lease.lease_ms,
        by=by,
        owner=storable(lease.owner),
        token=lease.token,
        attempts=record.attempts + (not answered),
        sends=record.sends + answered,
    )


def renewed(record: Record, claim: Claim, lease_ms: int, by: str) -> Record:
    return moved(mine(record, claim), record.place.state, lease_ms, by=by)


def answered(record: Record, claim: Claim, feedback: Feedback, by: str) -> Record:
    """The lease has its whole length again from this write on: the broker dates the row anew."""
    wait_ms = mine(record, claim).place.wait_ms
    return moved(record, State.ANSWERED, wait_ms, by=by, feedback=feedback, sends=1, last_error=None)


def finished(record: Record, claim: Claim, settled: str, by: str) -> Record:
    return unleased(mine(record, claim), State.DONE, None, by=by, settled=storable(settled), body=b"", last_error=None)


def backed_off(record: Record, claim: Claim, delay_ms: int, error: str, by: str) -> Record:
    mine(record, claim)
    return unleased(record, _handed_back(record), delay_ms, by=by, last_error=storable(error))


def killed(record: Record, claim: Claim, reason: str, by: str) -> Record:
    return unleased(mine(record, claim), State.DEAD, None, by=by, last_error=storable(reason))


def released(record: Record, claim: Claim, by: str) -> Record:
    answered = mine(record, claim).place.state is State.ANSWERED
    return unleased(
        record,
        _handed_back(record),
        0,
        by=by,
        attempts=record.attempts - (not answered),
        sends=record.sends - answered,
    )


def requeued(record: Record, by: str) -> Record:
    if record.place.state is not State.DONE:
        raise LeaseLost(record.resume_id)
    return moved(record, State.ANSWERED, 0, by=by, sends=0)


def revived(record: Record, by: str) -> Record:
    if record.place.state is not State.DEAD or not record.readable:
        raise LeaseLost(record.resume_id)
    return moved(record, State.PENDING, 0, by=by, attempts=0, sends=0, feedback=None)


def mine(record: Record, claim: Claim) -> Record:
    """``record``, when ``claim`` still holds it."""
    if record.token != claim.token:
        raise LeaseLost(claim.resume_id)
    return record


def moved(record: Record, state: State, wait_ms: int | None, **changes: Any) -> Record:
    place = Place(VERSION, state, record.place.flow, wait_ms)
    return replace(record, place=place, **changes)


def unleased(record: Record, state: State, wait_ms: int | None, **changes: Any) -> Record:
    return moved(record, state, wait_ms, owner=None, token=None, **changes)


def _handed_back(record: Record) -> State:
    return State.PENDING if record.place.state is State.CLAIMED else record.place.state
