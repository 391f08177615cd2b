"""A notify consumer on a real broker, with a stand-in for the timer service."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from notify_consumer.app import App, NotifyConsumer
from notify_consumer.config import Settings
from notify_consumer.handlers import Handlers
from notify_consumer.outbox.base import Row, State
from tests.support.notify import resume_body, resume_bytes, until
from timer_service.jetstream import topology
from timer_service.jetstream.topology import Sizes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from timer_service.http import Readiness

READY_S = 30.0


class Bench:
    """Publishes resumes by hand and answers feedback as told; ``answers`` None: it stays silent."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.handlers = Handlers()
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.answer: dict[str, Any] | None = {"status": "accepted", "code": None}
        self.nats = Client()

    async def connect(self) -> None:
        self.nats = await nats.connect(self.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        await self.nats.subscribe("durable_timer.commands.>", cb=self._on_command)
        for _ in range(2):  # the first ping overtakes what the client has still to send
            await self.nats.flush()

    async def _on_command(self, message: Msg) -> None:
        body = json.loads(message.data)
        self.commands.append((message.subject.split(".")[2], body))
        reply = (message.headers or {}).get("Durable-Timer-Reply")
        if self.answer is not None and reply:
            silent = dict.fromkeys(("message", "timer_ref", "generation", "fence", "phase", "due_at_ms"))
            outcome = {"command_id": body["command_id"], **silent, **self.answer}
            await self.nats.publish(reply, json.dumps(outcome).encode())

    async def api(self, name: str, body: object = None) -> dict[str, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        reply = await self.nats.request(f"$JS.API.{name}", data, timeout=20)
        answer: dict[str, Any] = json.loads(reply.data)
        assert "error" not in answer, answer
        return answer

    async def provide_streams(self, *names: str) -> None:
        """The streams that matter here, as ``provision`` makes them; no consumer."""
        for spec in topology.streams(Sizes()):
            if spec.name in (names or (topology.RESUMES, topology.COMMANDS, topology.LEASE_STREAM)):
                await self.api(f"STREAM.CREATE.{spec.name}", spec.config(1))

    async def publish(self, *names: str, **fields: Any) -> None:
        for name in names:
            await self.publish_bytes(resume_bytes(name, **fields))

    async def publish_bytes(self, data: bytes) -> None:
        await self.nats.jetstream().publish(topology.RESUME_SUBJECT, data)

    async def unread(self) -> int:
        """Resumes that stand in the stream, not acknowledged yet."""
        info = await self.api(f"STREAM.INFO.{topology.RESUMES}")
        return int(info["state"]["messages"])

    async def all_read(self) -> None:
        async def none() -> bool:
            return await self.unread() == 0

        await until(none, "every resume is acknowledged")

    def settings(self, **changes: Any) -> Settings:
        given: dict[str, Any] = {
            "nats": self.url,
            "http": "127.0.0.1:0",
            "instance": "test",
            "outbox": f"sqlite:{self.folder / 'outbox.db'}",
            "backoff_initial_ms": 5,
            "backoff_max_ms": 10,
            "request_timeout_ms": 1_000,
            "drain_grace_ms": 5_000,
        }
        return Settings(**(given | changes))

    @asynccontextmanager
    async def running(self, *, ready: bool = True, **changes: Any) -> AsyncIterator[App]:
        """A notify consumer within the block; drained at its end."""
        app = App(self.settings(**changes), self.handlers)
        task = asyncio.create_task(app.run())
        try:
            if ready:
                await until(lambda: task.done() or app.readiness().ready, "the consumer is ready")
            yield app
        finally:
            app.stop()
            await task

    @asynccontextmanager
    async def crashing(self, **changes: Any) -> AsyncIterator[App]:
        """As ``running``, but ends as SIGKILL would: nothing is written, released or closed at the end."""
        app = App(self.settings(**changes), self.handlers)
        task = asyncio.create_task(app.run())
        try:
            await until(lambda: task.done() or app.readiness().ready, "the consumer is ready")
            yield app
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await app.connection.close()
            await app.outbox.close()
            await app.http.stop()


async def reaches(app: NotifyConsumer, state: State, name: str = "order-1", **fields: Any) -> Row:
    """The row of the resume ``name`` once it is in ``state``."""
    resume_id = resume_body(name, **fields)["resume_id"]

    async def there() -> Row | None:
        row = await app.outbox.get(resume_id)
        return row if row is not None and row.state is state else None

    row: Row = await until(there, f"{name} is {state}")
    return row


def codes(readiness: Readiness) -> set[str]:
    return {reason.code for reason in readiness.reasons}


async def gets_ready(consumer: NotifyConsumer) -> None:
    """Wait as an embedding program does, but not for ever."""
    try:
        async with asyncio.timeout(READY_S):
            await consumer.until_ready()
    except TimeoutError:
        raise AssertionError(f"not ready within {READY_S:g} s: {consumer.health.reasons}") from None
