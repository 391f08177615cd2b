"""The composition: what a notify consumer consists of, in which order it starts, and how it ends.

At the end readiness goes first; then no more resumes are asked for, and what has arrived is put away; then running
handlers finish within the grace and the rest is handed back; then the connections close, HTTP last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys

from notify_consumer import events
from notify_consumer.config import Settings
from notify_consumer.consumer import ResumeConsumer
from notify_consumer.errors import OutboxUnavailable
from notify_consumer.handlers import Handlers
from notify_consumer.metrics import Metrics
from notify_consumer.outbox import make_outbox
from notify_consumer.outbox.base import State
from notify_consumer.relay import Relay
from notify_consumer.retention import kept_ms
from timer_service.client import TimerClient
from timer_service.config import split_address
from timer_service.http import HttpServer, Readiness, Reason
from timer_service.jetstream.connection import Connection
from timer_service.logs import get_logger
from timer_service.urls import shown_url

RETRY_S = 1.0
WATCH_S = 0.1
COUNT_S = 2.0
PRUNE_S = 3_600.0


class App:
    """One notify consumer. ``run`` returns after ``stop`` when everything is drained."""

    def __init__(self, settings: Settings, handlers: Handlers) -> None:
        self._settings = settings
        self._log = get_logger()
        self._stopping = asyncio.Event()
        self._working = False
        self._outbox_error: str | None = "not opened yet"
        self._counts: dict[State, int] = {}
        self.metrics = Metrics()
        self.outbox = make_outbox(
            settings.outbox, nats=settings.nats, creds=settings.creds, timeout_ms=settings.request_timeout_ms
        )
        self.connection = Connection(
            settings.nats,
            name=f"notify-consumer.{settings.instance}",
            creds=settings.creds,
            timeout_ms=settings.request_timeout_ms,
        )
        self.client = TimerClient(self.connection, timeout_ms=settings.request_timeout_ms)
        # A claim belongs to this very process: one that starts under the same name does not inherit it.
        owner = f"{settings.instance}/{os.getpid()}/{secrets.token_hex(4)}"
        self.relay = Relay(
            self.outbox, handlers, self.client, owner=owner, policy=settings.policy, metrics=self.metrics
        )
        self.consumer = ResumeConsumer(
            self.connection,
            self.outbox,
            handlers,
            on_rows=self.relay.wake,
            on_unavailable=self.relay.say_unavailable,
            metrics=self.metrics,
        )
        host, port = split_address(settings.http)
        self.http = HttpServer(host, port, ready=self.readiness, registry=self.metrics.registry)

    def stop(self) -> None:
        """Begin to drain. Repeating it does nothing."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until ``stop``. Raises OSError when the HTTP address can't be had."""
        self._log.info(
            events.SERVICE_STARTING, instance=self._settings.instance, outbox=shown_url(self._settings.outbox)
        )
        await self.http.start()
        self._log.info(events.HTTP_LISTENING, address=self._settings.http, port=self.http.port)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._watch_readiness(), name="app.readiness"),
                tasks.create_task(self._keep_counting(), name="app.counts"),
                tasks.create_task(self._keep_pruning(), name="app.prune"),
            ]
            serving = tasks.create_task(self._serve(), name="app.serve")
            await self._stopping.wait()
            self._log.info(events.SERVICE_DRAINING)
            self.relay.stop()
            await self._ended(serving)
            for task in background:
                task.cancel()
        await self._close()

    # -- the parts ----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Open what is needed, as long as it takes, then work until the relay has drained."""
        await self._open_outbox()
        await self.connection.open()
        await self.client.open()
        self._working = True
        consuming = asyncio.create_task(self.consumer.run(), name="app.consumer")
        relaying = asyncio.create_task(self.relay.run(), name="app.relay")
        stopping = asyncio.create_task(self._stopping.wait(), name="app.stopping")
        try:
            await asyncio.wait({consuming, relaying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                await self.consumer.stop()
                await relaying
        finally:
            for task in (consuming, relaying, stopping):
                task.cancel()
            results = await asyncio.gather(consuming, relaying, stopping, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result  # one of them failed: so does the process, and is started anew

    async def _open_outbox(self) -> None:
        while True:
            try:
                await self.outbox.open()
            except OutboxUnavailable as error:
                if str(error) != self._outbox_error:
                    self._log.warning(events.OUTBOX_UNAVAILABLE, error=str(error))
                self._outbox_error = str(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._outbox_error = None
                return

    async def _ended(self, serving: asyncio.Task[None]) -> None:
        """Wait for the parts to drain; while they are not even up there is nothing to wait for."""
        if not self._working:
            serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    async def _close(self) -> None:
        await self.client.close()
        await self.connection.close()
        await self.outbox.close()
        await self.http.stop()
        self._log.info(events.SERVICE_STOPPED)

    async def _keep_counting(self) -> None:
        while True:
            if self._outbox_error is None:
                with contextlib.suppress(OutboxUnavailable):  # the relay says so
                    self._counts = await self.outbox.counts()
                    self.metrics.rows(self._counts)
            self.metrics.handling(self.relay.handling)
            await asyncio.sleep(COUNT_S)

    async def _keep_pruning(self) -> None:
        while True:
            if self._outbox_error is None:
                with contextlib.suppress(OutboxUnavailable):  # so the next time
                    older_than_ms = await kept_ms(self.connection, self._settings.keep_done_s * 1000)
                    removed = await self.outbox.prune_done(older_than_ms)
                    self._log.info(events.OUTBOX_PRUNED, removed=removed, older_than_ms=older_than_ms)
            await asyncio.sleep(PRUNE_S if self._outbox_error is None else RETRY_S)

    # -- readiness ----------------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """What ``/readyz`` says."""
        reasons = [*self._reasons()]
        details = {
            "role": "consumer",
            "instance": self._settings.instance,
            "handling": self.relay.handling,
            "sending": self.relay.sending,
            "rows": {state.value: count for state, count in self._counts.items()},
        }
        return Readiness(not reasons, reasons, details)

    def _reasons(self) -> list[Reason]:
        if self._stopping.is_set():
            return [Reason("draining", "process", "the process is ending")]
        found = []
        if outbox := self._outbox_error or self.relay.unavailable:
            found.append(Reason("outbox_unavailable", shown_url(self._settings.outbox), outbox))
        if not self.connection.connected:
            found.append(
                Reason("broker_unreachable", shown_url(self._settings.nats), self.connection.last_error or "…")
            )
        elif (reason := self.consumer.reason) is not None:
            found.append(reason)
        return found

    async def _watch_readiness(self) -> None:
        said: list[Reason] | None = None
        while True:
            reasons = self._reasons()
            if reasons != said:
                said = reasons
                self._say(reasons)
            await asyncio.sleep(WATCH_S)

    def _say(self, reasons: list[Reason]) -> None:
        if not reasons:
            self._log.info(events.SERVICE_READY)
        for reason in reasons:
            self._log.warning(
                events.SERVICE_NOT_READY, code=reason.code, resource=reason.resource, message=reason.message
            )


async def serve(settings: Settings, handlers: Handlers) -> None:
    """Run an App until SIGTERM or SIGINT; a second signal ends the process at once."""
    app = App(settings, handlers)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        app.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await app.run()
    if app.relay.stuck:
        # A handler that ignores its cancellation would keep the event loop from ever closing.
        sys.stderr.flush()
        os._exit(0)
