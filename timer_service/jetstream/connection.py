"""The one connection of a process: it comes back by itself, and says when it went and when it returned."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
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
)
from timer_service.jetstream import topology
from timer_service.jetstream.framing import Client
from timer_service.urls import shown_url

PENDING_BYTES = 256 * 2**20
_RECONNECT_WAIT_S = 0.1
_CONNECT_TIMEOUT_S = 2
_PING_INTERVAL_S = 5
_STORAGE_CODES: dict[int, str | None] = {
    10077: None,  # the stream's max_bytes
    10122: None,
    10002: "account",
    10028: "account",
    10023: "nats-server",  # its max_file_store
    10047: "nats-server",
    10076: "nats-server",
}
"""The codes that mean "no room", and whose room that is when it isn't the stream's."""
_NOT_FOUND_CODES = frozenset({10014, 10037, 10059})
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
PUBLISH, SUBSCRIBE = "publish on", "subscribe to"
_VERBS = {"publish": PUBLISH, "subscription": SUBSCRIBE}
_MAX_DENIALS = 64

Listener = Callable[[], None]


class Denial(msgspec.Struct, frozen=True):
    """Something that the account may not do: to "publish on" or "subscribe to" a subject, as it would be granted."""

    verb: str
    subject: str

    def __str__(self) -> str:
        return f"no permission to {self.verb} {self.subject}; grant it to this account"


_DEAF = Denial(SUBSCRIBE, "_INBOX.>")
"""No reply can be heard."""
DenialListener = Callable[[Denial, str], None]


class Received:
    """A message as received: what nats-py's own holds, without what a pull loop has no use for."""

    __slots__ = ("_client", "_sid", "data", "headers", "reply", "subject")

    def __init__(
        self, subject: str, reply: str, data: bytes, headers: dict[str, str] | None, _client: Any, _sid: int
    ) -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self.headers = headers
        self._client = _client
        self._sid = _sid


class _Client(Client):
    """nats-py 2.16 stops reading for good at a message whose header block is cut short or has an unreadable status.

    Any publisher of commands can send one, and the broker would deliver it again and again: it counts as one
    without headers here. Blocks that begin as they should are left to nats-py, which takes them whatever follows.
    """

    msg_class: Any = Received

    def _process_headers(self, headers: Any) -> Any:
        reading = super()._process_headers(headers)
        return reading if not headers or headers[8:10] == b"\r\n" else _none_if_unreadable(reading)

    async def _process_pong(self) -> None:
        """nats-py stops reading for good at the pong of a flush that was given up: let one come that nobody awaits."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def flush(self, timeout: float = 10) -> None:
        """As nats-py's, but for its ``wait_for``, which before Python 3.12 swallows a cancel that meets the pong."""
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._send_ping(pong)
                await pong
        except TimeoutError:
            raise nats.errors.FlushTimeoutError from None

    async def subscribe_again(self) -> None:
        """Repeat every subscription. The broker ignores those it has, and so takes what it refused before."""
        for subscription in list(self._subs.values()):
            await self._send_subscribe(subscription)


async def _none_if_unreadable(reading: Awaitable[Any]) -> Any:
    try:
        return await reading
    except (IndexError, UnicodeDecodeError):
        return None


