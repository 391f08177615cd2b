"""Resumes in: from the stream into the outbox, and only then acknowledged.

What arrived together is inserted in one transaction. A resume that can't be read is kept as a dead row when it has
an id, and acknowledged either way: it is never delivered for ever. One that is there already is not inserted again;
when its row is done, its stored feedback is sent anew, since the timer service would not have repeated the resume
had it known the answer. While the outbox is away nothing is acknowledged, and the broker delivers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from notify_consumer import events
from notify_consumer.errors import OutboxUnavailable, UnreadableResume
from notify_consumer.handlers import Handlers
from notify_consumer.metrics import Metrics
from notify_consumer.outbox.base import NewRow, Outbox
from notify_consumer.resume import read_resume
from timer_service.errors import BrokerError, NotFound
from timer_service.http import Reason
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import Delivery, PullLoop
from timer_service.jetstream.topology import RESUME_CONSUMER, RESUME_SERVICE, RESUMES
from timer_service.logs import get_logger

# A resume has at most some 300 KiB, so this bounds memory to less than 100 MB.
WINDOW = 256
BATCH = 64
RETRY_S = 1.0
REDELIVER_MS = 1_000
UNREADABLE_FLOW = "unreadable"
_POLICY = ("ack_policy", "max_deliver", "filter_subject")
_ERROR_CHARS = 500


class ResumeConsumer:
    """Reads ``NOTIFY_TRIGGERS_DURABLE_TIMER_RESUME``; creates it when missing. ``on_rows``: there is work;
    ``on_unavailable``: why none of it could be put into the outbox."""

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        handlers: Handlers,
        *,
        on_rows: Callable[[], None],
        on_unavailable: Callable[[str], None],
        metrics: Metrics | None = None,
    ) -> None:
        self._connection = connection
        self._outbox = outbox
        self._handlers = handlers
        self._on_rows = on_rows
        self._on_unavailable = on_unavailable
        self._metrics = metrics or Metrics()
        self._log = get_logger()
        self._arrived = asyncio.Event()
        self._deliveries: list[Delivery] = []
        self._writing = asyncio.Lock()
        self._missing = asyncio.Event()
        self._reason: Reason | None = Reason("starting", RESUME_CONSUMER, "the consumer was not looked up yet")
        self._pull = PullLoop(
            connection,
            RESUMES,
            RESUME_CONSUMER,
            self._take,
            window=WINDOW,
            batch=BATCH,
            on_missing=self._missing.set,
        )

    @property
    def reason(self) -> Reason | None:
        """Why no resumes come in, None while they do."""
        if self._reason is None and not self._pull.healthy:
            return Reason("consumer_silent", RESUME_CONSUMER, "the broker does not answer requests for resumes")
        return self._reason

    async def run(self) -> None:
        """Take resumes in until cancelled; call ``stop`` before, so that nothing is left half way."""
        await self._provide()
        await self._pull.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_forever(), name="consumer.write")
            tasks.create_task(self._provide_forever(), name="consumer.provide")

    async def stop(self) -> None:
        """Ask for no more, and put what has arrived into the outbox. Repeating it does nothing."""
        await self._pull.stop_pulling()
        await self._write()

    # -- the broker's consumer ----------------------------------------------------------------------------

    async def _provide_forever(self) -> None:
        while True:
            await self._missing.wait()
            self._missing.clear()
            await self._provide()

    async def _provide(self) -> None:
        """Return when the consumer is there and as it must be."""
        while True:
            self._reason = await self._find_fault()
            if self._reason is None:
                return
            await asyncio.sleep(RETRY_S)

    async def _find_fault(self) -> Reason | None:
        try:
            found = await self._info()
            if found is None:
                await self._create()
                return None
        except NotFound:
            return Reason(
                "stream_missing", RESUMES, "the stream does not exist yet: run durable-timer provision, or serve"
            )
        except BrokerError as error:
            return Reason("consumer_unavailable", RESUME_CONSUMER, str(error))
        return _policy_fault(found)

    async def _info(self) -> dict[str, Any] | None:
        try:
            found = await self._connection.api(f"CONSUMER.INFO.{RESUMES}.{RESUME_CONSUMER}")
        except NotFound:
            return None
        config: dict[str, Any] = found["config"]
        return config

    async def _create(self) -> None:
        body = {"stream_name": RESUMES, "config": RESUME_SERVICE.config(), "action": "create"}
        await self._connection.api(f"CONSUMER.DURABLE.CREATE.{RESUMES}.{RESUME_CONSUMER}", body)
        self._log.info(events.CONSUMER_CREATED, consumer=RESUME_CONSUMER)

    # -- into the outbox ----------------------------------------------------------------------------------

    def _take(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self._arrived.set()

    async def _write_forever(self) -> None:
        while True:
            await self._arrived.wait()
            await self._write()

    async def _write(self) -> None:
        async with self._writing:
            self._arrived.clear()
            deliveries, self._deliveries = self._deliveries, []
            if deliveries:
                await self._take_in(deliveries)

    async def _take_in(self, deliveries: Sequence[Delivery]) -> None:
        rows = [row for row in map(self._row, deliveries) if row is not None]
        try:
            new = await self._outbox.insert(rows)
            known = {row.resume_id for row in rows} - new
            again = await self._outbox.requeue_feedback(sorted(known)) if known else set()
        except OutboxUnavailable as error:
            self._log.warning(events.OUTBOX_UNAVAILABLE, error=str(error), resumes=len(deliveries))
            self._on_unavailable(str(error))
            for delivery in deliveries:
                await delivery.nak(REDELIVER_MS)
            return
        self._on_rows()
        for delivery in deliveries:
            await delivery.ack()
        self._tell(rows, new, again)

    def _row(self, delivery: Delivery) -> NewRow | None:
        try:
            resume = read_resume(delivery.data)
        except UnreadableResume as error:
            return self._unreadable(delivery, error)
        return NewRow(resume.resume_id, self._handlers.flow_of(resume), delivery.data)

    def _unreadable(self, delivery: Delivery, error: UnreadableResume) -> NewRow | None:
        reason = str(error)[:_ERROR_CHARS]
        self._metrics.resumes("unreadable")
        self._log.error(events.RESUME_UNREADABLE, resume_id=error.resume_id, stream_seq=delivery.seq, reason=reason)
        if error.resume_id is None:
            return None
        return NewRow(error.resume_id, UNREADABLE_FLOW, delivery.data, unreadable=reason)

    def _tell(self, rows: Sequence[NewRow], new: set[str], again: set[str]) -> None:
        readable = {row.resume_id: row for row in rows if row.unreadable is None}
        for resume_id, row in readable.items():
            if resume_id in new:
                self._metrics.resumes("new")
                self._log.info(events.RESUME_RECEIVED, resume_id=resume_id, flow=row.flow)
            else:
                self._metrics.resumes("repeated")
                self._log.info(events.RESUME_REPEATED, resume_id=resume_id, feedback_again=resume_id in again)


def _policy_fault(config: dict[str, Any]) -> Reason | None:
    wanted = RESUME_SERVICE.config()
    for field in _POLICY:
        if config.get(field) != wanted[field]:
            text = f"{field} is {config.get(field)!r} and must be {wanted[field]!r}: resumes could be lost"
            return Reason("consumer_policy", RESUME_CONSUMER, text)
    return None
