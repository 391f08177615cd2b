"""The outbox in MongoDB (5.0 or newer): one document a row, and nothing but atomic operations on single documents.

Writes are acknowledged by a majority, from its journal, and go to the primary. Time is the server's clock: ``$$NOW``
in what is written, and ``hello``'s localTime, read before, in what is looked for. So a row is never claimed too early,
though the two may be milliseconds apart.

What a batch cannot be here is all or none: when ``insert`` raises OutboxUnavailable some rows may be in. Repeating it
takes in the others.
"""

from __future__ import annotations

import asyncio
import datetime
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from pymongo import ASCENDING, DESCENDING, AsyncMongoClient, ReadPreference, ReturnDocument, UpdateOne, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError, PyMongoError
from pymongo.uri_parser import parse_uri

from notify_consumer.errors import BadSetting, LeaseLost, OutboxUnavailable
from notify_consumer.outbox import mongodb_steps as steps
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
from notify_consumer.outbox.mongodb_steps import Document
from timer_service.urls import hide_secrets, shown_url

T = TypeVar("T")
SCHEMA_VERSION = 1
DATABASE = "notify_consumer"
DEADLINE_S = 6.0
"""An operation on the server fails after this, whatever the server and the network do."""
_SELECTION_MS = 3_000
_MAJORITY_MS = 4_000
_PRUNE_BATCH = 5_000
_TOPOLOGY = re.compile(r" \(configured timeouts|, Timeout: ")
_UPSERT_ATTEMPTS = 3
_DUPLICATE_KEY = 11_000
_LIVE = (State.PENDING, State.CLAIMED, State.ANSWERED)
_FIRST_COME = [("lane", ASCENDING), ("claimable_at", ASCENDING), ("seq", ASCENDING)]
_LATEST = [("updated_at", DESCENDING), ("seq", DESCENDING)]


