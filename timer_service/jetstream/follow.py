"""Following a stream: what stands there first, then each change as it comes.

An ephemeral consumer without acks; whenever something may have been missed (reconnect, gap, silence, deleted
consumer) a new one takes up after the last message read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from timer_service.errors import BrokerError
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import Delivery, PullLoop
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.topology import NS

_INACTIVE_S = 30
_WINDOW = 500
"""Messages asked for at a time. Acks and wakes wait behind them on the connection: more would make a scan no faster."""
_BATCH = 125
_RETRY_S = 0.25


class Follower:
    """Calls ``on_message`` for each message in stream order, and ``on_caught_up`` once after the last present one.

    ``every`` reads all that stands; otherwise only the last message of each subject, and then every change.
    Without ``bodies`` a message comes as subject, sequence and headers. ``after_seq`` skips what came before.
    """

    def __init__(
        self,
        connection: Connection,
        publisher: Publisher,
        stream: str,
        filter_subject: str,
        on_message: Callable[[Delivery], None],
        on_caught_up: Callable[[], None],
        *,
        every: bool = False,
        bodies: bool = True,
        after_seq: int = 0,
    ) -> None:
        self._connection = connection
        self._publisher = publisher
        self._stream = stream
        self._filter = filter_subject
        self._on_message = on_message
        self._on_caught_up = on_caught_up
        self._every = every
        self._bodies = bodies
        self.last_seq = after_seq
        """The newest sequence read."""
        self.caught_up = False
        self._consumer = ""
        self._next_consumer_seq = 1
        self._restart_wanted = asyncio.Event()
        self._loop: PullLoop | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, or take up again after ``stop``. Raises BrokerError when the consumer can't be created."""
        name = await self._create_consumer()
        self._loop = PullLoop(
            self._connection,
            self._stream,
            name,
            self._on_delivery,
            window=_WINDOW,
            batch=_BATCH,
            acks=False,
            on_missing=self._restart_wanted.set,
        )
        self._connection.on_returned(self._restart_wanted.set)
        await self._loop.start()
        self._keeper = asyncio.create_task(self._keep(), name=f"follow.{self._stream}")

    async def stop(self) -> None:
        """Stop following. Repeating it does nothing."""
        self._connection.forget(self._restart_wanted.set)
        if self._keeper is not None:
            self._keeper.cancel()
        if self._loop is not None:
            await self._loop.stop_pulling()

    @property
    def healthy(self) -> bool:
        return self._loop is not None and self._loop.healthy

    async def _create_consumer(self) -> str:
        """A consumer that begins after ``last_seq``; from nothing, with what stands."""
        name = f"durable_timer_{self._connection.client.new_inbox().rsplit('.', 1)[-1]}"
        config: dict[str, Any] = {
            "name": name,
            "filter_subject": self._filter,
            "ack_policy": "none",
            "deliver_policy": "all" if self._every else "last_per_subject",
            "headers_only": not self._bodies,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _INACTIVE_S * NS,
        }
        if self.last_seq:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self.last_seq + 1}
        body = {"stream_name": self._stream, "config": config, "action": "create"}
        self._consumer, self._next_consumer_seq = name, 1
        answer = await self._publisher.api(f"CONSUMER.CREATE.{self._stream}.{name}.{self._filter}", body)
        if answer.get("num_pending", 0) == 0:
            self._reach_end()
        return name

    async def _keep(self) -> None:
        while True:
            await self._restart_wanted.wait()
            self._restart_wanted.clear()
            try:
                name = await self._create_consumer()
            except BrokerError:
                await asyncio.sleep(_RETRY_S)
                self._restart_wanted.set()
                continue
            if self._loop is not None:
                self._loop.retarget(name)
                self._loop.ask_anew()

    def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.consumer != self._consumer:
            return  # a late message of an earlier consumer: the present one delivers it, or has
        if delivery.consumer_seq != self._next_consumer_seq:
            self._restart_wanted.set()  # something is missing
            return
        self._next_consumer_seq += 1
        self.last_seq = max(self.last_seq, delivery.seq)
        self._on_message(delivery)
        if delivery.pending == 0:
            self._reach_end()

    def _reach_end(self) -> None:
        if not self.caught_up:
            self.caught_up = True
            self._on_caught_up()
