"""The outbox in a NATS bucket: no system beside the broker that is there anyway. Any number of processes share it.

One key a row, and one message a key: every operation on a row is one compare-and-set on the sequence of its last
message, so of two writers one loses and reads again (``nats_rows``). What can be claimed is known from an index in
memory that follows the bucket (``nats_feed``); claims of different rows are under way at the same time. Between
processes the rows are not divided: who loses a row takes the next, and while that happens chooses at random among the
first few.

Durable when an operation returns as far as the broker's acknowledgement goes (``docs/durability.md``). Leases run by
the broker's clock (``nats_bucket`` says how it is known here), from when it stored the claim.

**All or none** is kept for want of room, and otherwise as far as it matters: when some rows of a batch were stored and
then the broker went away, the batch fails, and its repetition finds those known.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from notify_consumer.errors import LeaseLost, OutboxUnavailable
from notify_consumer.outbox import nats_steps as steps
from notify_consumer.outbox.base import FEEDBACK_LANE, Claim, Feedback, NewRow, Row, State, Survey
from notify_consumer.outbox.nats_bucket import Bucket, Stored
from notify_consumer.outbox.nats_feed import Feed
from notify_consumer.outbox.nats_index import Entry, Index
from notify_consumer.outbox.nats_record import Record, TooLarge, UnreadableRow, key_of
from notify_consumer.outbox.nats_rows import Rows
from timer_service.jetstream import topology
from timer_service.urls import shown_url

T = TypeVar("T")
U = TypeVar("U")

_SPREAD = 4
_CUT_BODY = 16_384
_PRUNE_BATCH = 256
_AT_ONCE = 256


class NatsOutbox:
    """The outbox in a bucket on the broker at ``url``; it is created when missing, if ``create``."""

    def __init__(
        self,
        url: str,
        *,
        creds: str | None = None,
        name: str = "notify-consumer.outbox",
        timeout_ms: int = 5_000,
        bucket: str = topology.OUTBOX_BUCKET,
        replicas: int = 1,
        max_bytes: int = topology.OUTBOX_MAX_BYTES,
        create: bool = True,
    ) -> None:
        spec = topology.outbox(max_bytes, bucket)
        self.bucket = Bucket(
            url, creds=creds, name=name, timeout_ms=timeout_ms, spec=spec, replicas=replicas, create=create
        )
        self._index = Index()
        self._feed = Feed(self.bucket, self._index)
        self._rows = Rows(self.bucket, self._index, self._feed.wrote)
        self._feed.on_other = self._rows.forget
        self._opening = asyncio.Lock()
        self._contended = False

    async def open(self) -> None:
        async with self._opening:
            await self.bucket.connect()
            await self._feed.start()

    async def close(self) -> None:
        await self._feed.stop()
        await self.bucket.close()

    # -- taking in ----------------------------------------------------------------------------------------

    async def insert(self, rows: Sequence[NewRow]) -> set[str]:
        self._check()
        unique: dict[str, NewRow] = {}
        for row in rows:
            if row.resume_id not in unique or unique[row.resume_id].unreadable is not None:
                unique[row.resume_id] = row
        if self.bucket.full:
            await self._refuse_unknown(unique)
        new = await _all(self._insert, unique.values())
        return {row.resume_id for row, is_new in zip(unique.values(), new, strict=True) if is_new}

    async def _refuse_unknown(self, resume_ids: Iterable[str]) -> None:
        """Without room only what is known already is no reason to fail."""
        if not all(await _all(self._is_known, resume_ids)):
            raise OutboxUnavailable(f"{self.bucket.stream} is full: finishing goes on, new resumes wait for room")

    async def _is_known(self, resume_id: str) -> bool:
        return (await self._rows.read(key_of(resume_id))).seq > 0

    async def _insert(self, row: NewRow) -> bool:
        with self.bucket.broker_errors():
            try:
                return await self._rows.create(steps.inserted(row, secrets.token_hex(8)))
            except UnreadableRow:
                return False  # it stays as it is, and is on the log
            except TooLarge as error:
                dead = NewRow(row.resume_id, row.flow, row.body[:_CUT_BODY], str(error))
                return await self._rows.create(steps.inserted(dead, secrets.token_hex(8)))

    # -- claiming -----------------------------------------------------------------------------------------

    async def survey(self, limit: int) -> Survey:
        self._check()
        self._index.advance(self.bucket.now_ms())
        return self._index.survey(limit, self.bucket.written_ms())

    async def claim(self, owner: str, wanted: Mapping[str, int], lease_ms: int) -> list[Claim]:
        """What fails on the way does not keep the claims that were made: whoever has them can work on them.

        Where there are fewer rows than wanted, what others have stored until now is waited for, and looked at too.
        """
        self._check()
        lease = steps.Lease(owner, secrets.token_hex(16), lease_ms)
        claims = await self._claim_lanes(wanted, lease)
        had = Counter(claim.lane for claim in claims)
        missing = {lane: count - had[lane] for lane, count in wanted.items() if count > had[lane]}
        if missing:
            try:
                sight = await self._feed.look()
                await self._feed.level(0 if sight is None else sight.last_seq)
                claims += await self._claim_lanes(missing, lease)
            except OutboxUnavailable:
                if not claims:
                    raise
        return claims

    async def _claim_lanes(self, wanted: Mapping[str, int], lease: steps.Lease) -> list[Claim]:
        self._index.advance(self.bucket.now_ms())
        found = await asyncio.gather(*(self._claim_lane(lane, count, lease) for lane, count in wanted.items()))
        claims = [claim for claims, _ in found for claim in claims]
        failures = [failure for _, failure in found if failure is not None]
        if failures and not claims:
            raise failures[0]
        return claims

    async def _claim_lane(
        self, lane: str, count: int, lease: steps.Lease
    ) -> tuple[list[Claim], OutboxUnavailable | None]:
        claims: list[Claim] = []
        tried: list[tuple[str, Entry]] = []
        failure = None
        try:
            while failure is None and len(claims) < count and (rows := self._choose(lane, count - len(claims))):
                tried += rows
                results = await asyncio.gather(*(self._claim(*row, lease) for row in rows), return_exceptions=True)
                claims += [result for result in results if isinstance(result, Claim)]
                self._contended = any(isinstance(result, LeaseLost) for result in results)
                failure = _failure(results)
        finally:
            for key, entry in tried:
                self._index.give_back(key, entry)
        return claims, failure

    def _choose(self, lane: str, wanted: int) -> list[tuple[str, Entry]]:
        """The first rows of a lane; some of the first where others are after them too."""
        if not self._contended:
            return self._index.take(lane, wanted)
        rows = self._index.take(lane, wanted * _SPREAD)
        chosen = sorted(random.sample(range(len(rows)), min(wanted, len(rows))))
        for at in set(range(len(rows))) - set(chosen):
            self._index.give_back(*rows[at])
        return [rows[at] for at in chosen]

    async def _claim(self, key: str, entry: Entry, lease: steps.Lease) -> Claim:
        lane, at_ms, taken_ms = entry.place.lane, entry.at_ms or 0, self.bucket.now_ms()

        def lend(stored: Stored, record: Record, by: str) -> Record:
            if stored.seq != entry.seq:
                raise LeaseLost(key)
            return steps.leased(record, lease, by)

        try:
            stored = await self._rows.step(key, lend, f"{lease.token}/claim")
        except UnreadableRow:
            self._index.set_aside(key, entry)
            raise
        record = stored.record
        assert record is not None
        return Claim(
            resume_id=record.resume_id,
            flow=record.place.flow,
            lane=lane,
            body=record.body,
            attempts=record.attempts,
            sends=record.sends,
            feedback=record.feedback,
            owner=lease.owner,
            token=lease.token,
            expires_at_ms=stored.stored_ms + lease.lease_ms,
            waited_ms=max(0, taken_ms - at_ms),
        )

    async def renew(self, claims: Sequence[Claim], lease_ms: int) -> set[str]:
        async def is_lost(claim: Claim) -> bool:
            try:
                await self._fenced(claim, secrets.token_hex(8), partial(_renewed, claim=claim, lease_ms=lease_ms))
            except LeaseLost:
                return True
            return False

        lost = await _all(is_lost, claims)
        return {claim.resume_id for claim, is_gone in zip(claims, lost, strict=True) if is_gone}

    # -- what an owner writes -----------------------------------------------------------------------------

    async def store_outcome(self, claim: Claim, feedback: Feedback) -> Claim:
        await self._fenced(claim, "answer", lambda record, by: steps.answered(record, claim, feedback, by))
        return replace(claim, lane=FEEDBACK_LANE, feedback=feedback, sends=1)

    async def finish(self, claim: Claim, settled: str) -> None:
        await self._fenced(claim, "finish", lambda record, by: steps.finished(record, claim, settled, by))

    async def back_off(self, claim: Claim, delay_ms: int, error: str) -> None:
        await self._fenced(claim, "back_off", lambda record, by: steps.backed_off(record, claim, delay_ms, error, by))

    async def kill(self, claim: Claim, reason: str) -> None:
        await self._fenced(claim, "kill", lambda record, by: steps.killed(record, claim, reason, by))

    async def release(self, claim: Claim) -> None:
        await self._fenced(claim, "release", lambda record, by: steps.released(record, claim, by))

    async def _fenced(self, claim: Claim, what: str, change: Callable[[Record, str], Record]) -> None:
        await self._rows.step(
            key_of(claim.resume_id), lambda _, record, by: change(record, by), f"{claim.token}/{what}"
        )

    # -- by anybody ---------------------------------------------------------------------------------------

    async def requeue_feedback(self, resume_ids: Sequence[str]) -> set[str]:
        unique = sorted(set(resume_ids))
        again = await _all(partial(self._changed, steps.requeued), unique)
        return {resume_id for resume_id, is_again in zip(unique, again, strict=True) if is_again}

    async def revive(self, resume_id: str) -> bool:
        return await self._changed(steps.revived, resume_id)

    async def _changed(self, change: Callable[[Record, str], Record], resume_id: str) -> bool:
        try:
            await self._rows.step(key_of(resume_id), lambda _, record, by: change(record, by), secrets.token_hex(8))
        except (LeaseLost, UnreadableRow):
            return False
        return True

    async def prune_done(self, older_than_ms: int) -> int:
        """Fenced like all else: a row is removed by the sequence at which it became done, and only that one."""
        self._check()
        await self._feed.level()
        before_ms, removed = self.bucket.now_ms() - older_than_ms, 0
        while seqs := self._index.done_before(before_ms, _PRUNE_BATCH):
            removed += sum(await _all(self._delete, seqs))
        return removed

    async def _delete(self, seq: int) -> bool:
        with self.bucket.broker_errors():
            return await self.bucket.delete(seq)

    # -- looking ------------------------------------------------------------------------------------------

    async def get(self, resume_id: str) -> Row | None:
        stored = await self._rows.read(key_of(resume_id))
        return None if stored.record is None else _row(stored.record, stored.stored_ms)

    async def browse(self, state: State | None, limit: int) -> list[Row]:
        self._check()
        await self._feed.level()
        rows: list[Row] = []
        seqs = self._index.latest(state)
        while len(rows) < limit and (batch := [seq for _, seq in zip(range(limit - len(rows)), seqs, strict=False)]):
            found = await self.bucket.read_seqs(batch)
            rows += [self._row(stored) for stored in found if stored.record is not None]
        return [row for row in rows if state in (None, row.state)]

    def _row(self, stored: Stored) -> Row:
        assert stored.record is not None
        known = self._rows.learnt(key_of(stored.record.resume_id), stored, stored.record)
        return _row(stored.record, known.stored_ms)

    async def counts(self) -> dict[State, int]:
        sight = await self._feed.look()
        messages, last_seq = (0, 0) if sight is None else (sight.messages, sight.last_seq)
        await self._feed.level(last_seq)
        counted = self._index.counts()
        counted[State.DONE] = max(0, messages - len(self._index) - len(self._index.strangers))
        return counted

    def _check(self) -> None:
        if self._feed.fault is not None:
            raise OutboxUnavailable(self._feed.fault)
        if not self.bucket.connection.connected:
            raise OutboxUnavailable(f"{shown_url(self.bucket.connection.url)}: not connected")


def _renewed(record: Record, by: str, *, claim: Claim, lease_ms: int) -> Record:
    return steps.renewed(record, claim, lease_ms, by)


async def _all(work: Callable[[U], Awaitable[T]], items: Iterable[U]) -> list[T]:
    """``work`` on each, many at once; all are finished before the first failure is raised."""
    todo, results = list(items), []
    for start in range(0, len(todo), _AT_ONCE):
        results += await asyncio.gather(*map(work, todo[start : start + _AT_ONCE]), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _failure(results: Sequence[object]) -> OutboxUnavailable | None:
    """What failed, so that it is no use to go on; raises what nobody foresaw."""
    for result in results:
        if isinstance(result, OutboxUnavailable) and not isinstance(result, UnreadableRow):
            return result
        if isinstance(result, BaseException) and not isinstance(result, (LeaseLost, UnreadableRow)):
            raise result
    return None


def _row(record: Record, stored_ms: int) -> Row:
    wait_ms = record.place.wait_ms
    return Row(
        resume_id=record.resume_id,
        flow=record.place.flow,
        state=record.place.state,
        attempts=record.attempts,
        sends=record.sends,
        body=record.body,
        feedback=record.feedback,
        settled=record.settled,
        last_error=record.last_error,
        owner=record.owner,
        claimable_at_ms=None if wait_ms is None else stored_ms + wait_ms,
        inserted_at_ms=record.inserted_ms or stored_ms,
        updated_at_ms=stored_ms,
    )
