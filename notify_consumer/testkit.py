"""Handlers and flows under test: the whole ring in memory, in a time of your own.

    async with TimerTestKit(handlers) as kit:
        await kit.client.start({"name": "invoice-7"}, delay_ms=86_400_000, payload={"invoice": 7})
        await kit.advance(timedelta(days=1))
        assert (await kit.get({"name": "invoice-7"}))["status"] == "completed"

What a handler gets, what its answer does, how a failing one backs off: all of that is the code that runs in production,
on ``timer_service.testkit.MemoryService`` and a ``MemoryOutbox``. docs/testing.md tells how to use it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self, cast

from notify_consumer.consumer import ResumeConsumer
from notify_consumer.handlers import Handlers
from notify_consumer.policy import Policy
from notify_consumer.relay import Relay
from notify_consumer.testing import MemoryOutbox
from timer_service.jetstream.topology import RESUME_SUBJECT
from timer_service.testing import MemoryDelivery
from timer_service.testkit import T0_MS, MemoryService
from timer_service.wire.records import encode


class TimerTestKit(MemoryService):
    """A timer service, a notify consumer with ``handlers``, and one clock for both that only ``advance`` moves.

    Handlers run while time stands: what they take is not counted, and one that waits for time to pass never ends.
    ``outbox`` tells how their rows stand. Everything lives in one event loop and is gone at the end of the context.
    """

    def __init__(
        self,
        handlers: Handlers,
        *,
        now_ms: int = T0_MS,
        policy: Policy | None = None,
        resume_timeout_ms: int = 60_000,
    ) -> None:
        super().__init__(now_ms=now_ms, resume_timeout_ms=resume_timeout_ms)
        self.outbox = MemoryOutbox(self.clock)
        self._relay = Relay(self.outbox, handlers, self.client, owner="testkit", policy=policy or Policy())
        no_connection = cast(Any, None)  # resumes are given to it; it pulls none
        self._consumer = ResumeConsumer(
            no_connection, self.outbox, handlers, on_rows=self._relay.wake, on_unavailable=lambda _: None
        )
        self._relaying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._relaying = asyncio.create_task(self._relay.run(), name="testkit.relay")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._relay.stop()
        if self._relaying is not None:
            await self._relaying
        await super().__aexit__(kind, *error)

    async def next_at_ms(self) -> int | None:
        survey = await self.outbox.survey(1)
        backed_off = None if survey.next_in_ms is None else self.clock.now_ms() + survey.next_in_ms
        ahead = [at_ms for at_ms in (await super().next_at_ms(), backed_off) if at_ms is not None]
        return min(ahead, default=None)

    async def _others_work(self) -> bool:
        took_in = await self._take_in()
        claimable = bool((await self.outbox.survey(1)).lanes)
        if claimable:
            self._relay.wake()
        return took_in or claimable or self._relay.handling > 0 or self._relay.sending > 0

    async def _take_in(self) -> bool:
        deliveries: list[Any] = []
        while (resume := self.resumes.read()) is not None:
            seq = len(deliveries) + 1
            deliveries.append(MemoryDelivery(RESUME_SUBJECT, encode(resume), seq=seq, stored_at_ms=self.clock.now_ms()))
        if deliveries:
            await self._consumer._take_in(deliveries)
        return bool(deliveries)
