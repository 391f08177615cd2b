"""Single rows of the NATS outbox: read, remembered, and moved on by one compare-and-set.

A write says in the row which one it was. Where its reply is missing, or a repetition meets what it had done before, the
row is read and the write recognised. Nobody is refused by memory, only by what the broker has now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from msgspec.structs import replace

from notify_consumer.errors import LeaseLost, OutboxUnavailable
from notify_consumer.outbox.base import State
from notify_consumer.outbox.nats_bucket import Bucket, Stored
from notify_consumer.outbox.nats_index import Index
from notify_consumer.outbox.nats_record import Record, key_of
from timer_service.errors import Ambiguous, StorageFull, WrongRevision

RECENT_BYTES = 32 * 2**20
_TRIES = 8
_TERSE_CHARS = 60

Change = Callable[[Stored, Record, str], Record]
"""Makes the next record of what is stored and the name of the write. Raises LeaseLost where it does not apply."""


class Rows:
    """Rows in ``bucket``; what is learnt of them goes into ``index``. ``on_write`` gets each acknowledged sequence."""

    def __init__(self, bucket: Bucket, index: Index, on_write: Callable[[int], None]) -> None:
        self._bucket = bucket
        self._index = index
        self._on_write = on_write
        self._recent = Recent()
        self.forget = self._recent.clear

    async def create(self, record: Record) -> bool:
        """Store a row where there is none, or an unreadable one. False: there is one, which stays as it is."""
        key, expected = key_of(record.resume_id), 0
        for _ in range(_TRIES):
            try:
                await self._write(key, record, expected)
            except (WrongRevision, Ambiguous):
                stored = await self.read(key)
            else:
                return True
            known = stored.record
            if known is not None and known.by == record.by:
                return True
            if known is not None and (known.readable or not record.readable):
                return False
            expected = stored.seq
            if known is not None:
                record = replace(record, inserted_ms=known.inserted_ms or stored.stored_ms)
        raise OutboxUnavailable(f"{key} changes too fast")

    async def step(self, key: str, change: Callable[[Stored, Record, str], Record], by: str) -> Stored:
        """Write what ``change`` makes of the row. Raises LeaseLost where it does, by what the broker has.

        ``by`` names the write: where the row says that it was carried out already, that is the result.
        """
        with self._bucket.broker_errors():
            stored = self._remembered(key)
            for _ in range(_TRIES):
                fresh = stored is None
                stored = stored or await self.read(key)
                if stored.record is None:
                    raise LeaseLost(key)
                if stored.record.by == by:
                    return stored
                try:
                    record = change(stored, stored.record, by)
                except LeaseLost:
                    if fresh:
                        raise
                    stored = None
                    continue
                try:
                    return await self._rewrite(key, record, stored)
                except (WrongRevision, Ambiguous):
                    stored = None
        raise OutboxUnavailable(f"{key} changes too fast")

    async def _rewrite(self, key: str, record: Record, before: Stored) -> Stored:
        """Where there is no room left an error is not worth failing for: a row that shrinks is taken even then."""
        record = replace(record, inserted_ms=record.inserted_ms or before.stored_ms)
        if self._bucket.terse and record.last_error:
            record = replace(record, last_error=record.last_error[:_TERSE_CHARS])
        try:
            return await self._write(key, record, before.seq)
        except StorageFull:
            if not record.last_error:
                raise
        return await self._write(key, replace(record, last_error=None), before.seq)

    async def _write(self, key: str, record: Record, expected: int) -> Stored:
        seq = await self._bucket.write(key, record, expected)
        self._on_write(seq)
        stored = Stored(record, seq, self._index.put(key, seq, record.place, self._bucket.written_ms()))
        self._recent.put(key, stored)
        return stored

    async def read(self, key: str) -> Stored:
        """What the broker has. Raises OutboxUnavailable, UnreadableRow."""
        known = self._index.get(key)
        with self._bucket.broker_errors():
            stored = await self._bucket.read(key)
        if stored.record is None:
            if known is not None:
                self._index.gone(key, known)
            return stored
        return self.learnt(key, stored, stored.record)

    def learnt(self, key: str, stored: Stored, record: Record) -> Stored:
        """``stored`` with the time that this process goes by."""
        return replace(stored, stored_ms=self._index.put(key, stored.seq, record.place, stored.stored_ms))

    def _remembered(self, key: str) -> Stored | None:
        """The row as this process wrote it last, unless it is known to have changed since."""
        entry, stored = self._index.get(key), self._recent.get(key)
        if entry is None or stored is None or entry.seq != stored.seq:
            return None
        return stored


class Recent:
    """Rows as this process wrote them last, up to a number of bytes; the ones untouched for longest go first."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def get(self, key: str) -> Stored | None:
        return self._rows.get(key)

    def put(self, key: str, stored: Stored) -> None:
        self._remove(key)
        if stored.record is None or stored.record.place.state in (State.DONE, State.DEAD):
            return
        self._rows[key] = stored
        self._bytes += len(stored.record.body)
        while self._bytes > RECENT_BYTES or len(self._rows) > RECENT_BYTES // 1024:
            self._remove(next(iter(self._rows)))

    def _remove(self, key: str) -> None:
        known = self._rows.pop(key, None)
        if known is not None and known.record is not None:
            self._bytes -= len(known.record.body)

    def clear(self) -> None:
        self._rows.clear()
        self._bytes = 0
