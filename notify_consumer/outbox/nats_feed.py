"""Keeps the index of the NATS outbox true: follows the bucket, and looks at it as a whole every other second.

The look tells the broker's time, how full the bucket is, whether its policy still keeps rows safe, and whether it is
the bucket that was followed. Where it is another one, or went back to an older state, everything is read anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from notify_consumer import events
from notify_consumer.errors import OutboxUnavailable
from notify_consumer.outbox.nats_bucket import Bucket, Sight
from notify_consumer.outbox.nats_index import Index
from notify_consumer.outbox.nats_record import UnreadableRow, read_place
from timer_service.jetstream.consume import Delivery
from timer_service.jetstream.follow import Follower
from timer_service.jetstream.topology import KV_OPERATION_HEADER
from timer_service.logs import get_logger

LOOK_S = 2.0
_CATCH_UP_S = 0.005
_LEVEL_S = 2.0


class Feed:
    """Follows ``bucket`` into ``index``."""

    def __init__(self, bucket: Bucket, index: Index) -> None:
        self._bucket = bucket
        self._index = index
        self.on_other: Callable[[], None] = lambda: None
        """Called when what was known of the rows is worth nothing."""
        self._log: Any = get_logger()
        self._follower: Follower | None = None
        self._caught_up = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        self._one_look = asyncio.Lock()
        self._created = ""
        self._newest_own = 0
        self._unreadable = 0
        self._distrusted = False
        self.fault: str | None = "the outbox is not open"
        """Why nothing may be taken in or claimed at present, None while it may."""

    async def start(self) -> None:
        """Read what stands; returns when the index has it. Repeating it does nothing. Raises OutboxUnavailable."""
        if self._looking is not None:
            return
        await self._bucket.provide()
        await self.look()
        if self.fault is not None:
            raise OutboxUnavailable(self.fault)
        self._bucket.connection.on_returned(self._look_now.set)
        self._looking = asyncio.create_task(self._keep_looking(), name="outbox.look")

    async def stop(self) -> None:
        """Follow no more. Repeating it does nothing."""
        self.fault = "the outbox is closed"
        if self._looking is not None:
            self._looking.cancel()
        if self._follower is not None:
            await self._follower.stop()

    def wrote(self, seq: int) -> None:
        """The broker acknowledged a write of our own. Acks come in the order of the stream."""
        if seq <= self._newest_own:
            self._distrusted = True
            self._look_now.set()
        self._newest_own = seq

    async def level(self, seq: int = 0) -> None:
        """Returns when all up to ``seq``, and every own write, has been read; or when that takes suspiciously long:
        where the newest message was deleted its sequence is never read."""
        wanted, loop = max(seq, self._newest_own), asyncio.get_running_loop()
        deadline = loop.time() + _LEVEL_S
        while self._follower is not None and max(self._follower.last_seq, self._unreadable) < wanted:
            if loop.time() > deadline:
                self._unreadable = wanted
            await asyncio.sleep(_CATCH_UP_S)

    # -- looking ------------------------------------------------------------------------------------------

    async def look(self) -> Sight | None:
        """Look at the bucket and act on what is found. Raises OutboxUnavailable."""
        async with self._one_look:
            return await self._look()

    async def _look(self) -> Sight | None:
        live, newest = len(self._index), self._newest_own
        if self._follower is not None:
            newest = max(newest, self._follower.last_seq)
        try:
            sight = await self._bucket.look()
            if sight is None:
                self._distrusted = True
                self._log.error(events.OUTBOX_LOST, bucket=self._bucket.stream)
                await self._bucket.provide()
                sight = await self._bucket.look()
            if sight is not None and (self._is_other(sight) or sight.messages < live or sight.last_seq < newest):
                await self._read_anew(sight)
        except OutboxUnavailable as error:
            self.fault = str(error)
            raise
        self.fault = f"{self._bucket.stream} is not there" if sight is None else sight.wrong
        return sight

    def _is_other(self, sight: Sight) -> bool:
        return self._follower is None or self._distrusted or sight.created != self._created

    async def _read_anew(self, sight: Sight) -> None:
        if self._follower is not None:
            await self._follower.stop()
            self._log.warning(events.OUTBOX_READ_ANEW, bucket=self._bucket.stream)
        self.fault = f"{self._bucket.stream} is being read"
        self._index.clear()
        self.on_other()
        self._newest_own = self._unreadable = 0
        self._caught_up = asyncio.Event()
        bucket = self._bucket
        self._follower = Follower(
            bucket.connection,
            bucket.publisher,
            bucket.stream,
            bucket.filter,
            self._on_delivery,
            self._caught_up.set,
            bodies=False,
        )
        with bucket.broker_errors():
            await self._follower.start()
        await self._read_up()
        self._index.advance(bucket.now_ms())
        self._created, self._distrusted = sight.created, False

    async def _read_up(self) -> None:
        """Wait for the follower, as long as it gets on."""
        follower = self._follower
        while follower is not None and not self._caught_up.is_set():
            seq = follower.last_seq
            try:
                async with asyncio.timeout(self._bucket.connection.timeout_s):
                    await self._caught_up.wait()
            except TimeoutError:
                if follower.last_seq == seq:
                    await follower.stop()
                    self._follower = None
                    raise OutboxUnavailable(f"{self._bucket.stream} can't be read at present") from None

    async def _keep_looking(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()
            try:
                await self.look()
            except OutboxUnavailable:
                continue  # it is in ``fault``, which every operation tells

    # -- following ----------------------------------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        key = delivery.subject[len(self._bucket.prefix) :]
        if KV_OPERATION_HEADER in (delivery.headers or {}):
            self._index.drop(key, delivery.seq)
            return
        try:
            place = read_place(delivery.headers)
        except UnreadableRow as error:
            self._log.error(events.OUTBOX_ROW_UNREADABLE, key=key, seq=delivery.seq, error=str(error))
            self._index.drop(key, delivery.seq)
            return
        self._index.follow(key, delivery.seq, place, delivery.stored_at_ms)
