"""The client of other services: start, cancel, answer and look at timers.

    async with await TimerClient.connect("nats://127.0.0.1:4222") as timers:
        await timers.start({"name": "order-42"}, delay_ms=30 * 60_000, payload={"order": 42})
        await timers.sleep("reminder-42", 24 * 3_600_000)  # over when it is over, however often this is started anew

Every command is stored by the broker before a call returns, and by default its outcome is awaited too: then a
rejection raises ``CommandRejected``. When the outcome does not come in time ``OutcomeUnknown`` is raised: the
command is stored and will be carried out; calling again with its ``command_id`` is safe and tells what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Literal

import msgspec

from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import TimerRef, derive_timer_ref, is_timer_ref
from timer_service.domain.model import JsonText, Order
from timer_service.errors import BrokerError, CommandRejected, NotFound, NotStored, OutcomeUnknown, Unavailable
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.stores import JetStreamArchive, JetStreamSnapshots, JetStreamState
from timer_service.ports import Stored
from timer_service.sleeping import Sleep, SleepKey, delay_of, sleep_key
from timer_service.urls import shown_url
from timer_service.wire.bodies import KeyBody
from timer_service.wire.canonical import exact_json, strict_loads
from timer_service.wire.commands import BadCommand, Envelope, Kind, read_command, timer_key
from timer_service.wire.records import Outcome, encode

DEFAULT_TIMEOUT_MS = 15_000
DEFAULT_REPLY_PREFIX = "_INBOX."
_outcomes = msgspec.json.Decoder(Outcome)
_UNSENT = Envelope(Order(0, 0), 0)

TimerName = str | Mapping[str, str]
"""A timer_ref, or a key object: ``{"name": …}`` or the four lineage parts."""


def timer_ref_of(timer: TimerName) -> TimerRef:
    """The timer_ref of a key object; a timer_ref stays as it is. Raises ValueError, TypeError."""
    if isinstance(timer, str):
        if not is_timer_ref(timer):
            raise ValueError(f"{timer!r} is not a timer_ref; give a key object such as {{'name': …}}")
        return TimerRef(timer)
    try:
        return derive_timer_ref(timer_key(msgspec.convert(key_body(timer), KeyBody)))
    except BadCommand as bad:
        raise ValueError(bad.message) from None


def key_body(timer: Mapping[str, str]) -> dict[str, str]:
    """A key object as it is sent. Raises TypeError for what is none: a timer_ref can't be started."""
    if not isinstance(timer, Mapping):
        raise TypeError(f"{timer!r} is not a key object such as {{'name': …}}")
    return dict(timer)


def due_body(delay_ms: int | None, at: datetime | str | None, at_ms: int | None) -> dict[str, Any] | None:
    """The ``due`` object of a command, None when nothing is given. Raises ValueError for a naive datetime."""
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise ValueError("`at` has no time zone")
        at = at.isoformat()
    given = {"delay_ms": delay_ms, "at": at, "at_ms": at_ms}
    due = {name: value for name, value in given.items() if value is not None}
    return due or None


def _check(kind: Kind, data: bytes) -> None:
    """Raises CommandRejected for what every service would refuse, whatever the timer's state."""
    try:
        read_command(topology.command_subject(kind), data, _UNSENT)
    except BadCommand as bad:
        nothing = (bad.timer_ref, None, None, None, None)
        raise CommandRejected(Outcome(bad.command_id, Status.REJECTED, bad.code, bad.message, *nothing)) from None