class MongoOutbox:
    """The outbox in the database that ``url`` names (``notify_consumer`` unless it names one), prefix ``outbox``.

    Collections and indexes are created when missing, if ``create``. Raises BadSetting for a URL that can't be used.
    """

    def __init__(self, url: str, *, create: bool = True, collection: str = "outbox") -> None:
        try:
            parsed = parse_uri(url, warn=False)
        except (PyMongoError, ValueError):
            raise BadSetting("not a URL that MongoDB's driver understands (passwords have to be escaped)") from None
        self._url = url
        self._shown = shown_url(url)
        self._secrets = [parsed["password"] or ""]
        self._database = parsed["database"] or DATABASE
        given = {name.lower() for name in parsed["options"]}
        self._options: dict[str, Any] = (
            {} if "serverselectiontimeoutms" in given else {"serverSelectionTimeoutMS": _SELECTION_MS}
        )
        self._create = create
        self._name = collection
        self._client: AsyncMongoClient[Document] | None = None
        self._prepared = False
        self._closed = False
        self._seen_ms = 0

    async def open(self) -> None:
        await self._try(self._rebase)

    async def close(self) -> None:
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def insert(self, rows: Sequence[NewRow]) -> set[str]:
        batch = secrets.token_hex(16)
        updates = [steps.insertion(row, batch) for row in rows]
        ids = [row.resume_id for row in rows]

        async def work(rows: AsyncCollection[Document]) -> set[str]:
            await _upserted(rows, updates)
            return {row["_id"] async for row in rows.find({"_id": {"$in": ids}, "batch": batch}, {"_id": True})}

        return await self._try(work) if updates else set()

    async def survey(self, limit: int) -> Survey:
        survey, now_ms = await self._try(lambda rows: _survey(rows, limit))
        if now_ms < self._seen_ms - CLOCK_STEP_MS:
            await self._try(self._rebase)
        self._seen_ms = now_ms
        return survey

    async def claim(self, owner: str, wanted: Mapping[str, int], lease_ms: int) -> list[Claim]:
        token = secrets.token_hex(16)
        step = [{"$set": steps.lease(owner, token, lease_ms)}]

        async def work(rows: AsyncCollection[Document]) -> list[Claim]:
            now_ms = await _now_ms(rows)
            claims: list[Claim] = []
            for lane, count in wanted.items():
                ready = {"lane": lane, "claimable_at": {"$lte": now_ms}}
                for _ in range(count):
                    row = await rows.find_one_and_update(
                        ready, step, sort=_FIRST_COME, return_document=ReturnDocument.AFTER
                    )
                    if row is None:
                        break
                    claims.append(_claim(row))
            return claims

        return await self._try(work)

    async def renew(self, claims: Sequence[Claim], lease_ms: int) -> set[str]:
        step = [{"$set": {"claimable_at": steps.after_ms(lease_ms), "updated_at": steps.NOW}}]

        async def work(rows: AsyncCollection[Document]) -> set[str]:
            return {claim.resume_id for claim in claims if not await _changed(rows, _mine(claim), step)}

        return await self._try(work)

    async def store_outcome(self, claim: Claim, feedback: Feedback) -> Claim:
        changes = {
            "state": State.ANSWERED.value,
            "lane": steps.exactly(FEEDBACK_LANE),
            # As text: a body may hold integers that BSON has no room for.
            "feedback": steps.exactly(msgspec.json.encode(feedback).decode()),
            "sends": steps.exactly(1),
            "last_error": None,
            "updated_at": steps.NOW,
        }
        await self._fenced(claim, changes)
        return replace(claim, lane=FEEDBACK_LANE, feedback=feedback, sends=1)

    async def finish(self, claim: Claim, settled: str) -> None:
        changes = {
            **steps.UNLEASED,
            "state": State.DONE.value,
            "settled": steps.exactly(storable(settled)),
            "body": steps.exactly(b""),
            "last_error": None,
            "claimable_at": None,
        }
        await self._fenced(claim, changes)

    async def back_off(self, claim: Claim, delay_ms: int, error: str) -> None:
        late = {"claimable_at": steps.after_ms(delay_ms), "last_error": steps.exactly(storable(error))}
        await self._fenced(claim, {**steps.UNLEASED, "state": steps.HANDED_BACK, **late})

    async def kill(self, claim: Claim, reason: str) -> None:
        dead = {"state": State.DEAD.value, "last_error": steps.exactly(storable(reason)), "claimable_at": None}
        await self._fenced(claim, {**steps.UNLEASED, **dead})

    async def release(self, claim: Claim) -> None:
        await self._fenced(claim, steps.RELEASED)

    async def requeue_feedback(self, resume_ids: Sequence[str]) -> set[str]:
        async def work(rows: AsyncCollection[Document]) -> set[str]:
            step = [{"$set": steps.REQUEUED}]
            return {each for each in resume_ids if await _changed(rows, {"_id": each, "state": "done"}, step)}

        return await self._try(work)

    async def revive(self, resume_id: str) -> bool:
        dead = {"_id": resume_id, "state": State.DEAD.value, "readable": True}
        return await self._try(lambda rows: _changed(rows, dead, [{"$set": steps.REVIVED}]))

    async def prune_done(self, older_than_ms: int) -> int:
        removed, last = 0, _PRUNE_BATCH
        while last == _PRUNE_BATCH:  # in pieces: each well within the deadline
            last = await self._try(lambda rows: _prune(rows, older_than_ms))
            removed += last
        return removed

    async def get(self, resume_id: str) -> Row | None:
        row = await self._try(lambda rows: rows.find_one({"_id": resume_id}))
        return None if row is None else _row(row)

    async def browse(self, state: State | None, limit: int) -> list[Row]:
        async def work(rows: AsyncCollection[Document]) -> list[Document]:
            found: list[Document] = []
            for each in State if state is None else (state,):
                found += [row async for row in rows.find({"state": each.value}).sort(_LATEST).limit(limit)]
            return found

        rows = sorted(await self._try(work), key=lambda row: (row["updated_at"], row["seq"]), reverse=True)
        return [_row(row) for row in rows[:limit]]

    async def counts(self) -> dict[State, int]:
        async def work(rows: AsyncCollection[Document]) -> dict[State, int]:
            return {state: await rows.count_documents({"state": state.value}) for state in State}

        return await self._try(work)

    async def _fenced(self, claim: Claim, changes: Document) -> None:
        """A write that only the owner of ``claim`` may do."""
        if not await self._try(lambda rows: _changed(rows, _mine(claim), [{"$set": changes}])):
            raise LeaseLost(claim.resume_id)

    # -- the server ---------------------------------------------------------------------------------------------

    async def _try(self, work: Callable[[AsyncCollection[Document]], Awaitable[T]]) -> T:
        if self._closed:
            raise self._unavailable("the outbox is closed")
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await work(await self._rows())
        except TimeoutError:
            raise self._unavailable(f"no answer within {DEADLINE_S:g} s") from None
        except PyMongoError as error:
            raise self._unavailable(str(error)) from None

    async def _rows(self) -> AsyncCollection[Document]:
        if self._client is None:
            self._client = AsyncMongoClient(self._url, **self._options)
        database = self._client.get_database(
            self._database,
            write_concern=WriteConcern("majority", wtimeout=_MAJORITY_MS, j=True),
            read_preference=ReadPreference.PRIMARY,
        )
        rows = database[self._name]
        if not self._prepared:
            await self._prepare(rows, database[f"{self._name}_schema"])
            self._prepared = True
        return rows

    async def _prepare(self, rows: AsyncCollection[Document], schema: AsyncCollection[Document]) -> None:
        """Indexes and the version, each created only when missing. Any number of processes at once."""
        if self._create:
            await schema.update_one({"_id": "outbox"}, {"$setOnInsert": {"version": SCHEMA_VERSION}}, upsert=True)
        found = await schema.find_one({"_id": "outbox"})
        if found is None:
            raise self._unavailable(f"there is no outbox (no collection {self._name}_schema)")
        if found["version"] > SCHEMA_VERSION:
            told = f"the outbox has schema version {found['version']}; this program knows {SCHEMA_VERSION}"
            raise self._unavailable(told)
        if self._create:
            await rows.create_index(_FIRST_COME, name="waiting")
            await rows.create_index([("state", ASCENDING), *_LATEST], name="state")

    async def _rebase(self, rows: AsyncCollection[Document]) -> None:
        ahead = {"$gt": await _now_ms(rows) + CLOCK_STEP_MS}
        waiting = {"state": {"$in": [state.value for state in _LIVE]}, "updated_at": ahead}
        await rows.update_many(waiting, [{"$set": steps.REBASED}])

    def _unavailable(self, text: str) -> OutboxUnavailable:
        told = _TOPOLOGY.split(text, maxsplit=1)[0]  # what follows changes each time, and so would the reason
        return OutboxUnavailable(f"{self._shown}: {hide_secrets(told[:500], self._secrets)}")


