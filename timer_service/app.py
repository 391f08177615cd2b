"""The composition root of the timer service: builds, starts in order, supervises, drains in reverse order."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from timer_service import events
from timer_service.clock import Clock, OffsetClock, SystemClock
from timer_service.config import Settings, split_address
from timer_service.debug_clock import clock_routes
from timer_service.domain.identity import TimerRef
from timer_service.errors import BrokerError
from timer_service.http import HttpServer, Reason
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import PullLoop
from timer_service.jetstream.follow import Follower
from timer_service.jetstream.provision import Provisioner
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.schedules import JetStreamSchedules
from timer_service.jetstream.stores import (
    JetStreamArchive,
    JetStreamPublicity,
    JetStreamResumes,
    JetStreamSnapshots,
    JetStreamState,
    JetStreamWakes,
)
from timer_service.jetstream.topology import ConsumerSpec
from timer_service.jetstream.watch import SnapshotSweeper, Watch, read_all
from timer_service.metrics import Metrics
from timer_service.monitor import Monitor
from timer_service.replica import Ports, Replica, Rules
from timer_service.roles import Roles
from timer_service.runtime.feed import Feed
from timer_service.runtime.leftovers import Leftovers
from timer_service.runtime.native import NativeWaits
from timer_service.runtime.reconciler import Reconciler
from timer_service.urls import shown_url

_RETRY_S = 1.0
_PROBES = 50
_UNANSWERED = (
    "writes get no answer though the broker is there; its log says why. If its disk was full, make room and restart it"
)
_wall = SystemClock()


class App:
    """One timer service process."""

    def __init__(self, settings: Settings, log: Any) -> None:
        self.settings = settings
        self.log = log.bind(instance=settings.instance)
        self.metrics = Metrics()
        self.clock: Clock = OffsetClock(SystemClock()) if settings.test_clock else SystemClock()
        self.connection = Connection(
            settings.nats,
            name=f"durable-timer:{settings.instance}",
            creds=settings.creds,
            timeout_ms=settings.request_timeout_ms,
        )
        self.publisher = Publisher(self.connection)
        self.watch = Watch(self.publisher, SystemClock())
        self._build_ring()
        self.roles = Roles(
            self.connection, self.publisher, settings.instance, self.driver, self.metrics, self.log,
            loops=(self.command_loop, self.wake_loop),
        )  # fmt: skip
        self._listen_for_room()
        self.monitor = Monitor(
            settings,
            self.connection,
            Provisioner(self.connection, settings.sizes, native=settings.driver == "native"),
            self.watch,
            self.admission,
            self.metrics,
            self.log,
            ring=self._ring_reasons,
            details=self._details,
        )
        host, port = split_address(settings.http)
        routes = clock_routes(self.clock) if isinstance(self.clock, OffsetClock) else ()
        self.http = HttpServer(
            host, port, ready=self.monitor.readiness, registry=self.metrics.registry, extra_routes=routes
        )

    def _build_ring(self) -> None:
        settings, log, metrics, clock, publisher = self.settings, self.log, self.metrics, self.clock, self.publisher
        state = JetStreamState(publisher, replicas=settings.replicas, tombstone_ttl_s=settings.tombstone_ttl_s)
        archive = JetStreamArchive(publisher, replicas=settings.replicas)
        snapshots, wakes = JetStreamSnapshots(publisher), JetStreamWakes(publisher)
        resumes = JetStreamResumes(publisher)
        ports = Ports(state, archive, snapshots, resumes, wakes, JetStreamPublicity(publisher, self.connection))
        replica = Replica(ports, clock, metrics, log, self._rules())
        self.driver, self.commands, self.lanes = replica.driver, replica.commands, replica.lanes
        self.archived, self.admission, self.problems = replica.archived, replica.admission, replica.problems
        self.native: NativeWaits | None = None
        if settings.driver == "native":
            schedules = JetStreamSchedules(self.connection, publisher, replicas=settings.replicas)
            self.native = NativeWaits(
                clock, self.driver, schedules, wakes, state, metrics, log,
                interval_ms=settings.reconcile_interval_ms, offset_ms=self._offset_ms,
            )  # fmt: skip
        self.feed = Feed(
            self._follow_state, self.driver, replica.recent, self.archived, self.problems, metrics, log,
            now_ms=_wall.now_ms,
        )  # fmt: skip
        self.feed.entry_arrived = self.commands.entry_arrived
        state.on_written = self.feed.wrote
        sweeper = SnapshotSweeper(self.connection, publisher, snapshots, SystemClock())
        self.reconciler = Reconciler(
            clock, self.feed, self.driver, self.lanes, replica.resumes, self.problems, sweeper,
            self.watch.state_stream, metrics, log,
            interval_ms=settings.reconcile_interval_ms, snapshot_grace_ms=settings.snapshot_grace_ms,
            leftovers=Leftovers(state, archive, resumes, self.driver, metrics, log),
        )  # fmt: skip
        self.command_loop = self._pull(topology.COMMAND_SERVICE, self.commands.handle)
        self.wake_loop = self._pull(topology.WAKE_SERVICE, replica.wakes.handle)
        if isinstance(clock, OffsetClock):
            clock.on_shift(self.driver.wake)

    def _rules(self) -> Rules:
        settings = self.settings
        return Rules(
            allowed_reply=lambda subject: topology.is_literal_subject(subject, settings.reply_prefix),
            max_payload=lambda: self.connection.max_payload,
            offset_ms=self._offset_ms,
            wall_ms=_wall.now_ms,
            resume_timeout_ms=settings.resume_timeout_ms,
            inline_payload_max_bytes=settings.inline_payload_max_bytes,
            markers_ms=settings.tombstone_ttl_s * 1000,
            watermark_percent=settings.admission_watermark_percent,
            state=topology.STATE_STREAM,
            snapshots=topology.SNAPSHOTS,
        )

    def _offset_ms(self) -> int:
        return self.clock.offset_ms if isinstance(self.clock, OffsetClock) else 0

    def _listen_for_room(self) -> None:
        """What waits for room is tried after each reading: all of it, or a few as long as something seems full."""
        self.publisher.on_full = lambda subject, error: self.admission.refused(
            error.whose or topology.stream_of(subject) or subject
        )
        self.admission.on_reading = self._on_room_read

    def _on_room_read(self) -> None:
        self.commands.room_read()
        if self.admission.full is None:
            self.driver.hurry()
        else:
            self.driver.hurry(_PROBES)

    def _follow_state(self, on_message: Any, on_caught_up: Callable[[], None], after_seq: int) -> Follower:
        return Follower(
            self.connection,
            self.publisher,
            topology.STATE_STREAM,
            topology.STATE_FILTER,
            on_message,
            on_caught_up,
            after_seq=after_seq,
        )

    def _pull(self, spec: ConsumerSpec, handle: Callable[[Any], None]) -> PullLoop:
        return PullLoop(self.connection, spec.stream, spec.name, handle)

    # -- what the monitor asks ----------------------------------------------------------------------------------

    def _ring_reasons(self) -> list[Reason]:
        if not self.feed.ready.is_set():
            scanning = Reason("scanning", topology.STATE_STREAM, "the state is still being read")
            return [*self.roles.name.duplicate, scanning]
        if not self.roles.name.ours:
            return self.roles.name.reasons  # and nothing is pulled
        parts = (
            (topology.STATE_STREAM, self.feed),
            (f"{topology.COMMANDS} > {topology.COMMAND_CONSUMER}", self.command_loop),
            (f"{topology.SCHEDULES} > {topology.WAKE_CONSUMER}", self.wake_loop),
        )
        text = "the consumer does not answer; it is asked again"
        silent = [Reason("consumer_silent", resource, text) for resource, part in parts if not part.healthy]
        silent += [Reason("writes_unanswered", stream, _UNANSWERED) for stream in self.publisher.silent]
        return self.roles.reasons + silent

    def _details(self) -> dict[str, Any]:
        return {
            "role": "driver" if self.driver.holds_lease else "standby",
            "armed": len(self.driver),
            "problems": len(self.problems),
            "in_flight": len(self.lanes),
            "held": self.commands.held,
        }

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises when a part of it fails for good."""
        self._listen_for_signals()
        await self.http.start()
        self.log.info(events.SERVICE_STARTING, nats=shown_url(self.settings.nats))
        self.log.info(events.HTTP_LISTENING, port=self.http.port)
        work = asyncio.create_task(self._work(), name="service")
        drain = asyncio.create_task(self.monitor.draining.wait(), name="drain")
        await asyncio.wait({work, drain}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if self.monitor.draining.is_set():
                await self._drain()
            else:
                await work
        finally:
            work.cancel()
            drain.cancel()
            await asyncio.gather(work, drain, return_exceptions=True)
            await self._close()

    async def _work(self) -> None:
        await self._connect()
        await self.publisher.start()
        await self.monitor.prepare_broker()
        self.connection.on_returned(self.feed.heard)
        self.connection.on_returned(self.reconciler.look_soon)
        await self.connection.subscribe(topology.STATE_FILTER, self._on_foreign_write)
        await self.roles.start()
        await self._until_done(self.feed.start)
        await self._until_done(self.monitor.read_fill)  # before the first start is taken
        _settle_garbage_collector()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.driver.run(), name="driver")
            group.create_task(self.reconciler.run(), name="reconciler")
            if self.native is not None:
                group.create_task(self.native.run(self.feed.ready), name="schedules")
            group.create_task(self.monitor.check_policies(), name="policies")
            group.create_task(self.monitor.check_fill(), name="fill")
            group.create_task(self.monitor.announce(), name="ready")
            group.create_task(self._scan_archive(), name="archive.scan")
            group.create_task(self._fail_when_closed(), name="connection")
            group.create_task(self.roles.run(self.monitor.draining), name="roles")

    async def _connect(self) -> None:
        self.connection.on_lost(self._on_lost)
        self.connection.on_returned(lambda: self.log.info(events.BROKER_RETURNED))
        await self.connection.open()
        self.log.info(events.BROKER_CONNECTED, version=self.connection.server_version)

    def _on_lost(self) -> None:
        self.log.warning(events.BROKER_LOST, error=self.connection.last_error)

    async def _on_foreign_write(self, _: Any) -> None:
        self.feed.heard()

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except BrokerError as error:
                self.log.warning(events.WORK_FAILED, error=str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def _scan_archive(self) -> None:
        """Until this is done, each start looks into the archive itself. Again when removals may have been missed."""
        prefix = len(topology.TERMINAL_PREFIX)

        def look(delivery: Any) -> None:
            self.archived.add(TimerRef(delivery.subject[prefix:]))

        subjects = f"{topology.TERMINAL_PREFIX}>"
        while True:
            self.archived.doubted.clear()
            await self._until_done(
                lambda: read_all(self.connection, self.publisher, topology.TERMINALS, subjects, look, every=False)
            )
            self.archived.complete = not self.archived.doubted.is_set()
            await self.archived.doubted.wait()

    async def _fail_when_closed(self) -> None:
        await self.connection.closed.wait()
        raise BrokerError(f"the connection was closed for good: {self.connection.last_error}")

    # -- the end --------------------------------------------------------------------------------------------------

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.monitor.draining.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.monitor.draining.set()

    async def _drain(self) -> None:
        """Readiness is gone; finish what is under way within the grace, hand back the rest.

        What becomes due meanwhile is still driven, since nobody else does: the lease is given up last.
        """
        self.log.info(events.SERVICE_DRAINING, in_flight=len(self.lanes))
        try:
            async with asyncio.timeout(self.settings.drain_grace_ms / 1000):
                await self.command_loop.stop_pulling()
                await self.wake_loop.stop_pulling()
                await self.commands.stop()
                idle = asyncio.Event()
                self.lanes.on_idle(idle.set)
                await idle.wait()
        except TimeoutError:
            self.log.warning(events.SERVICE_DRAINING, unfinished=len(self.lanes))
        handed_back = await self.command_loop.hand_back() + await self.wake_loop.hand_back()
        self.log.info(events.SERVICE_STOPPED, handed_back=handed_back)

    async def _close(self) -> None:
        await self.roles.give_up()
        await self.feed.stop()
        await self.publisher.stop()
        self.connection.forget(self._on_lost)  # we leave, which is no loss
        await self.connection.close()
        await self.http.stop()


def _settle_garbage_collector() -> None:
    """What was built at the start stays; and what the ring makes is freed by reference counting."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


async def serve(settings: Settings, log: Any) -> None:
    """Run one timer service process to its end."""
    await App(settings, log).run()
