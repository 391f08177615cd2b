"""The bucket of the NATS outbox: made, looked at, read and written. What the rows mean is not known here.

**Whose clock.** The broker dates every message when it stores it, and its answer to ``STREAM.INFO`` carries the time
at which it was given. From that, and from when the question left and the answer came on the monotonic clock, follow
two bounds: the broker's time is at least that of the answer plus what has passed since it came, and at most that plus
what has passed since it was asked for. Leases are judged by the lower bound, so never too early, by at most one round
trip too late. The wall clock of this process is not asked, and where the broker's own clock steps the next look, two
seconds later, goes along.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from notify_consumer.errors import OutboxUnavailable
from notify_consumer.outbox.base import CLOCK_STEP_MS
from notify_consumer.outbox.nats_record import HEADER, Record, UnreadableRow, decode, encode
from timer_service.errors import BrokerError, Forbidden, NotFound
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.publish import Message, Publisher
from timer_service.jetstream.stores import LastMessages, delete_message
from timer_service.jetstream.watch import stamp_ms
from timer_service.urls import shown_url

INSERT_UP_TO = 0.75
"""So full a bucket takes no new rows: the rest is kept for what those that it has still have to write."""
TERSE_FROM = 0.85
"""So full a bucket keeps no long errors, which are what rows can grow by without end."""
_OVERHEAD_BYTES = 200
_MUST_BE = {
    "storage": "file",
    "retention": "limits",
    "discard": "new",
    "max_age": 0,
    "max_msgs_per_subject": 1,
    "max_msgs": -1,
    "allow_direct": True,
    "deny_delete": False,
    "no_ack": False,
    "sealed": False,
}
"""Under any other policy rows could vanish, or not be read or removed. What is absent on the wire is False or 0."""


class Stored(msgspec.Struct, frozen=True):
    """What stands under a key: None where there is no row. ``seq`` is 0 where there is nothing at all."""

    record: Record | None
    seq: int
    stored_ms: int


class Sight(msgspec.Struct, frozen=True):
    """The bucket at a glance. ``created`` changes when it is another one under the same name."""

    messages: int
    last_seq: int
    created: str
    wrong: str | None


class BrokerClock:
    """The broker's time by the last look: see the head of this module. ``monotonic_s`` is this process's pulse."""

    def __init__(self) -> None:
        self._behind_ms = -math.inf
        self._ahead_ms = -math.inf

    def sample(self, stamp_ms: float, asked_s: float, heard_s: float) -> None:
        """An answer dated ``stamp_ms`` was asked for and heard then."""
        self._behind_ms = stamp_ms - heard_s * 1000
        self._ahead_ms = stamp_ms - asked_s * 1000

    def at_least_ms(self, monotonic_s: float) -> int:
        """It is not earlier than this."""
        return math.floor(self._behind_ms + monotonic_s * 1000)

    def at_most_ms(self, monotonic_s: float) -> int:
        """It is not later than this."""
        return math.ceil(self._ahead_ms + monotonic_s * 1000)


class Bucket:
    """One bucket on a connection of its own. Every method raises OutboxUnavailable where not said otherwise."""

    def __init__(
        self,
        url: str,
        *,
        creds: str | None,
        name: str,
        timeout_ms: int,
        spec: topology.StreamSpec,
        replicas: int,
        create: bool,
    ) -> None:
        self.connection = Connection(url, name=name, creds=creds, timeout_ms=timeout_ms)
        self.publisher = Publisher(self.connection)
        self.stream = spec.name
        self.filter = spec.subjects[0]
        self.prefix = self.filter.removesuffix(">")
        self.clock = BrokerClock()
        self._spec = spec
        self._replicas = replicas
        self._create = create
        self._connected = False
        self._reader: LastMessages | None = None
        self._room = math.inf
        self.terse = False
        """Whether room is so short that errors must be."""
        self._written_ms = 0

    async def connect(self) -> None:
        """Connect, within the time-out of a request. Repeating it does nothing."""
        if self._connected:
            return
        try:
            async with asyncio.timeout(self.connection.timeout_s):
                with self.broker_errors():
                    await self.connection.open()
        except TimeoutError:
            reason = self.connection.last_error or "no answer"
            raise OutboxUnavailable(f"{shown_url(self.connection.url)}: {reason}") from None
        await self.publisher.start()
        self._connected = True

    async def close(self) -> None:
        if self._connected:
            await self.publisher.stop()
        await self.connection.close()

    def now_ms(self) -> int:
        """The broker's time, or a round trip less."""
        return self.clock.at_least_ms(asyncio.get_running_loop().time())

    def written_ms(self) -> int:
        """When what has just been acknowledged was stored, or a round trip later. It does not go back by a few ms."""
        at_ms = self.clock.at_most_ms(asyncio.get_running_loop().time())
        if not self._written_ms - CLOCK_STEP_MS < at_ms < self._written_ms:
            self._written_ms = at_ms
        return self._written_ms

    # -- the whole ----------------------------------------------------------------------------------------

    async def provide(self) -> None:
        """Make the bucket where it is missing. One that is there stays as it is."""
        with self.broker_errors():
            try:
                await self.publisher.api(f"STREAM.INFO.{self.stream}")
            except NotFound:
                if not self._create:
                    raise OutboxUnavailable(f"{self.stream} does not exist: no notify consumer has used it") from None
                await self._make()

    async def _make(self) -> None:
        try:
            await self.publisher.api(f"STREAM.CREATE.{self.stream}", self._spec.config(self._replicas))
        except Forbidden as error:
            raise OutboxUnavailable(
                f"{self.stream} does not exist: {error}, or have somebody who may run `notify-consumer outbox create`"
            ) from None

    async def look(self) -> Sight | None:
        """How the bucket is, and what time it is there; None when it does not exist."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        with self.broker_errors():
            try:
                info = await self.publisher.api(f"STREAM.INFO.{self.stream}")
            except NotFound:
                return None
        self.clock.sample(stamp_ms(info["ts"]), asked_s, loop.time())
        config, state = info["config"], info["state"]
        self._reader = LastMessages(self.publisher, self.stream, config["num_replicas"])
        size = config["max_bytes"] if config["max_bytes"] > 0 else math.inf
        self._room = size * INSERT_UP_TO - state["bytes"]
        self.terse = state["bytes"] > size * TERSE_FROM
        return Sight(state["messages"], state["last_seq"], info["created"], self._wrong(config))

    def _wrong(self, config: dict[str, Any]) -> str | None:
        """The first policy under which rows are not safe: field, what it is, what it must be."""
        for field, must in _MUST_BE.items():
            have = config.get(field, type(must)())
            if have != must and not (field == "max_msgs" and have <= 0):
                return f"{self.stream}: {field} is {have!r}; it must be {must!r}"
        if self.filter not in config.get("subjects", ()):
            return f"{self.stream}: subjects is {config.get('subjects')!r}; it must include {self.filter}"
        return None

    @property
    def full(self) -> bool:
        """Whether there is no room for new rows."""
        return self._room <= 0

    # -- rows ---------------------------------------------------------------------------------------------

    async def read(self, key: str) -> Stored:
        """What stands under a key. Raises UnreadableRow, BrokerError."""
        if self._reader is None:
            raise OutboxUnavailable(f"{self.stream} was not opened yet")
        message = await self._reader.last(self.prefix + key)
        if message is None:
            return Stored(None, 0, 0)
        return self._stored(message)

    async def read_seqs(self, seqs: list[int]) -> list[Stored]:
        """The rows whose last change has these sequences; those that have changed since are left out."""
        with self.broker_errors():
            pending = [await self.publisher.ask_seq(self.stream, seq) for seq in seqs]
            messages = [await each for each in pending]
        found = []
        for message in messages:
            with contextlib.suppress(UnreadableRow):
                if message is not None:
                    found.append(self._stored(message))
        return [stored for stored in found if stored.record is not None]

    def _stored(self, message: Message) -> Stored:
        stored_ms = math.ceil(stamp_ms(message.headers[topology.STORED_HEADER]))
        if topology.KV_OPERATION_HEADER in message.headers:
            return Stored(None, message.seq, stored_ms)
        try:
            return Stored(decode(message.headers, message.data), message.seq, stored_ms)
        except UnreadableRow as error:
            raise UnreadableRow(f"{message.subject}: {error}") from None

    async def write(self, key: str, record: Record, expected: int) -> int:
        """Store a row where ``expected`` is the last sequence under its key. Raises BrokerError, TooLarge."""
        place, data = encode(record, self.connection.max_payload)
        headers = {HEADER: place, topology.EXPECTED_HEADER: str(expected)}
        ack = await self.publisher.publish(self.prefix + key, data, headers)
        if expected == 0:
            self._room -= len(data) + len(place) + _OVERHEAD_BYTES
        return ack.seq

    async def delete(self, seq: int) -> bool:
        """Remove the row whose last change has this sequence; False when it has changed since, or is gone.

        Raises BrokerError.
        """
        return await delete_message(self.publisher, self.stream, seq)

    @contextlib.contextmanager
    def broker_errors(self) -> Iterator[None]:
        """What the broker refuses, or does not say, is OutboxUnavailable outside."""
        try:
            yield
        except BrokerError as error:
            raise OutboxUnavailable(f"{self.stream}: {error}") from error
