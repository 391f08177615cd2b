"""A NATS client with nothing in it: the measuring instrument of the benchmarks.

It writes and parses the wire protocol straight from an `asyncio.Protocol`: no reconnection, no flow control,
no TLS, no checks of subjects. It is here so that neither the limit nor the load generator is bound by a
client library. Never use it for anything else.
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

Handler = Callable[[bytes, bytes, bytes, bytes], None]
"""What a subscription calls: subject, reply subject, header block and body, each b"" when absent."""

_DELIVERIES = frozenset(b"MH")  # first letters of MSG and HMSG
_ERROR = ord("-")
_HELLO = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "lang": "bench"}


class BareError(Exception):
    """The broker refused something, or the connection is gone."""


class BareClient(asyncio.Protocol):
    """One connection. Handlers run inside the read callback; what they publish leaves in one write after."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._out: list[bytes] = []
        self._flush_planned = False
        self._handlers: dict[bytes, Handler] = {}
        self._sids = count(1)
        self._requests: dict[bytes, asyncio.Future[bytes]] = {}
        self._request_ids = count(1)
        self._pongs: list[asyncio.Future[None]] = []
        self._failure: BaseException | None = None
        self.inbox = f"_INBOX.{uuid4().hex}"

    @classmethod
    async def connect(cls, url: str) -> "BareClient":
        """Connect to `nats://host:port` and wait until the broker answers. Raises OSError or BareError."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, parts.hostname or "127.0.0.1", parts.port or 4222)
        client._send(b"CONNECT " + json.dumps(_HELLO).encode() + b"\r\n")
        client.subscribe(f"{client.inbox}.r.*", client._on_response)
        await client.ping()
        return client

    # --- what callers use -------------------------------------------------------------------------------

    def publish(self, subject: bytes, body: bytes, reply: bytes = b"") -> None:
        """Hand one message to the connection; nothing is awaited and nothing is checked."""
        self._send(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body))

    def subscribe(self, subject: str, handler: Handler) -> None:
        """Call `handler` for every message on `subject` until the connection closes."""
        sid = b"%d" % next(self._sids)
        self._handlers[sid] = handler
        self._send(b"SUB %b %b\r\n" % (subject.encode(), sid))

    async def request(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask a JetStream API subject and give back its JSON answer. Raises BareError on an error answer."""
        token = b"%d" % next(self._request_ids)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._requests[token] = future
        payload = b"" if body is None else json.dumps(body).encode()
        self.publish(subject.encode(), payload, f"{self.inbox}.r.".encode() + token)
        raw = await asyncio.wait_for(future, 10)
        answer = cast("dict[str, Any]", json.loads(raw)) if raw else {"error": "no responder"}
        if "error" in answer:
            raise BareError(f"{subject}: {answer['error']}")
        return answer

    async def ping(self) -> None:
        """Wait until the broker has read everything sent so far."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(future)
        self._send(b"PING\r\n")
        await asyncio.wait_for(future, 10)

    def check(self) -> None:
        """Raise BareError if the connection failed: waits that poll call this, so that they end."""
        if self._failure is not None:
            raise BareError(str(self._failure)) from self._failure

    def close(self) -> None:
        """Close at once; what is still unsent is lost."""
        if self._transport is not None:
            self._transport.abort()

    # --- the protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or BareError("connection closed"))

    def data_received(self, data: bytes) -> None:
        buffer = self._rest + data if self._rest else data
        self._flush_planned = True  # handlers only collect: one write below sends it all
        try:
            done = self._consume(buffer)
        except Exception as error:
            self._fail(error)
            raise
        self._rest = buffer[done:]
        self._flush()

    def _consume(self, buffer: bytes) -> int:
        position = 0
        while (eol := buffer.find(b"\r\n", position)) >= 0:
            kind = buffer[position]
            if kind in _DELIVERIES:
                end = self._deliver(buffer, position, eol)
                if end < 0:
                    break
                position = end
            else:
                self._control(kind, buffer[position:eol])
                position = eol + 2
        return position

    def _deliver(self, buffer: bytes, position: int, eol: int) -> int:
        """Dispatch the message whose line ends at `eol`; its end, or -1 while it is incomplete."""
        line = buffer[position:eol].split(b" ")
        start = eol + 2
        end = start + int(line[-1])
        if len(buffer) < end + 2:
            return -1
        header = b""
        fixed = 4
        if line[0] == b"HMSG":
            body_start = start + int(line[-2])
            header, start, fixed = buffer[start:body_start], body_start, 5
        reply = line[3] if len(line) > fixed else b""
        handler = self._handlers.get(line[2])
        if handler is not None:
            handler(line[1], reply, header, buffer[start:end])
        return end + 2

    def _control(self, kind: int, line: bytes) -> None:
        if kind == _ERROR:
            self._fail(BareError(line.decode()))
        elif line == b"PING":
            self._send(b"PONG\r\n")
        elif line == b"PONG" and self._pongs:
            self._pongs.pop(0).set_result(None)

    def _on_response(self, subject: bytes, _reply: bytes, _header: bytes, body: bytes) -> None:
        future = self._requests.pop(subject.rpartition(b".")[2], None)
        if future is not None and not future.done():
            future.set_result(body)

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        waiting: list[asyncio.Future[Any]] = [*self._requests.values(), *self._pongs]
        for future in waiting:
            if not future.done():
                future.set_exception(BareError(str(error)))
        self._requests.clear()
        self._pongs.clear()


class PullLoop:
    """Keeps several pull requests open on a durable consumer and gives every message to one handler."""

    def __init__(
        self,
        client: BareClient,
        stream: str,
        consumer: str,
        handler: Handler,
        *,
        pulls: int = 3,
        batch: int = 500,
    ) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}".encode()
        self._handler = handler
        self._request = json.dumps({"batch": batch, "expires": 30_000_000_000}).encode()
        self._batch = batch
        self._inbox = f"{client.inbox}.pull.{consumer}"
        self._left = [0] * pulls
        for slot in range(pulls):
            client.subscribe(f"{self._inbox}.{slot}", partial(self._on_message, slot))
            self._pull(slot)

    def _pull(self, slot: int) -> None:
        self._left[slot] = self._batch
        self._client.publish(self._subject, self._request, f"{self._inbox}.{slot}".encode())

    def _on_message(self, slot: int, subject: bytes, reply: bytes, header: bytes, body: bytes) -> None:
        if not reply:
            self._on_status(slot, header)
            return
        self._left[slot] -= 1
        self._handler(subject, reply, header, body)
        if self._left[slot] == 0:
            self._pull(slot)

    def _on_status(self, slot: int, header: bytes) -> None:
        """408 and 409 end one pull request; anything else means that the consumer is not there."""
        if header.startswith(b"NATS/1.0 100"):
            return
        if not header.startswith((b"NATS/1.0 408", b"NATS/1.0 409")):
            raise BareError(f"pull refused: {header.decode()}")
        self._pull(slot)
