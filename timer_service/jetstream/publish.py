"""The pipelined publisher: one inbox, many in flight, one sweeping time-out.

``publish`` and ``request`` cost one message out and one in. The reply resolves a ``Pending``, which resumes the
waiting fiber in the same stack. When the connection is lost everything in flight becomes ``Ambiguous`` at
once: its reply will not come, and whoever waits can read back as soon as the broker is there again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import msgspec
import nats.errors

from timer_service.errors import (
    Ambiguous,
    BrokerError,
    Forbidden,
    NotFound,
    RequestRefused,
    StorageFull,
    Unavailable,
    WrongRevision,
)
from timer_service.fibers import Pending
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection, Denial, Received, api_error

_SWEEP_S = 0.25
_SILENT_S = 5.0
_WRONG_SEQUENCE = frozenset({10071, 10164})


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Ack(msgspec.Struct):
    """The broker has stored a message: where, and whether its ``Nats-Msg-Id`` was known already.

    A duplicate's ``seq`` is that of the first copy; it says nothing about that copy being there still.
    """

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_acks = msgspec.json.Decoder(Ack)


class Message(msgspec.Struct):
    """A stored message as a direct get returns it."""

    subject: str
    seq: int
    headers: Mapping[str, str]
    data: bytes


Reader = Callable[[Received], Any]


class Publisher:
    """Publishes with acknowledgement, and asks, on one connection. Use it from one event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._timeout_s = connection.timeout_s
        self._tokens = count()
        self._inflight: dict[str, tuple[Pending[Any], Reader, float, str]] = {}
        self._prefix = ""
        self._now: Callable[[], float] = lambda: 0.0
        self._sweeper: asyncio.Task[None] | None = None
        self._silent: dict[str, float] = {}
        """Streams by when they last left a write unanswered."""
        self._heard = 0.0
        self.on_full: Callable[[str, StorageFull], None] | None = None
        """Called with the subject of each message that ``publish`` could not store for want of room."""

    async def start(self) -> None:
        """Subscribe to the inbox. The connection must be open."""
        self._now = asyncio.get_running_loop().time
        inbox = self._connection.client.new_inbox()
        self._prefix = f"{inbox}."
        await self._connection.subscribe(f"{inbox}.*", self._on_reply)
        self._connection.on_lost(self.fail_all)
        self._connection.on_denied(self._fail_denied)
        self._connection.on_returned(self._silent.clear)
        self._sweeper = asyncio.create_task(self._sweep(), name="publisher.sweep")

    async def stop(self) -> None:
        """Stop sweeping. What is in flight becomes Ambiguous."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.fail_all()

    @property
    def in_flight(self) -> int:
        return len(self._inflight)

    async def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> Ack:
        """Store one message; returns when the broker has it.

        Raises WrongRevision, StorageFull, Unavailable, Forbidden or RequestRefused (it was not stored), or
        Ambiguous (it may have been).
        """
        token = str(next(self._tokens))
        pending: Pending[Ack] = Pending()
        self._inflight[token] = (pending, _read_ack, self._now() + self._timeout_s, subject)
        try:
            await self._connection.client.publish(subject, data, self._prefix + token, headers)
        except (nats.errors.Error, OSError) as error:
            self._inflight.pop(token, None)
            raise Unavailable(f"{subject}: {error!r}") from error
        try:
            return await pending
        except StorageFull as error:
            if self.on_full is not None:
                self.on_full(subject, error)
            raise
        except Ambiguous:
            self._unanswered(topology.stream_of(subject) or subject)
            raise

    @property
    def silent(self) -> list[str]:
        """Streams that did not answer a write in time, though the broker answered others: see ``_unanswered``.

        What must be written is tried again within seconds of its time-out; when none of that came, nothing is wrong
        any more, also where nobody has anything to write.
        """
        since_s = self._now() - 3 * self._timeout_s - _SILENT_S
        return [stream for stream, at_s in self._silent.items() if at_s > since_s]

    def _unanswered(self, stream: str) -> None:
        """A stream whose store could not write to the disk is silent until nats-server is started again."""
        if self._connection.connected and self._now() - self._heard < self._timeout_s / 2:
            self._silent[stream] = self._now()

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> Pending[Ack]:
        """As ``publish``, but returns as soon as the message is on its way; await the result for the ack."""
        return await self._send(subject, data, headers, _read_ack)

    async def direct_get(self, stream: str, subject: str) -> Message | None:
        """The newest message on ``subject``, None when there is none. Any replica may answer."""
        pending = await self._send(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", None, _read_message)
        return await pending  # type: ignore[no-any-return]

    async def direct_get_seq(self, stream: str, seq: int) -> Message | None:
        """The message with sequence ``seq``, None when it is not there."""
        pending = await self.ask_seq(stream, seq)
        return await pending

    async def ask_seq(self, stream: str, seq: int) -> Pending[Message | None]:
        """As ``direct_get_seq``, but returns as soon as the question is on its way."""
        return await self._send(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":%d}' % seq, None, _read_message)

    async def api(self, name: str, body: object = None) -> dict[str, Any]:
        """One request to ``$JS.API.<name>``, pipelined. Raises the matching BrokerError."""
        data = b"" if body is None else msgspec.json.encode(body)
        pending = await self._send(f"$JS.API.{name}", data, None, _read_api)
        return await pending  # type: ignore[no-any-return]

    async def _send(self, subject: str, data: bytes, headers: dict[str, str] | None, read: Reader) -> Pending[Any]:
        token = str(next(self._tokens))
        pending: Pending[Any] = Pending()
        self._inflight[token] = (pending, read, self._now() + self._timeout_s, subject)
        try:
            await self._connection.client.publish(subject, data, self._prefix + token, headers)
        except (nats.errors.Error, OSError) as error:
            self._inflight.pop(token, None)
            raise Unavailable(f"{subject}: {error!r}") from error
        return pending

    async def _on_reply(self, message: Received) -> None:
        self._heard = self._now()
        entry = self._inflight.pop(message.subject[len(self._prefix) :], None)
        if entry is None:
            return
        pending, read, _, _ = entry
        try:
            value = read(message)
        except (BrokerError, msgspec.MsgspecError) as error:
            pending.fail(error if isinstance(error, BrokerError) else RequestRefused(f"unreadable reply: {error}"))
        else:
            if self._silent and isinstance(value, Ack):
                self._silent.pop(value.stream, None)
            pending.resolve(value)

    def fail_all(self) -> None:
        """Everything in flight becomes Ambiguous."""
        inflight, self._inflight = self._inflight, {}
        for pending, *_ in inflight.values():
            pending.fail(Ambiguous("the connection was lost before the broker's reply came"))

    def _fail_denied(self, denial: Denial, subject: str) -> None:
        """The broker does not answer who may not publish; it complains of the subject, in lower case."""
        denied = [token for token, entry in self._inflight.items() if entry[3].lower() == subject]
        for token in denied:
            self._inflight.pop(token)[0].fail(Forbidden(str(denial)))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self._now()
            late = []
            for token, (_, _, deadline, _) in self._inflight.items():
                if deadline > now:
                    break  # insertion order is deadline order
                late.append(token)
            for token in late:
                pending = self._inflight.pop(token)[0]
                pending.fail(Ambiguous(f"no reply from the broker within {self._timeout_s:g} s"))


def _read_ack(message: Received) -> Ack:
    if not message.data:
        raise Unavailable("no stream takes this subject")
    ack = _acks.decode(message.data)
    if ack.error is not None:
        raise _refusal(ack.error)
    return ack


def _refusal(error: _Error) -> BrokerError:
    if error.err_code in _WRONG_SEQUENCE:
        last = error.description.rsplit(" ", 1)[-1]
        return WrongRevision(error.description, int(last) if last.isdigit() else None)
    return api_error({"code": error.code, "err_code": error.err_code, "description": error.description}, "publish")


def _read_message(message: Received) -> Message | None:
    headers = message.headers or {}
    status = headers.get("Status")
    if status == "404":
        return None
    if status is not None or "Nats-Sequence" not in headers:
        raise Unavailable(f"direct get: {headers.get('Description') or status or 'nobody answers'}")
    return Message(headers["Nats-Subject"], int(headers["Nats-Sequence"]), headers, message.data)


def _read_api(message: Received) -> dict[str, Any]:
    if not message.data:
        raise Unavailable("nobody answers")
    answer: dict[str, Any] = msgspec.json.decode(message.data)
    if "error" in answer:
        error = answer["error"]
        missing = error.get("code") == 404
        raise NotFound(str(error), error.get("err_code", 0)) if missing else api_error(error, "request")
    return answer
