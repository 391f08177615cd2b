"""The composition: what a notify consumer consists of, in which order it starts, and how it ends.

    async with NotifyConsumer(Settings(instance="shop-1"), handlers) as consumer:    # within another program
        ...

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
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

from notify_consumer import events
from notify_consumer.config import Settings
from notify_consumer.consumer import ResumeConsumer
from notify_consumer.depth import Depth
from notify_consumer.errors import OutboxUnavailable
from notify_consumer.handlers import Handlers
from notify_consumer.metrics import Metrics
from notify_consumer.outbox import make_outbox
from notify_consumer.relay import Relay
from notify_consumer.retention import kept_ms
from timer_service.client import TimerClient
from timer_service.clock import SystemClock
from timer_service.config import split_address
from timer_service.http import HttpServer, Readiness, Reason
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.topology import NOTIFY_CONSUMER
from timer_service.logs import get_logger
from timer_service.roles import Name
from timer_service.urls import shown_url

RETRY_S = 1.0
WATCH_S = 0.1
LOOK_S = 2.0
PRUNE_S = 3_600.0


class NotifyConsumer:
    """One notify consumer within an asyncio program: ``start`` and ``stop`` it, or use it as a context manager.

    It installs no signal handlers, leaves the set-up of logging as it is, and serves HTTP only when asked to with
    ``http``. Several may run in one process, each with an ``instance`` of its own; each works once. ``client`` may be
    used for timers of one's own while it runs.
    """

    def __init__(self, settings: Settings, handlers: Handlers, *, http: bool = False) -> None:
        self._settings = settings
        self._serves_http = http
        self._clock = SystemClock()
        self._log = get_logger()
        self._stopping = asyncio.Event()
        self._ended_all = asyncio.Event()
        self._started = False
        self._running: asyncio.Task[None] | None = None
        self.failure: Exception | None = None
        """What ended it by itself, None while nothing has."""
        self._working = False
        self._said: list[Reason] | None = None
        self._outbox_error: str | None = "not opened yet"
        self.metrics = Metrics()
        self.outbox = make_outbox(
            settings.outbox, nats=settings.nats, creds=settings.creds, timeout_ms=settings.request_timeout_ms
        )
        self._depth = Depth(self.outbox, self.metrics, self._clock)
        self.connection = Connection(
            settings.nats,
            name=f"notify-consumer.{settings.instance}",
            creds=settings.creds,
            timeout_ms=settings.request_timeout_ms,
        )
        self.client = TimerClient(
            self.connection, timeout_ms=settings.request_timeout_ms, reply_prefix=settings.reply_prefix
        )
        self.publisher = Publisher(self.connection)
        self.name = Name(self.connection, self.publisher, NOTIFY_CONSUMER, settings.instance, self._log)
        # A claim belongs to this very process: one that starts under the same name does not inherit it.
        self._owner = f"{settings.instance}/{os.getpid()}/{secrets.token_hex(4)}"
        self._handlers = handlers
        self._former: list[Relay] = []
        self._build_parts()
        host, port = split_address(settings.http)
        self.http = HttpServer(host, port, ready=self.readiness, registry=self.metrics.registry)

    def _build_parts(self) -> None:
        """What works while the name is ours; each time anew."""
        handlers, policy = self._handlers, self._settings.policy
        self.relay = Relay(self.outbox, handlers, self.client, owner=self._owner, policy=policy, metrics=self.metrics)
        self.consumer = ResumeConsumer(
            self.connection,
            self.outbox,
            handlers,
            on_rows=self.relay.wake,
            on_unavailable=self.relay.say_unavailable,
            metrics=self.metrics,
        )

    async def start(self) -> None:
        """Begin to work, and return while it gets ready: ``until_ready`` waits for that, ``health`` tells.

        Broker and outbox may come later. Raises OSError when HTTP was asked for and its address can't be had,
        RuntimeError when it was started before.
        """
        await self._listen()
        self._running = asyncio.create_task(self._keep_running(), name="notify-consumer")

    def stop(self) -> Ending:
        """Begin to drain; await what this returns for the end of it. Repeating it does nothing."""
        self._stopping.set()
        return Ending(self._end)

    async def wait(self) -> None:
        """Wait until it has ended, by ``stop`` or by itself. Raises what it failed with."""
        await self._end()
        if self.failure is not None:
            raise self.failure

    async def until_ready(self) -> None:
        """Wait until it is ready once. Raises what it failed with, RuntimeError when it was stopped before."""
        while not self.health.ready:
            if self._stopping.is_set() or self._ended_all.is_set():
                await self.wait()
                raise RuntimeError("the notify consumer was stopped before it was ready")
            await asyncio.sleep(WATCH_S)

    @property
    def health(self) -> Readiness:
        """Whether it is ready, the reasons against it, and details; the same as ``/readyz`` says."""
        return self.readiness()

    async def __aenter__(self) -> NotifyConsumer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if error is None and self.failure is not None:
            raise self.failure

    async def run(self) -> None:
        """Work until ``stop``. Raises what ``start`` raises, and what it failed with. Cancelling it is a crash."""
        await self._listen()
        await self._run()

    async def _listen(self) -> None:
        if self._started:
            raise RuntimeError("a notify consumer works once: make a new one")
        self._log.info(
            events.SERVICE_STARTING, instance=self._settings.instance, outbox=shown_url(self._settings.outbox)
        )
        if self._serves_http:
            await self.http.start()
            self._log.info(events.HTTP_LISTENING, address=self._settings.http, port=self.http.port)
        self._started = True

    async def _end(self) -> None:
        if self._started:
            await self._ended_all.wait()

    async def _keep_running(self) -> None:
        with contextlib.suppress(Exception):  # it is kept in failure
            await self._run()

    async def _run(self) -> None:
        try:
            await self._drained()
        except ExceptionGroup as group:
            self.failure = _first(group)
            self._log.exception(events.SERVICE_FAILED, error=str(self.failure))
        except asyncio.CancelledError:
            self._ended_all.set()
            raise
        try:
            await self._close()
        finally:
            self._ended_all.set()
        if self.failure is not None:
            raise self.failure

    async def _drained(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._watch_readiness(), name="app.readiness"),
                tasks.create_task(self._keep_looking(), name="app.depth"),
                tasks.create_task(self._keep_pruning(), name="app.prune"),
            ]
            serving = tasks.create_task(self._serve(), name="app.serve")
            await self._stopping.wait()
            self._log.info(events.SERVICE_DRAINING)
            self.relay.stop()
            await self._ended(serving)
            for task in background:
                task.cancel()

    # -- the parts ----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Open what is needed, as long as it takes, then work while the name is ours, until the relay has drained."""
        await self._open_outbox()
        await self.connection.open()
        await self.client.open()
        await self.publisher.start()
        await self.name.lease.start()
        while not self._stopping.is_set():
            await self.name.until(ours=True)
            self._working = True
            await self._work()
            if not self._stopping.is_set():
                self._working = False
                self._former.append(self.relay)
                self._build_parts()

    async def _work(self) -> None:
        """Take in and hand off until the process ends, or another one has its name."""
        consuming = asyncio.create_task(self.consumer.run(), name="app.consumer")
        relaying = asyncio.create_task(self.relay.run(), name="app.relay")
        stopping = asyncio.create_task(self._stopping.wait(), name="app.stopping")
        lost = asyncio.create_task(self.name.until(ours=False), name="app.name")
        try:
            await asyncio.wait({consuming, relaying, stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set() or lost.done():
                self.relay.stop()
                await self.consumer.stop()
                await relaying
        finally:
            for task in (consuming, relaying, stopping, lost):
                task.cancel()
            results = await asyncio.gather(consuming, relaying, stopping, lost, return_exceptions=True)
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
        """Close everything, from the end of this list to its beginning, also when one of them fails to."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._log.info, events.SERVICE_STOPPED)
            stack.push_async_callback(self.http.stop)
            stack.push_async_callback(self.outbox.close)
            stack.push_async_callback(self.connection.close)
            stack.push_async_callback(self.publisher.stop)
            stack.push_async_callback(self.client.close)
            stack.push_async_callback(self.name.lease.give_up)  # last: another process under it begins at once
            if self.failure is not None:
                stack.push_async_callback(self.consumer.stop)  # it was left as it was

    async def _keep_looking(self) -> None:
        while True:
            self.metrics.handling(self.relay.handling, self.relay.longest_s)
            if self._outbox_error is None:
                with contextlib.suppress(OutboxUnavailable):  # the relay says so
                    await self._depth.look()
            await asyncio.sleep(LOOK_S)

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
        """What ``/readyz`` says. Whoever asks, a change is in the log before the answer is out."""
        reasons = self._reasons()
        self._log_change(reasons)
        details = {
            "role": "consumer",
            "instance": self._settings.instance,
            "handling": self.relay.handling,
            "sending": self.relay.sending,
            "rows": {state.value: count for state, count in self._depth.counts.items()},
        }
        return Readiness(not reasons, reasons, details)

    def _reasons(self) -> list[Reason]:
        if self.failure is not None:
            return [Reason("failed", "process", f"{type(self.failure).__name__}: {self.failure}")]
        if self._stopping.is_set():
            return [Reason("draining", "process", "the process is ending")]
        found = []
        if outbox := self._outbox_error or self.relay.unavailable:
            found.append(Reason("outbox_unavailable", shown_url(self._settings.outbox), outbox))
        if not self.connection.connected:
            found.append(
                Reason(
                    "broker_unreachable",
                    shown_url(self._settings.nats),
                    self.connection.last_error or "not connected yet",
                )
            )
        else:
            found += self.name.reasons
            if self.name.ours and (reason := self.consumer.reason) is not None:
                found.append(reason)
        return found

    @property
    def stuck(self) -> bool:
        """After ``run``: whether a handler goes on in the event loop although it was cancelled."""
        return any(relay.stuck for relay in (*self._former, self.relay))

    async def _watch_readiness(self) -> None:
        while True:
            self._log_change(self._reasons())
            await asyncio.sleep(WATCH_S)

    def _log_change(self, reasons: list[Reason]) -> None:
        if reasons == self._said:
            return
        self._said = reasons
        if not reasons:
            self._log.info(events.SERVICE_READY)
        for reason in reasons:
            self._log.warning(
                events.SERVICE_NOT_READY, code=reason.code, resource=reason.resource, message=reason.message
            )


class App(NotifyConsumer):
    """The whole process: a notify consumer that serves HTTP. ``run`` returns after ``stop``, when all is drained."""

    def __init__(self, settings: Settings, handlers: Handlers) -> None:
        super().__init__(settings, handlers, http=True)


class Ending:
    """What ``stop`` returns: awaiting it waits for the end, leaving it alone does no harm."""

    def __init__(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._end = end

    def __await__(self) -> Generator[Any, Any, None]:
        return self._end().__await__()


def _first(error: Exception) -> Exception:
    """The first error in a group, which is what ended everything."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


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
    if app.stuck:
        # A handler that ignores its cancellation would keep the event loop from ever closing.
        sys.stderr.flush()
        os._exit(0)