class Connection:
    """A nats-py client with listeners. ``connected`` is None until the first connection."""

    def __init__(self, url: str, *, name: str, creds: str | None = None, timeout_ms: int = 5000) -> None:
        self.url = url
        self.name = name
        self.timeout_s = timeout_ms / 1000
        self.last_error: str | None = None
        self.denials: dict[Denial, float] = {}
        """What the broker has refused for want of permission, and when it last did (monotonic, in seconds)."""
        self.closed = asyncio.Event()
        self._creds = creds
        self._client: _Client | None = None
        self._denied: list[DenialListener] = []
        self._lost: list[Listener] = []
        self._returned: list[Listener] = []

    async def open(self) -> None:
        """Connect; keeps trying until the broker is there. Cancel it to give up. Raises Unavailable for a bad URL."""
        try:
            await self._open()
        except nats.errors.Error as error:
            raise Unavailable(f"{shown_url(self.url)!r} can't be used: {str(error).removeprefix('nats: ')}") from error

    async def _open(self) -> None:
        options: dict[str, Any] = {"reconnect_time_wait": _RECONNECT_WAIT_S}  # nats-py's annotation wants whole seconds
        if self._creds:
            options["user_credentials"] = self._creds
        client = _Client()
        await client.connect(
            self.url.split(","),  # several addresses of one cluster: where one is away the next is tried
            name=self.name,
            connect_timeout=_CONNECT_TIMEOUT_S,
            max_reconnect_attempts=-1,
            ping_interval=_PING_INTERVAL_S,
            pending_size=PENDING_BYTES,
            no_echo=True,  # what we publish ourselves is no news to us
            skip_subject_validation=True,  # every subject is built in topology.py or checked there
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            **options,
        )
        self._client = client
        self.last_error = None

    async def close(self) -> None:
        """Write out what was published and close. Repeating it does nothing."""
        if self._client is None or self._client.is_closed:
            return
        try:
            await self._client.close()
        except (nats.errors.Error, OSError) as error:
            self.last_error = str(error)  # the broker is away; what was not written is lost either way

    @property
    def client(self) -> _Client:
        if self._client is None:
            raise Unavailable(f"not connected to {shown_url(self.url)} yet")
        return self._client

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def max_payload(self) -> int:
        return self.client.max_payload

    @property
    def server_version(self) -> str:
        version = self.client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    def on_lost(self, listener: Listener) -> None:
        """``listener`` is called when the connection is lost."""
        self._lost.append(listener)

    def on_returned(self, listener: Listener) -> None:
        """``listener`` is called when the connection is there again."""
        self._returned.append(listener)

    def on_denied(self, listener: DenialListener) -> None:
        """``listener`` is called for each refusal, with the whole subject in lower case."""
        self._denied.append(listener)

    def denied_since(self, since_s: float) -> list[Denial]:
        """What was refused after ``since_s`` on the monotonic clock."""
        return [denial for denial, at_s in self.denials.items() if at_s >= since_s]

    def forget(self, listener: Listener) -> None:
        """Call ``listener`` no more. Repeating it does nothing."""
        self._lost = [known for known in self._lost if known != listener]
        self._returned = [known for known in self._returned if known != listener]

    async def subscribe(self, subject: str, callback: Callable[[Any], Awaitable[None]]) -> Any:
        """A plain subscription without limits of its own: those who ask for messages bound what is on its way.

        Raises Unavailable when the connection is closed.
        """
        try:
            return await self.client.subscribe(subject, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"{subject}: {error!r}") from error

    async def unsubscribe(self, subscription: Any) -> None:
        """End a subscription; one that ended with its connection is left as it is."""
        if self._client is not None and not self._client.is_closed:
            try:
                await subscription.unsubscribe()
            except (nats.errors.Error, OSError) as error:
                self.last_error = str(error)  # it is not repeated after a reconnect either way

    async def subscribe_again(self) -> None:
        """Try the subscriptions anew that the broker has refused; those it has stay as they are. Raises Unavailable."""
        if self._client is not None:
            try:
                await self._client.subscribe_again()
            except (nats.errors.Error, OSError) as error:
                raise Unavailable(str(error)) from error

    async def flush(self) -> None:
        """Returns when the broker has taken, or refused, all that was sent. Raises Ambiguous, Unavailable."""
        try:
            await self.client.flush(self.timeout_s)  # nats-py sends this ping ahead of what it has still to send
            await self.client.flush(self.timeout_s)
        except (nats.errors.TimeoutError, TimeoutError):
            raise Ambiguous(f"the broker does not answer within {self.timeout_s:g} s") from None
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(str(error)) from error

    async def publish(
        self, subject: str, data: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """A core publish. Raises Unavailable when the client can't take it."""
        try:
            await self.client.publish(subject, data, reply, headers)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(str(error)) from error

    async def api(self, name: str, body: object = None) -> dict[str, Any]:
        """One request to ``$JS.API.<name>``. Raises the matching BrokerError; Ambiguous on a time-out."""
        data = b"" if body is None else msgspec.json.encode(body)
        reply = await self.request(f"$JS.API.{name}", data)
        answer: dict[str, Any] = msgspec.json.decode(reply)
        if "error" in answer:
            raise api_error(answer["error"], name)
        return answer

    async def request(self, subject: str, data: bytes = b"") -> bytes:
        """One core request. Raises Unavailable (nobody listens), Forbidden, Ambiguous (no answer in time)."""
        if time.monotonic() - self.denials.get(_DEAF, -math.inf) < self.timeout_s:
            raise Forbidden(str(_DEAF))
        refused: asyncio.Future[Denial] = asyncio.get_running_loop().create_future()
        listener = partial(_note_refusal, refused, subject.lower())
        self._denied.append(listener)
        asked = asyncio.create_task(self._ask(subject, data))
        try:
            waiting: set[asyncio.Future[Any]] = {asked, refused}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Forbidden(str(refused.result()))
            return asked.result()
        finally:
            self._denied.remove(listener)
            asked.cancel()
            refused.cancel()

    async def _ask(self, subject: str, data: bytes) -> bytes:
        try:
            message = await self.client.request(subject, data, timeout=self.timeout_s)
        except nats.errors.NoRespondersError:
            hint = "; is JetStream enabled for this account?" if subject.startswith("$JS.") else ""
            raise Unavailable(f"nobody answers on {subject}{hint}") from None
        except (nats.errors.TimeoutError, TimeoutError):
            raise Ambiguous(f"no answer on {subject} within {self.timeout_s:g} s") from None
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(str(error)) from error
        return message.data

    async def _on_error(self, error: Exception) -> None:
        self.last_error = str(error) or type(error).__name__
        violation = _VIOLATION.search(self.last_error.lower())
        if violation is not None:
            self._on_violation(violation[1], violation[2])

    def _on_violation(self, kind: str, subject: str) -> None:
        if len(self.denials) >= _MAX_DENIALS:
            self.denials.clear()
        denial = Denial(_VERBS[kind], topology.as_granted(subject))
        self.denials[denial] = time.monotonic()
        for listener in list(self._denied):
            listener(denial, subject)

    async def _on_disconnected(self) -> None:
        for listener in self._lost:
            listener()

    async def _on_reconnected(self) -> None:
        self.denials.clear()
        for listener in self._returned:
            listener()

    async def _on_closed(self) -> None:
        self.closed.set()


def _note_refusal(refused: asyncio.Future[Denial], asked: str, denial: Denial, subject: str) -> None:
    """A request can't be answered when it may not be sent, or its answer not be heard."""
    if not refused.done() and (subject == asked or (denial.verb == SUBSCRIBE and subject.startswith("_inbox."))):
        refused.set_result(denial)


def api_error(error: dict[str, Any], about: str) -> BrokerError:
    """The exception for an ``error`` object of the JetStream API."""
    code, err_code = error.get("code", 0), error.get("err_code", 0)
    text = f"{about}: {error.get('description', 'refused')} ({err_code or code})"
    if err_code in _STORAGE_CODES:
        return StorageFull(text, _STORAGE_CODES[err_code])
    if err_code in _NOT_FOUND_CODES or code == 404:
        return NotFound(text, err_code)
    if code in (401, 403):
        return Forbidden(text)
    return RequestRefused(text, err_code)
