"""The embedded outbox: one SQLite file, which several processes on one machine may share.

Durable when an operation returns (WAL, synchronous=FULL). Leases run by the clock of the machine that has the file,
as SQLite reads it. Should that clock step back, what was to happen at a time which is now far off is put off anew
from the present: a lease for the time it was given, a backoff for its delay.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from notify_consumer.errors import LeaseLost
from notify_consumer.outbox.base import (
    CLOCK_STEP_MS,
    FEEDBACK_LANE,
    Claim,
    Feedback,
    NewRow,
    Row,
    State,
    Survey,
    Waiting,
    read_feedback,
    storable,
)
from notify_consumer.outbox.thread import SqliteThread

_PRUNE_BATCH = 5_000

_INSERT = """
    INSERT INTO outbox (
        resume_id, flow, lane, state, readable, body, last_error, claimable_at, inserted_at, updated_at
    ) VALUES (:resume_id, :flow, :flow, :state, :readable, :body, :unreadable, :claimable_at, :now, :now)
    ON CONFLICT (resume_id) DO UPDATE SET
        flow = excluded.flow, lane = excluded.lane, state = excluded.state, readable = 1,
        body = excluded.body, last_error = NULL, claimable_at = excluded.claimable_at,
        updated_at = excluded.updated_at
    WHERE NOT outbox.readable AND excluded.readable
"""

# Walks from lane to lane along the index, so that a long backlog in one costs nothing.
_SURVEY = """
    WITH RECURSIVE lanes (lane) AS (
        SELECT min(lane) FROM outbox WHERE claimable_at IS NOT NULL
        UNION ALL
        SELECT (SELECT min(lane) FROM outbox WHERE claimable_at IS NOT NULL AND lane > lanes.lane)
        FROM lanes WHERE lane IS NOT NULL
    )
    SELECT lane,
        (SELECT count(*) FROM (
            SELECT 1 FROM outbox WHERE lane = lanes.lane AND claimable_at <= :now LIMIT :limit)) AS ready,
        (SELECT min(claimable_at) FROM outbox WHERE lane = lanes.lane AND claimable_at <= :now) AS oldest,
        (SELECT min(claimable_at) FROM outbox WHERE lane = lanes.lane AND claimable_at > :now) AS next
    FROM lanes WHERE lane IS NOT NULL
"""

_CLAIMABLE = """
    SELECT * FROM outbox WHERE lane = ? AND claimable_at <= ? ORDER BY claimable_at, seq LIMIT ?
"""

_LEASE = """
    UPDATE outbox SET
        state = ?, owner = ?, token = ?, attempts = ?, sends = ?, claimable_at = ?, updated_at = ?
    WHERE seq = ?
"""

_RENEW = """
    UPDATE outbox SET claimable_at = :now + :lease_ms, updated_at = :now
    WHERE resume_id = :resume_id AND token = :token
"""
_ANSWER = """
    UPDATE outbox SET
        state = 'answered', lane = :lane, feedback = :feedback, sends = 1, last_error = NULL,
        updated_at = :now
    WHERE resume_id = :resume_id AND token = :token
"""
_FINISH = """
    UPDATE outbox SET
        state = 'done', settled = :settled, body = x'', last_error = NULL, claimable_at = NULL,
        owner = NULL, token = NULL, updated_at = :now
    WHERE resume_id = :resume_id AND token = :token
"""
_BACK_OFF = """
    UPDATE outbox SET
        state = iif(state = 'claimed', 'pending', state), last_error = :error,
        claimable_at = :now + :delay_ms, owner = NULL, token = NULL, updated_at = :now
    WHERE resume_id = :resume_id AND token = :token
"""
_KILL = """
    UPDATE outbox SET
        state = 'dead', last_error = :reason, claimable_at = NULL,
        owner = NULL, token = NULL, updated_at = :now
    WHERE resume_id = :resume_id AND token = :token
"""
_RELEASE = """
    UPDATE outbox SET
        state = iif(state = 'claimed', 'pending', state),
        attempts = attempts - (state = 'claimed'), sends = sends - (state = 'answered'),
        claimable_at = :now, owner = NULL, token = NULL, updated_at = :now
    WHERE resume_id = :resume_id AND token = :token
"""
_REQUEUE = """
    UPDATE outbox SET state = 'answered', sends = 0, claimable_at = :now, updated_at = :now
    WHERE resume_id = :resume_id AND state = 'done'