class TimerClient:
    """One connection; safe for many concurrent calls from one event loop.

    ``reply_prefix`` is what the service's REPLY_PREFIX says: outcomes are told on subjects that begin so.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        reply_prefix: str = DEFAULT_REPLY_PREFIX,
    ) -> None:
        self._connection = connection
        self._publisher = Publisher(connection)
        self._timeout_ms = timeout_ms
        self._reply_prefix = reply_prefix
        self._waiting: dict[str, asyncio.Future[Outcome | None]] = {}
        self._inbox = ""
        self._owns_connection = False

    @classmethod
    async def connect(
        cls,
        url: str = "nats://127.0.0.1:4222",
        *,
        creds: str | None = None,
        name: str = "timer-client",
        connect_timeout_ms: int = 5_000,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        reply_prefix: str = DEFAULT_REPLY_PREFIX,
    ) -> TimerClient:
        """Connect. Raises Unavailable when the broker is not there within ``connect_timeout_ms``."""
        connection = Connection(url, name=name, creds=creds)
        try:
            async with asyncio.timeout(connect_timeout_ms / 1000):  # wait_for may swallow a cancel
                await connection.open()
        except (TimeoutError, OSError):
            raise Unavailable(f"no broker at {shown_url(url)}: {connection.last_error or 'no answer'}") from None
        client = cls(connection, timeout_ms=timeout_ms, reply_prefix=reply_prefix)
        client._owns_connection = True
        await client.open()
        return client

    async def open(self) -> None:
        """Subscribe for outcomes. Only needed with a connection of your own."""
        await self._publisher.start()
        self._inbox = self._reply_prefix + uuid.uuid4().hex
        await self._connection.subscribe(f"{self._inbox}.*", self._on_outcome)

    async def close(self) -> None:
        """Close what ``connect`` opened. Repeating it does nothing.

        Calls that are under way raise OutcomeUnknown, NotStored or, where no command is sent, a BrokerError.
        """
        await self._publisher.stop()
        self._give_up()
        if self._owns_connection:
            await self._connection.close()

    def _give_up(self) -> None:
        """No outcome will be heard any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)

    async def __aenter__(self) -> TimerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- commands -------------------------------------------------------------------------------------------

    async def start(
        self,
        timer: Mapping[str, str],
        *,
        delay_ms: int | None = None,
        at: datetime | str | None = None,
        at_ms: int | None = None,
        payload: Any = None,
        max_retries: int | None = 0,
        if_exists: Literal["reject", "replace"] | None = None,
        edges: Mapping[str, str] | None = None,
        runtime_sha256: str | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_ms: int | None = None,
    ) -> Outcome | None:
        """Start a timer: give exactly one of ``delay_ms`` (1 to 100 years), ``at`` (with a time zone) and ``at_ms``.

        ``max_retries`` None is without limit. A named timer that lives is replaced, a lineage is rejected when its
        content differs. Repeating a call with the same ``command_id`` and content changes nothing. With
        ``wait=False`` it returns None as soon as the broker has stored the command. All of it has at most 256 KiB.
        """
        body = {
            "timer": key_body(timer),
            "due": due_body(delay_ms, at, at_ms),
            "max_retries": max_retries,
            "payload": payload,
            "if_exists": if_exists,
            "edges": None if edges is None else dict(edges),
            "runtime_sha256": runtime_sha256,
        }
        return await self.send("start", body, command_id=command_id, wait=wait, timeout_ms=timeout_ms)

    async def cancel(
        self,
        timer: TimerName,
        *,
        generation: int | None = None,
        reason: str | None = None,
        wait_ms: int | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_ms: int | None = None,
    ) -> Outcome | None:
        """Cancel a waiting timer; code ``too_late``: it had elapsed. ``wait_ms`` (to 10,000) waits for a late start."""
        body = {"timer_ref": timer_ref_of(timer), "generation": generation, "reason": reason, "wait_ms": wait_ms}
        return await self.send("cancel", body, command_id=command_id, wait=wait, timeout_ms=timeout_ms)

    async def delete(self, timer: TimerName, *, reason: str | None = None) -> bool:
        """Cancel a timer if it is there; False when it is not (unknown or ended), which is no error."""
        try:
            await self.cancel(timer, reason=reason, wait_ms=0)
        except CommandRejected as rejected:
            if rejected.code in (Code.UNKNOWN_TIMER, Code.ALREADY_TERMINAL):
                return False
            raise
        return True

    async def complete(
        self,
        timer: TimerName,
        generation: int,
        fence: int,
        *,
        command_id: str | None = None,
        wait: bool = True,
        timeout_ms: int | None = None,
    ) -> Outcome | None:
        """Answer a resume: the work is done. ``generation`` and ``fence`` as the resume carried them."""
        body = {"timer_ref": timer_ref_of(timer), "generation": generation, "fence": fence}
        return await self.send("complete", body, command_id=command_id, wait=wait, timeout_ms=timeout_ms)

    async def retry(
        self,
        timer: TimerName,
        generation: int,
        fence: int,
        *,
        delay_ms: int | None = None,
        at: datetime | str | None = None,
        at_ms: int | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_ms: int | None = None,
    ) -> Outcome | None:
        """Answer a resume: wait again, by default the last delay. Beyond ``max_retries`` the timer ends as failed."""
        due = due_body(delay_ms, at, at_ms)
        body = {"timer_ref": timer_ref_of(timer), "generation": generation, "fence": fence, "due": due}
        return await self.send("retry", body, command_id=command_id, wait=wait, timeout_ms=timeout_ms)

    async def fail(
        self,
        timer: TimerName,
        generation: int,
        fence: int,
        failure_code: str,
        message: str | None = None,
        *,
        command_id: str | None = None,
        wait: bool = True,
        timeout_ms: int | None = None,
    ) -> Outcome | None:
        """Answer a resume: the work failed for good. ``failure_code`` is of ``[a-z0-9_]{1,64}``."""
        body = {"timer_ref": timer_ref_of(timer), "generation": generation, "fence": fence}
        body |= {"failure_code": failure_code, "message": message}
        return await self.send("fail", body, command_id=command_id, wait=wait, timeout_ms=timeout_ms)

    async def send(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        command_id: str | None = None,
        wait: bool = True,
        timeout_ms: int | None = None,
    ) -> Outcome | None:
        """Publish any command; ``v`` and, when absent, a ``command_id`` are filled in.

        Raises CommandRejected, OutcomeUnknown (stored, no outcome within ``timeout_ms``), NotStored, or ValueError
        for what is no JSON. With ``wait=False`` nobody would hear of a refusal: there what no service can read is
        refused before it is sent, by CommandRejected too.
        """
        given = body.get("command_id") if command_id is None else command_id
        chosen = uuid.uuid4().hex if given is None else given
        data = exact_json({**body, "v": 1, "command_id": chosen})
        if not wait:
            _check(kind, data)
            await self._confirmed(kind, data, {}, chosen)
            return None
        reply, future = self._expect()
        try:
            await self._confirmed(kind, data, {topology.REPLY_HEADER: reply}, chosen)
            async with asyncio.timeout((self._timeout_ms if timeout_ms is None else timeout_ms) / 1000):
                outcome = await future
        except TimeoutError:
            outcome = None
        finally:
            self._waiting.pop(reply, None)
        if outcome is None:
            raise OutcomeUnknown(chosen, str(body.get("timer_ref", "")))
        if outcome.status == Status.REJECTED:
            raise CommandRejected(outcome)
        return outcome

    def _expect(self) -> tuple[str, asyncio.Future[Outcome | None]]:
        reply = f"{self._inbox}.{uuid.uuid4().hex}"
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = future
        return reply, future

    async def _confirmed(self, kind: Kind, data: bytes, headers: dict[str, str], command_id: str) -> None:
        try:
            await self._store(kind, data, headers)
        except BrokerError as error:
            raise NotStored(f"the broker did not confirm the {kind}: {error}", command_id) from error

    async def _store(self, kind: Kind, data: bytes, headers: dict[str, str]) -> None:
        subject = topology.command_subject(kind)
        if not topology.is_literal_subject(subject):
            raise ValueError(f"{kind!r} is not a kind of command")
        await self._publisher.publish(subject, data, headers or None)

    async def _on_outcome(self, message: Any) -> None:
        future = self._waiting.pop(message.subject, None)
        if future is not None and not future.done():
            future.set_result(_outcomes.decode(message.data))

    # -- looking --------------------------------------------------------------------------------------------

    async def get(self, timer: TimerName, *, payload: bool = True) -> dict[str, Any] | None:
        """The timer as it is stored: its live state, else its newest terminal record (with ``status``), else None.

        A payload that is kept beside the state is fetched too, unless ``payload`` is False. Raises ValueError for
        what names no timer, UnreadableState, and BrokerError when the broker does not answer.
        """
        timer_ref, missed = timer_ref_of(timer), None
        while True:
            found = (await self._stored(timer_ref)).timer
            if found is None:
                return None
            record: dict[str, Any] = strict_loads(encode(found))  # type: ignore[assignment]
            if not payload or found.snapshot_seq is None:
                return record
            try:
                return record | {"payload": strict_loads(bytes(await self._payload(found.snapshot_seq)))}
            except NotFound:  # the timer went on meanwhile, and nothing refers to that payload any more
                if found.snapshot_seq == missed:
                    raise
                missed = found.snapshot_seq

    async def _stored(self, timer_ref: TimerRef) -> Stored:
        live = await JetStreamState(self._publisher, replicas=1, tombstone_ttl_s=0).get(timer_ref)
        return live if live.timer is not None else await JetStreamArchive(self._publisher, replicas=1).last(timer_ref)

    async def _payload(self, seq: int) -> JsonText:
        return await JetStreamSnapshots(self._publisher).get(seq)

    # -- waiting --------------------------------------------------------------------------------------------

    async def sleep(self, key: SleepKey, duration: int | timedelta) -> None:
        """Wait for ``duration`` (milliseconds, or a timedelta), whatever becomes of this process or the service.

        The first call starts a timer under ``key``; calling again with the same key, here or elsewhere, picks up the
        wait that is running, whatever duration it names, and returns at once when its time has passed. So it stays as
        long as the archive remembers it: a step of a flow may be repeated, and a new wait needs a new key. A ``key``
        that is a string is a name in the namespace ``sleep``; a key object may be that of any timer.

        Cancelling the task that waits leaves the timer running. While the broker or the service is away it waits on.
        Raises SleepInterrupted when the timer is cancelled or replaced, CommandRejected when the key is another timer's
        (``conflict``, ``already_terminal``) or there is no room for one (``storage_full``), ValueError for a duration
        outside of 1 ms to 100 years, and Forbidden or Unavailable when this connection can't be used for it.
        """
        timer = sleep_key(key)
        await Sleep(self, timer_ref_of(timer), timer, delay_of(duration)).over()

    @property
    def closed(self) -> bool:
        """Whether the connection was closed for good."""
        return self._connection.closed.is_set()

    @contextlib.asynccontextmanager
    async def watching(self, timer_ref: TimerRef, listener: Callable[[], None]) -> AsyncIterator[None]:
        """Within the block ``listener`` is called when something was written for this timer, or may have been."""

        async def heard(_: Any) -> None:
            listener()

        subscription = await self._connection.subscribe(topology.state_subject(timer_ref), heard)
        self._connection.on_returned(listener)
        self._connection.on_lost(listener)  # for good, perhaps
        try:
            with contextlib.suppress(BrokerError):  # the broker is away: it hears of the subscription when it returns
                await self._connection.flush()
            yield
        finally:
            self._connection.forget(listener)
            await self._connection.unsubscribe(subscription)
