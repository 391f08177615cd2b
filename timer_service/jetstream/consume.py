"""The pull loop: a plain subscription that asks a consumer for messages as fast as they are settled.

At most ``window`` messages are unsettled or asked for at any time: that bounds memory and what a crash leaves to
be delivered again. Requests carry short heartbeats, so that a broker that went silent is noticed within
seconds; after a reconnect everything is asked for anew at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import nats.errors

from timer_service.errors import BrokerError
from timer_service.jetstream.connection import Connection, Received

_HEARTBEAT_NS = 1_000_000_000
_EXPIRES_NS = 30_000_000_000
_SILENT_S = 2.5
_CHECK_S = 0.5
ACK = b"+ACK"
_NAK = b"-NAK"
_IN_PROGRESS = b"+WPI"


class Delivery:
    """One message as delivered. Settle it exactly once: ``ack``, ``nak`` or ``term``."""

    __slots__ = (
        "_loop",
        "consumer",
        "consumer_seq",
        "data",
        "headers",
        "pending",
        "reply",
        "seq",
        "stored_ns",
        "subject",
    )

    def __init__(self, loop: PullLoop, message: Received) -> None:
        self._loop = loop
        self.subject = message.subject
        self.data = message.data
        self.headers: dict[str, str] | None = message.headers
        self.reply = message.reply
        tokens = message.reply.split(".")
        first = 5 if len(tokens) == 9 else 7  # longer ones have a domain and an account hash in front
        self.consumer = tokens[first - 2]
        self.seq = int(tokens[first])
        self.consumer_seq = int(tokens[first + 1])
        self.stored_ns = int(tokens[first + 2])
        self.pending = int(tokens[first + 3])

    @property
    def stored_at_ms(self) -> int:
        """When the broker stored it, rounded up: a delay from here is never short."""
        return -(-self.stored_ns // 1_000_000)

    async def ack(self) -> None:
        """Done. A lost ack means another delivery, which must be harmless."""
        await self._loop.settle(self.reply, ACK)

    async def nak(self, delay_ms: int = 0) -> None:
        """Give it back, to be delivered again after ``delay_ms``."""
        await self._loop.settle(self.reply, b'-NAK {"delay": %d}' % (delay_ms * 1_000_000) if delay_ms else _NAK)

    async def park(self) -> None:
        """It waits for something else: it takes no room in the window from here on. Whoever parks bounds how many."""
        await self._loop.park(self.reply)

    async def in_progress(self) -> None:
        """Still working: the broker's redelivery clock starts anew."""
        await self._loop.respond(self.reply, _IN_PROGRESS)


