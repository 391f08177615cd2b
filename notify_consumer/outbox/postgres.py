"""The outbox in PostgreSQL (13 or newer): for consumers on several machines, or where a PostgreSQL is there anyway.

Each operation is one statement and a transaction of its own, so nothing stays locked between two messages, whatever
becomes of this process; answers and ends that come while others are on their way share a statement. Time is the
server's clock as it is at that moment. Should it step back (a standby with another clock takes over), what was to
happen at a time which is now far off is put off anew from the present.

Through PgBouncer use session pooling. With transaction pooling the limits that are set for each session (time-outs,
planner) do not hold, and prepared statements need PgBouncer 1.21 or newer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import psycopg
from msgspec.structs import replace

from notify_consumer.errors import BadSetting, LeaseLost, OutboxUnavailable
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
from notify_consumer.outbox.gathering import Gathered
from notify_consumer.outbox.postgres_connections import Connections, Session
from notify_consumer.outbox.postgres_statements import MIGRATIONS, Statements

SCHEMA = "notify_consumer"
LOCK_TIMEOUT_MS = 2_000
STATEMENT_TIMEOUT_MS = 5_000
_LANE_CHARS = 200  # of a flow's name; what is longer does not fit into an index
_PRUNE_BATCH = 5_000

Found = list[tuple[Any, ...]]
_Write = tuple[Claim, str]


class PostgresOutbox:
    """The outbox in the database of ``url`` (as libpq takes it), in tables of its own in ``schema``.

    They are created when missing, if ``create``. Raises BadSetting for a URL that can't be used.
    """

    def __init__(self, url: str, *, create: bool = True, schema: str = SCHEMA) -> None:
        try:
            self._connections = Connections(url, self._prepare)
        except psycopg.Error as error:
            # Anything else it says may quote the password.
            told = f": {error}" if "query parameter" in str(error) else ""
            raise BadSetting(f"not a URL that libpq understands{told}") from None
        if not self._connections.ports_are_numbers:  # libpq complains about it at each connection only
            raise BadSetting("a port has to be a number (and a password to be escaped)")
        self._create = create
        self._schema = schema
        self._statements = Statements(schema)
        self._answers = Gathered[_Write](partial(self._write, self._statements.answer, lane=FEEDBACK_LANE))
        self._ends = Gathered[_Write](partial(self._write, self._statements.finish))
        self._seen_ms = 0

    async def open(self) -> None:
        await self._run(self._statements.rebase, step=CLOCK_STEP_MS)

    async def close(self) -> None:
        await self._connections.close()

    async def insert(self, rows: Sequence[NewRow]) -> set[str]:
        chosen = _each_once(rows)
        if not chosen:
            return set()
        found, _ = await self._run(
            self._statements.insert,
            lane_chars=_LANE_CHARS,
            ids=[row.resume_id for row in chosen],
            flows=[storable(row.flow) for row in chosen],
            bodies=[row.body for row in chosen],
            unreadables=[row.unreadable and storable(row.unreadable) for row in chosen],
        )
        return {resume_id for (resume_id,) in found}

    async def survey(self, limit: int) -> Survey:
        found, _ = await self._run(self._statements.survey, limit=limit)
        now_ms = found[0][0]
        if now_ms < self._seen_ms - CLOCK_STEP_MS:
            await self._run(self._statements.rebase, step=CLOCK_STEP_MS)
        self._seen_ms = now_ms
        lanes = {lane: Waiting(ready, oldest) for _, lane, ready, oldest, _ in found if ready}
        upcoming = [later for *_, later in found if later is not None]
        return Survey(lanes, min(upcoming) - now_ms if upcoming else None)

    async def claim(self, owner: str, wanted: Mapping[str, int], lease_ms: int) -> list[Claim]:
        token = secrets.token_hex(16)
        found, _ = await self._run(
            self._statements.claim,
            lanes=[*wanted],
            counts=[*wanted.values()],
            owner=storable(owner),
            token=token,
            lease_ms=lease_ms,
        )
        return [_claim(row, owner, token, lease_ms) for row in sorted(found, key=lambda row: row[:2])]

    async def renew(self, claims: Sequence[Claim], lease_ms: int) -> set[str]:
        ordered = sorted(claims, key=lambda claim: claim.resume_id)
        ids = [claim.resume_id for claim in ordered]
        tokens = [claim.token for claim in ordered]
        found, _ = await self._run(self._statements.renew, ids=ids, tokens=tokens, lease_ms=lease_ms)
        return set(ids) - {resume_id for (resume_id,) in found}

    async def store_outcome(self, claim: Claim, feedback: Feedback) -> Claim:
        if not await self._answers.write((claim, msgspec.json.encode(feedback).decode())):
            raise LeaseLost(claim.resume_id)
        return replace(claim, lane=FEEDBACK_LANE, feedback=feedback, sends=1)

    async def finish(self, claim: Claim, settled: str) -> None:
        if not await self._ends.write((claim, storable(settled))):
            raise LeaseLost(claim.resume_id)

    async def back_off(self, claim: Claim, delay_ms: int, error: str) -> None:
        await self._fenced(self._statements.back_off, claim, delay_ms=delay_ms, error=storable(error))

    async def kill(self, claim: Claim, reason: str) -> None:
        await self._fenced(self._statements.kill, claim, reason=storable(reason))

    async def release(self, claim: Claim) -> None:
        await self._fenced(self._statements.release, claim)

    async def requeue_feedback(self, resume_ids: Sequence[str]) -> set[str]:
        found, _ = await self._run(self._statements.requeue, ids=[*resume_ids])
        return {resume_id for (resume_id,) in found}

    async def revive(self, resume_id: str) -> bool:
        found, _ = await self._run(self._statements.revive, resume_id=resume_id, lane_chars=_LANE_CHARS)
        return bool(found)

    async def prune_done(self, older_than_ms: int) -> int:
        removed, last = 0, _PRUNE_BATCH
        while last == _PRUNE_BATCH:  # in pieces: each well within the time-out
            _, last = await self._run(self._statements.prune, older_than_ms=older_than_ms, limit=_PRUNE_BATCH)
            removed += last
        return removed

    async def get(self, resume_id: str) -> Row | None:
        found, _ = await self._run(self._statements.get, resume_id=resume_id)
        return _row(found[0]) if found else None

    async def browse(self, state: State | None, limit: int) -> list[Row]:
        states = [*State] if state is None else [state]
        found, _ = await self._run(self._statements.browse, states=[str(each) for each in states], limit=limit)
        return [_row(each) for each in found]

    async def counts(self) -> dict[State, int]:
        found, _ = await self._run(self._statements.counts)
        counted: dict[str, int] = dict(found)
        return {state: counted.get(state, 0) for state in State}

    async def _write(self, statement: bytes, writes: Sequence[_Write], **values: object) -> list[bool]:
        """Writes that only the owners of the claims may do; which of them were done."""
        # In one order, as renew() has it: statements that meet on several rows wait, and don't lock each other out.
        ordered = sorted(writes, key=lambda write: write[0].resume_id)
        found, _ = await self._run(
            statement,
            ids=[claim.resume_id for claim, _ in ordered],
            tokens=[claim.token for claim, _ in ordered],
            values=[value for _, value in ordered],
            **values,
        )
        done = set(found)
        return [(claim.resume_id, claim.token) in done for claim, _ in writes]

    async def _fenced(self, statement: bytes, claim: Claim, **values: object) -> None:
        """A write that only the owner of ``claim`` may do."""
        _, written = await self._run(statement, resume_id=claim.resume_id, token=claim.token, **values)
        if not written:
            raise LeaseLost(claim.resume_id)

    async def _run(self, statement: bytes, **values: object) -> tuple[Found, int]:
        """One statement: what it returned, and how many rows it touched."""

        async def work(session: Session) -> tuple[Found, int]:
            cursor = await session.execute(statement, values, binary=True)
            return await cursor.fetchall() if cursor.description else [], cursor.rowcount

        return await self._connections.run(work)

    # -- a new connection -------------------------------------------------------------------------------------

    async def _prepare(self, session: Session) -> None:
        """Limits for the session, and the tables as this program knows them. Any number of processes at once."""
        encoding = session.pgconn.parameter_status(b"server_encoding")
        if encoding != b"UTF8":
            raise self._unusable(f"the database is in {(encoding or b'?').decode()}; it has to be in UTF8")
        await session.execute(
            self._statements.settings,
            {"lock_timeout": f"{LOCK_TIMEOUT_MS}ms", "statement_timeout": f"{STATEMENT_TIMEOUT_MS}ms"},
        )
        version = await self._version(session)
        if version < len(MIGRATIONS) and not (self._create or version):
            raise self._unusable(f"there is no outbox (no tables in schema {self._schema})")
        if version < len(MIGRATIONS):
            await self._migrate(session)
        elif version > len(MIGRATIONS):
            raise self._unusable(f"the outbox has schema version {version}; this program knows {len(MIGRATIONS)}")

    async def _version(self, session: Session) -> int:
        statements = self._statements
        if not await _value(session, statements.has_versions, versions=statements.versions_name):
            return 0
        return await _value(session, statements.version) or 0

    async def _migrate(self, session: Session) -> None:
        statements = self._statements
        async with session.transaction():
            await session.execute(statements.lock, {"name": f"durable-timer outbox {self._schema}"})
            if not await _value(session, statements.has_schema, schema=statements.schema_name):
                await session.execute(statements.make_schema)
            if not await _value(session, statements.has_versions, versions=statements.versions_name):
                await session.execute(statements.make_versions)
            done = await _value(session, statements.version) or 0
            for number, step in enumerate(statements.migrations[done:], done + 1):
                await session.execute(step)
                await session.execute(statements.stepped, {"version": number})

    def _unusable(self, text: str) -> OutboxUnavailable:
        return OutboxUnavailable(f"{self._connections.shown}: {text}")


async def _value(session: Session, statement: bytes, **values: object) -> Any:
    found = await (await session.execute(statement, values)).fetchone()
    return None if found is None else found[0]


def _each_once(rows: Sequence[NewRow]) -> list[NewRow]:
    """Of rows with the same id the one that stays in the end: the first readable one, else the first."""
    chosen: dict[str, NewRow] = {}
    for row in rows:
        known = chosen.setdefault(row.resume_id, row)
        if known.unreadable is not None and row.unreadable is None:
            chosen[row.resume_id] = row
    return [*chosen.values()]


def _claim(found: tuple[Any, ...], owner: str, token: str, lease_ms: int) -> Claim:
    since_ms, _, resume_id, flow, lane, body, attempts, sends, feedback, now_ms = found
    return Claim(
        resume_id=resume_id,
        flow=flow,
        lane=lane,
        body=body,
        attempts=attempts,
        sends=sends,
        feedback=read_feedback(feedback),
        owner=owner,
        token=token,
        expires_at_ms=now_ms + lease_ms,
        waited_ms=now_ms - since_ms,
    )


def _row(found: tuple[Any, ...]) -> Row:
    resume_id, flow, state, attempts, sends, body, feedback, settled, last_error, owner, *instants = found[:13]
    claimable_at_ms, inserted_at_ms, updated_at_ms = instants
    return Row(
        resume_id=resume_id,
        flow=flow,
        state=State(state),
        attempts=attempts,
        sends=sends,
        body=body,
        feedback=read_feedback(feedback),
        settled=settled,
        last_error=last_error,
        owner=owner,
        claimable_at_ms=claimable_at_ms,
        inserted_at_ms=inserted_at_ms,
        updated_at_ms=updated_at_ms,
    )