async def _now_ms(rows: AsyncCollection[Document]) -> int:
    """The server's clock."""
    told: datetime.datetime = (await rows.database.client.admin.command("hello"))["localTime"]
    return round(told.replace(tzinfo=datetime.UTC).timestamp() * 1000)


async def _upserted(rows: AsyncCollection[Document], updates: list[UpdateOne]) -> None:
    """Carry out upserts that may be repeated. Two that meet on a new id: one of them fails, and has to be."""
    for attempt in range(1, _UPSERT_ATTEMPTS + 1):
        try:
            await rows.bulk_write(updates, ordered=False)
        except BulkWriteError as error:
            details = error.details
            others = [each for each in details["writeErrors"] if each["code"] != _DUPLICATE_KEY]
            if others or details["writeConcernErrors"] or attempt == _UPSERT_ATTEMPTS:
                raise
        else:
            return


async def _survey(rows: AsyncCollection[Document], limit: int) -> tuple[Survey, int]:
    """Walks from lane to lane along the index, so that a long backlog in one costs nothing."""
    now_ms = await _now_ms(rows)
    lanes: dict[str, Waiting] = {}
    upcoming: list[int] = []
    beyond: Document = {}
    while (first := await rows.find_one({**beyond, "claimable_at": {"$gt": 0}}, sort=_FIRST_COME)) is not None:
        lane = first["lane"]
        beyond = {"lane": {"$gt": lane}}
        ready = await rows.count_documents({"lane": lane, "claimable_at": {"$lte": now_ms}}, limit=limit)
        if ready:
            lanes[lane] = Waiting(ready, first["claimable_at"])
        later = await rows.find_one({"lane": lane, "claimable_at": {"$gt": now_ms}}, sort=_FIRST_COME)
        if later is not None:
            upcoming.append(later["claimable_at"])
    return Survey(lanes, min(upcoming) - now_ms if upcoming else None), now_ms


async def _prune(rows: AsyncCollection[Document], older_than_ms: int) -> int:
    old = {"state": State.DONE.value, "updated_at": {"$lt": await _now_ms(rows) - older_than_ms}}
    ids = [row["_id"] async for row in rows.find(old, {"_id": True}).limit(_PRUNE_BATCH)]
    return (await rows.delete_many({**old, "_id": {"$in": ids}})).deleted_count if ids else 0


async def _changed(rows: AsyncCollection[Document], which: Document, step: list[Document]) -> bool:
    return (await rows.update_one(which, step)).matched_count > 0


def _mine(claim: Claim) -> Document:
    return {"_id": claim.resume_id, "token": claim.token}


def _claim(row: Document) -> Claim:
    return Claim(
        resume_id=row["_id"],
        flow=row["flow"],
        lane=row["lane"],
        body=row["body"],
        attempts=row["attempts"],
        sends=row["sends"],
        feedback=read_feedback(row["feedback"]),
        owner=row["owner"],
        token=row["token"],
        expires_at_ms=row["claimable_at"],
        waited_ms=row["updated_at"] - row["waited_from"],
    )


def _row(row: Document) -> Row:
    same = ("flow", "attempts", "sends", "body", "settled", "last_error", "owner")
    return Row(
        **{field: row[field] for field in same},
        resume_id=row["_id"],
        state=State(row["state"]),
        feedback=read_feedback(row["feedback"]),
        claimable_at_ms=row["claimable_at"],
        inserted_at_ms=row["inserted_at"],
        updated_at_ms=row["updated_at"],
    )