"""
_REVIVE = """
    UPDATE outbox SET
        state = 'pending', lane = flow, attempts = 0, sends = 0, feedback = NULL, claimable_at = :now,
        updated_at = :now
    WHERE resume_id = :resume_id AND state = 'dead' AND readable
"""
_PRUNE = """
    DELETE FROM outbox WHERE seq IN (
        SELECT seq FROM outbox WHERE state = 'done' AND updated_at < :before LIMIT :limit)
"""
_REBASE = """
    UPDATE outbox SET claimable_at = :now + max(claimable_at - updated_at, 0), updated_at = :now
    WHERE claimable_at IS NOT NULL AND updated_at > :now + :step
"""


class SqliteOutbox:
    """The outbox in the file ``path``; it and its folder are created when missing, if ``create``."""

    def __init__(self, path: str, *, create: bool = True) -> None:
        self._thread = SqliteThread(path, _rebase, create=create)
        self._seen_ms = 0

    async def open(self) -> None:
        await self._thread.read(_counts)

    async def close(self) -> None:
        await self._thread.close()

    async def insert(self, rows: Sequence[NewRow]) -> set[str]:
        return await self._thread.write(lambda db, now_ms: _insert(db, now_ms, rows))

    async def survey(self, limit: int) -> Survey:
        survey, now_ms = await self._thread.read(lambda db, now_ms: (_survey(db, now_ms, limit), now_ms))
        if now_ms < self._seen_ms - CLOCK_STEP_MS:
            await self._thread.write(_rebase)
        self._seen_ms = now_ms
        return survey

    async def claim(self, owner: str, wanted: Mapping[str, int], lease_ms: int) -> list[Claim]:
        lease = _Lease(storable(owner), secrets.token_hex(16), lease_ms)
        return await self._thread.write(lambda db, now_ms: _claim(db, now_ms, wanted, lease))

    async def renew(self, claims: Sequence[Claim], lease_ms: int) -> set[str]:
        return await self._thread.write(lambda db, now_ms: _renew(db, now_ms, claims, lease_ms))

    async def store_outcome(self, claim: Claim, feedback: Feedback) -> Claim:
        text = msgspec.json.encode(feedback).decode()
        await self._fenced(_ANSWER, claim, lane=FEEDBACK_LANE, feedback=text)
        return replace(claim, lane=FEEDBACK_LANE, feedback=feedback, sends=1)

    async def finish(self, claim: Claim, settled: str) -> None:
        await self._fenced(_FINISH, claim, settled=storable(settled))

    async def back_off(self, claim: Claim, delay_ms: int, error: str) -> None:
        await self._fenced(_BACK_OFF, claim, delay_ms=delay_ms, error=storable(error))

    async def kill(self, claim: Claim, reason: str) -> None:
        await self._fenced(_KILL, claim, reason=storable(reason))

    async def release(self, claim: Claim) -> None:
        await self._fenced(_RELEASE, claim)

    async def requeue_feedback(self, resume_ids: Sequence[str]) -> set[str]:
        return await self._thread.write(lambda db, now_ms: _each(db, now_ms, _REQUEUE, resume_ids))

    async def revive(self, resume_id: str) -> bool:
        return bool(await self._thread.write(lambda db, now_ms: _each(db, now_ms, _REVIVE, [resume_id])))

    async def prune_done(self, older_than_ms: int) -> int:
        removed, last = 0, _PRUNE_BATCH
        while last == _PRUNE_BATCH:  # in pieces: nobody waits behind a long one
            last = await self._thread.write(lambda db, now_ms: _prune(db, now_ms - older_than_ms))
            removed += last
        return removed

    async def get(self, resume_id: str) -> Row | None:
        rows = await self._select("WHERE resume_id = ?", resume_id)
        return rows[0] if rows else None

    async def browse(self, state: State | None, limit: int) -> list[Row]:
        order = "ORDER BY updated_at DESC, seq DESC LIMIT ?"
        if state is None:
            return await self._select(order, limit)
        return await self._select(f"WHERE state = ? {order}", state, limit)

    async def counts(self) -> dict[State, int]:
        return await self._thread.read(_counts)

    async def _select(self, rest: str, *values: object) -> list[Row]:
        sql = f"SELECT * FROM outbox {rest}"  # noqa: S608 - fixed texts of this module
        return await self._thread.read(lambda db, _: [_row(found) for found in db.execute(sql, values)])

    async def _fenced(self, sql: str, claim: Claim, **values: object) -> None:
        """A write that only the owner of ``claim`` may do."""
        bound = {"resume_id": claim.resume_id, "token": claim.token, **values}

        def job(db: sqlite3.Connection, now_ms: int) -> None:
            if not db.execute(sql, {**bound, "now": now_ms}).rowcount:
                raise LeaseLost(claim.resume_id)

        await self._thread.write(job)


class _Lease(msgspec.Struct, frozen=True):
    owner: str
    token: str
    lease_ms: int


def _insert(db: sqlite3.Connection, now_ms: int, rows: Sequence[NewRow]) -> set[str]:
    new = set()
    for row in rows:
        readable = row.unreadable is None
        values = {
            "resume_id": row.resume_id,
            "flow": storable(row.flow),
            "body": row.body,
            "unreadable": row.unreadable and storable(row.unreadable),
            "state": State.PENDING if readable else State.DEAD,
            "readable": readable,
            "claimable_at": now_ms if readable else None,
            "now": now_ms,
        }
        if db.execute(_INSERT, values).rowcount:
            new.add(row.resume_id)
    return new


def _survey(db: sqlite3.Connection, now_ms: int, limit: int) -> Survey:
    found = db.execute(_SURVEY, {"now": now_ms, "limit": limit}).fetchall()
    lanes = {row["lane"]: Waiting(row["ready"], row["oldest"]) for row in found if row["ready"]}
    upcoming = [row["next"] for row in found if row["next"] is not None]
    return Survey(lanes, min(upcoming) - now_ms if upcoming else None)


def _claim(db: sqlite3.Connection, now_ms: int, wanted: Mapping[str, int], lease: _Lease) -> list[Claim]:
    claims: list[Claim] = []
    for lane, count in wanted.items():
        found = db.execute(_CLAIMABLE, (lane, now_ms, count)).fetchall()
        claims += [_leased(db, now_ms, row, lease) for row in found]
    return claims


def _leased(db: sqlite3.Connection, now_ms: int, row: sqlite3.Row, lease: _Lease) -> Claim:
    answered = row["state"] == State.ANSWERED
    claim = Claim(
        resume_id=row["resume_id"],
        flow=row["flow"],
        lane=row["lane"],
        body=row["body"],
        attempts=row["attempts"] + (not answered),
        sends=row["sends"] + answered,
        feedback=read_feedback(row["feedback"]),
        owner=lease.owner,
        token=lease.token,
        expires_at_ms=now_ms + lease.lease_ms,
        waited_ms=now_ms - row["claimable_at"],
    )
    state = State.ANSWERED if answered else State.CLAIMED
    lent = (state, lease.owner, lease.token, claim.attempts, claim.sends, claim.expires_at_ms, now_ms)
    db.execute(_LEASE, (*lent, row["seq"]))
    return claim


def _renew(db: sqlite3.Connection, now_ms: int, claims: Sequence[Claim], lease_ms: int) -> set[str]:
    lost = set()
    for claim in claims:
        values = {"resume_id": claim.resume_id, "token": claim.token, "lease_ms": lease_ms, "now": now_ms}
        if not db.execute(_RENEW, values).rowcount:
            lost.add(claim.resume_id)
    return lost


def _each(db: sqlite3.Connection, now_ms: int, sql: str, resume_ids: Sequence[str]) -> set[str]:
    """Those of ``resume_ids`` that ``sql`` changed."""
    return {each for each in resume_ids if db.execute(sql, {"resume_id": each, "now": now_ms}).rowcount}


def _prune(db: sqlite3.Connection, before_ms: int) -> int:
    return db.execute(_PRUNE, {"before": before_ms, "limit": _PRUNE_BATCH}).rowcount


def _rebase(db: sqlite3.Connection, now_ms: int) -> None:
    db.execute(_REBASE, {"now": now_ms, "step": CLOCK_STEP_MS})


def _counts(db: sqlite3.Connection, _now_ms: int = 0) -> dict[State, int]:
    found = dict(db.execute("SELECT state, count(*) FROM outbox GROUP BY state").fetchall())
    return {state: found.get(state, 0) for state in State}


def _row(found: sqlite3.Row) -> Row:
    values: dict[str, Any] = {name: found[name] for name in Row.__struct_fields__ if name in found.keys()}  # noqa: SIM118
    return Row(
        **{**values, "state": State(found["state"]), "feedback": read_feedback(found["feedback"])},
        claimable_at_ms=found["claimable_at"],
        inserted_at_ms=found["inserted_at"],
        updated_at_ms=found["updated_at"],
    )