class PullLoop:
    """Delivers the messages of one durable consumer to ``handle``, a plain function that must not block."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        handle: Callable[[Delivery], None],
        *,
        window: int = 1024,
        batch: int = 256,
        acks: bool = True,
        on_missing: Callable[[], None] | None = None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._acks = acks
        self.retarget(consumer)
        self._handle = handle
        self._window = window
        self._batch = batch
        self._on_missing = on_missing
        self._asked = 0
        self._unsettled: set[str] = set()
        self._parked: set[str] = set()
        self._pulling = False
        self._heard = 0.0
        self._round = 0
        self._inbox = ""
        self._subscription: Any = None
        self._watchdog: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self.healthy = False

    def retarget(self, consumer: str) -> None:
        """Ask this consumer from the next request on."""
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer}"

    async def start(self) -> None:
        """Subscribe and begin to ask. The connection must be open."""
        self._inbox = self._connection.client.new_inbox()
        self._subscription = await self._connection.subscribe(f"{self._inbox}.*", self._on_message)
        self._connection.on_returned(self.ask_anew)
        self._pulling, self._asked = True, 0  # what an earlier subscription had asked for ended with it
        self._heard = asyncio.get_running_loop().time()
        self.healthy = True  # until it has been silent for too long: the first heartbeat takes a second
        self._watchdog = asyncio.create_task(self._watch(), name=f"pull.{self._subject}")
        await self._ask()

    async def stop_pulling(self) -> None:
        """Take no further message; what is under way may still be settled. Repeating it does nothing."""
        self._pulling = False
        self._connection.forget(self.ask_anew)
        if self._watchdog is not None:
            self._watchdog.cancel()
        subscription, self._subscription = self._subscription, None
        if subscription is not None and self._connection.connected:
            await self._drain(subscription)

    async def _drain(self, subscription: Any) -> None:
        """What is here already is handed back by ``_on_message``; without a broker it is delivered again anyway."""
        try:
            await asyncio.wait_for(subscription.drain(), self._connection.timeout_s)
        except (TimeoutError, nats.errors.Error, OSError):
            self.healthy = False

    async def hand_back(self) -> int:
        """Give back all that is not settled, for others to take at once; returns how many messages that were."""
        rest = [*self._unsettled, *self._parked]
        for reply in rest:
            await self.settle(reply, _NAK)
        return len(rest)

    @property
    def unsettled(self) -> int:
        return len(self._unsettled)

    async def settle(self, reply: str, answer: bytes) -> None:
        """Answer a delivery for good, and ask for more when enough room is there."""
        self._unsettled.discard(reply)
        self._parked.discard(reply)
        await self.respond(reply, answer)
        await self._ask_for_enough()

    async def park(self, reply: str) -> None:
        """Give this delivery's place to another; it is still to be settled."""
        self._unsettled.discard(reply)
        self._parked.add(reply)
        await self._ask_for_enough()

    async def _ask_for_enough(self) -> None:
        if self._window - self._asked - len(self._unsettled) >= self._batch:
            await self._ask()

    async def respond(self, reply: str, answer: bytes) -> None:
        """Answer a delivery without settling it."""
        try:
            await self._connection.publish(reply, answer)
        except BrokerError:
            return  # a lost answer means one more delivery, never a loss

    async def _ask(self) -> None:
        if not self._pulling or not self._connection.connected:
            return
        room = self._window - self._asked - len(self._unsettled)
        while room >= self._batch:
            self._asked += self._batch
            room -= self._batch
            await self._request(self._batch)

    async def _request(self, batch: int) -> None:
        body = {"batch": batch, "expires": _EXPIRES_NS, "idle_heartbeat": _HEARTBEAT_NS}
        await self._connection.publish(self._subject, msgspec.json.encode(body), f"{self._inbox}.{self._round}")

    def ask_anew(self) -> None:
        """Forget what was asked for; requests of earlier rounds may still deliver, which the window allows for."""
        if not self._pulling:
            return
        self._round += 1
        self._asked = 0
        self._heard = asyncio.get_running_loop().time()
        self._asking = asyncio.create_task(self._ask_safely())

    async def _ask_safely(self) -> None:
        try:
            await self._ask()
        except BrokerError:
            self.healthy = False  # the watchdog asks again

    async def _on_message(self, message: Received) -> None:
        self._heard = asyncio.get_running_loop().time()
        if message.reply.startswith("$JS.ACK."):
            self.healthy = True
            self._asked = max(0, self._asked - 1)
            if not self._pulling:
                await self.respond(message.reply, _NAK)
                return
            if self._acks:
                self._unsettled.add(message.reply)
            elif self._window - self._asked >= self._batch:
                await self._ask()
            self._handle(Delivery(self, message))
        else:
            await self._on_status(message)

    async def _on_status(self, message: Received) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status == "100":
            self.healthy = True
            return
        if not message.subject.endswith(f".{self._round}"):
            return
        pending = headers.get("Nats-Pending-Messages")
        if status in ("404", "408", "409") and pending is not None:
            self.healthy = True
            self._asked = max(0, self._asked - int(pending))
            await self._ask()
        else:
            self._missing()

    def _missing(self) -> None:
        """The consumer or its stream is gone, or nobody leads it; the watchdog goes on asking."""
        self.healthy = False
        self._asked = 0
        self._heard = asyncio.get_running_loop().time() - _SILENT_S + _CHECK_S
        if self._on_missing is not None:
            self._on_missing()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CHECK_S)
            if not self._connection.connected:
                self.healthy = False
            elif self._asked == 0 and len(self._unsettled) + self._batch > self._window:
                continue  # full of unsettled work: nothing is asked for, so nothing is to be heard
            elif loop.time() - self._heard > _SILENT_S:
                self.healthy = False
                self.ask_anew()
