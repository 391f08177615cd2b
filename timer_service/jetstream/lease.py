"""A lease on the broker: one key of the lease bucket, written by compare-and-set.

The holder writes about every 0.75 s. Whoever waits hears that by a plain subscription on the key's subject, and reads
only at the start, at an expiry, and before a take-over. What is decided when is in ``timer_service.domain.lease``.

A lease saves work; nothing is unsafe when two processes hold it for a while.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from timer_service import events
from timer_service.domain.lease import UNREADABLE, Contender, Record, Step
from timer_service.errors import (
    Ambiguous,
    BrokerError,
    NotFound,
    StorageFull,
    Unavailable,
    WrongRevision,
)
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection, Received
from timer_service.jetstream.publish import Publisher

_PATIENCE_S = 0.6
"""A reply that takes longer is too late to be of use."""
_ASK_S = 0.5
_RETRY_S = 1.0
_GIVE_UP_S = 1.0
_GIVE_UP_TRIES = 3
_NO_STREAM = 10059
_NO_BUCKET = f"{topology.LEASE_STREAM} is not there, or nobody leads it; run durable-timer provision"
_records = msgspec.json.Decoder(Record)

Listener = Callable[[], None]


class Lease:
    """One process's part in one lease. ``start`` contends for it until ``give_up``; then it may be started again.

    Listeners are called whenever ``mine``, ``held`` or ``rival`` has changed. Use it from one event loop.
    """

    def __init__(self, connection: Connection, publisher: Publisher, key: str, instance: str, log: Any) -> None:
        self._connection = connection
        self._publisher = publisher
        self._key = key
        self._subject = topology.lease_subject(key)
        self._instance = instance
        self._process = secrets.token_hex(8)  # whatever its name is, no other process has this
        self._ask_subject = topology.lease_ask_subject(self._process)
        self._log = log.bind(lease=key)
        self._contender = Contender(instance, self._process, self._ask_subject)
        self._now: Callable[[], float] = lambda: 0.0
        self._news = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._subscriptions: list[Any] = []
        self._told: tuple[bool, bool, bool] = (False, False, False)
        self._listeners: list[Listener] = []
        self.trouble: str | None = None
        """Why it can't be written, None while it can (or while the whole account is full)."""

    @property
    def held(self) -> bool:
        """Whether this process may rely on it at this instant: also true to a process that was frozen until now."""
        return self._contender.holds(self._now())

    @property
    def mine(self) -> bool:
        """Whether nobody else has it, as far as known: unlike ``held`` this lasts while the broker is away."""
        return self._contender.mine is not None

    @property
    def rival(self) -> Record | None:
        """Another process that holds it and lives."""
        return self._contender.holder if self._contender.holder_lives else None

    def on_change(self, listener: Listener) -> None:
        """Call ``listener`` after each change."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Begin to contend. The connection must have been open once, and the publisher started."""
        self._contender = Contender(self._instance, self._process, self._ask_subject)
        self._now = asyncio.get_running_loop().time
        self._stopping = False
        self._subscriptions = [
            await self._connection.subscribe(self._subject, self._on_heard),
            await self._connection.subscribe(self._ask_subject, _ignore),  # that it is there is the answer
        ]
        self._connection.on_lost(self._on_lost)
        self._connection.on_returned(self._on_returned)
        self._task = asyncio.create_task(self._run(), name=f"lease.{self._key}")

    async def give_up(self) -> None:
        """Contend no more; a holder tells the others, who begin at once. Repeating it does nothing."""
        task, self._task = self._task, None
        if task is None:
            return
        self._stopping = True
        self._news.set()
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                await task
                await self._give_up()
        except (TimeoutError, BrokerError) as error:
            self._log.warning(events.WORK_FAILED, step="give up", error=str(error))  # it runs out
        finally:
            await self._end(task)

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._connection.forget(self._on_lost)
        self._connection.forget(self._on_returned)
        subscriptions, self._subscriptions = self._subscriptions, []
        self._contender = Contender(self._instance, self._process, self._ask_subject)
        self._tell()
        for subscription in subscriptions:
            await self._connection.unsubscribe(subscription)

    async def _give_up(self) -> None:
        for _ in range(_GIVE_UP_TRIES):
            if self._contender.mine is None or not self._connection.connected:
                return
            if await self._write(self._contender.propose(given_up=True)):
                self._log.info(events.LEASE_GIVEN_UP, epoch=self._contender.mine.epoch)
                return
            await self._read()

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._flush()
        while not self._stopping:
            try:
                await self._turn()
            except Exception as error:
                self._log.error(events.WORK_FAILED, step="lease", exc_info=error)
                await asyncio.sleep(_RETRY_S)
            self._tell()

    async def _turn(self) -> None:
        now_s = self._now()
        step = self._contender.step(now_s)
        if step is Step.WAIT or not self._connection.connected:
            await self._pause(self._contender.due_s(now_s) - now_s)
        elif step is Step.READ:
            await self._read()
        elif step is Step.WRITE:
            await self._write(self._contender.propose())
        else:
            asking = self._ask(self._contender.asking(now_s))
            self._asking = asyncio.create_task(asking, name=f"lease.{self._key}.ask")

    async def _flush(self) -> None:
        """Whoever reads our record must find us listening."""
        try:
            await self._connection.flush()
        except BrokerError as error:
            self._log.debug(events.WORK_FAILED, step="flush", error=str(error))  # they go out with the connection

    async def _pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(min(max(delay_s, 0.0), 3600.0)):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    def _tell(self) -> None:
        """Log what has changed, and call the listeners."""
        was, now = self._told, (self.held, self.mine, self.rival is not None)
        if now == was:
            return
        self._told = now
        mine, holder = self._contender.mine, self._contender.holder
        if now[0] and not was[0] and mine is not None:
            self._log.info(events.LEASE_TAKEN, epoch=mine.epoch)
        elif was[0] and not now[0] and not self._stopping:
            self._log.warning(events.LEASE_LOST, to=None if holder is None else holder.instance)
        for listener in self._listeners:
            listener()

    # -- the steps ----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """From the stream's leader: a replica behind it might still have what was renewed since."""
        asked_s = self._now()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                request = f"STREAM.MSG.GET.{topology.LEASE_STREAM}"
                message = (await self._publisher.api(request, {"last_by_subj": self._subject}))["message"]
        except NotFound as error:
            if error.err_code == _NO_STREAM:  # a write gets no answer then, as long as others listen to its subject
                self.trouble = _NO_BUCKET
                self._tell()
                self._contender.no_bucket(asked_s, self._now())
            else:
                self._contender.found(None, 0, self._now())
        except (BrokerError, TimeoutError):
            self._contender.not_read(self._now())
        else:
            record = _decoded(base64.b64decode(message.get("data", "")))
            self._contender.found(record, message["seq"], self._now())

    async def _write(self, record: Record) -> bool:
        """Whether it is stored."""
        contender, sent_s = self._contender, self._now()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                ack = await (await self._publisher.send(self._subject, msgspec.json.encode(record), self._headers()))
        except WrongRevision:
            contender.overtaken(self._now())
        except StorageFull as error:
            self.trouble = None if error.whose else str(error)
            self._tell()
            contender.no_room(record, sent_s)
        except (Ambiguous, TimeoutError):
            contender.unanswered(self._now())
        except BrokerError as error:
            self._not_taken(error, record, sent_s)
        else:
            self.trouble = None
            self._tell()  # it may have run out meanwhile: then it comes back, which is a change
            contender.written(record, ack.seq, sent_s)
            return True
        return False

    def _headers(self) -> dict[str, str]:
        headers = {topology.EXPECTED_HEADER: str(self._contender.revision)}
        if self._key != topology.DRIVER_LEASE:  # names come and go; the epoch of the driver stays
            headers[topology.TTL_HEADER] = f"{topology.NAME_TTL_S}s"
        return headers

    def _not_taken(self, error: BrokerError, record: Record, sent_s: float) -> None:
        """No such bucket, no permission, or any other refusal."""
        if not self._connection.connected:
            self._contender.unanswered(self._now())
            return
        self.trouble = _NO_BUCKET if isinstance(error, Unavailable) else str(error)
        self._tell()
        self._contender.refused(record, sent_s, self._now())

    async def _ask(self, asked: Record) -> None:
        """A request to the holder's own subject: without its connection nobody is there to take it."""
        try:
            async with asyncio.timeout(_ASK_S):
                await self._connection.request(asked.ask)
        except Unavailable:
            if self._connection.connected:
                self._contender.is_gone(asked)
        except (Ambiguous, TimeoutError):
            self._contender.is_connected(asked)
        except BrokerError as error:  # not allowed: it runs out
            self._log.debug(events.WORK_FAILED, step="ask", error=str(error))
        self._news.set()

    # -- what comes from outside --------------------------------------------------------------------------------

    async def _on_heard(self, message: Received) -> None:
        record = _decoded(message.data)
        if record is None or record is UNREADABLE:
            self._contender.heard_nonsense()
        elif record.process != self._process:
            self._contender.heard(record, self._now())
        self._news.set()

    def _on_lost(self) -> None:
        self._contender.cut_off()
        self._tell()
        self._news.set()

    def _on_returned(self) -> None:
        self._contender.returned(self._now())
        self._news.set()


async def _ignore(_: Received) -> None:
    pass


def _decoded(data: bytes) -> Record | None:
    """None where there is nothing, as after a deletion by hand."""
    if not data:
        return None
    try:
        return _records.decode(data)
    except msgspec.MsgspecError:
        return UNREADABLE
