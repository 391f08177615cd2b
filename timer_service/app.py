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
from timer_service.http import HttpServer, Readiness, Reason
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import PullLoop
from timer_service.jetstream.follow import Follower
from timer_service.jetstream.provision import Finding, Provisioner
from timer_service.jetstream.publish import Publisher
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
from timer_service.runtime.admission import Admission
from timer_service.runtime.archived import Archived
from timer_service.runtime.commands import CommandService
from timer_service.runtime.driver import Driver
from timer_service.runtime.feed import Feed
from timer_service.runtime.lanes import Lanes
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.runtime.reconciler import Reconciler
from timer_service.runtime.resumes import ResumeService
from timer_service.runtime.settling import Settling
from timer_service.runtime.terminals import Terminals
from timer_service.runtime.wakes import WakeService

MAX_SKEW_MS = 250
_RETRY_S = 1.0
_FILL_INTERVAL_S = 1.0
_READY_INTERVAL_S = 0.05


class App:
    """One timer service process."""

    def __init__(self, settings: Settings, log: Any) -> None:
        self.settings = settings
        self.log = log.bind(instance=settings.instance)
        self.metrics = Metrics()
        self.clock = self._make_clock()
        self.connection = Connection(
            settings.nats,
            name=f"durable-timer:{settings.instance}",
            creds=settings.creds,
            timeout_ms=settings.request_timeout_ms,
        )
        self.publisher = Publisher(self.connection)
        self.provisioner = Provisioner(self.connection, settings.sizes)
        self.watch = Watch(self.publisher, SystemClock())
        self.lanes = Lanes(self._on_work_error)
        self.archived = Archived()
        self.problems = Problems(self.metrics, self.log)
        self.admission = Admission(settings.admission_watermark_percent, self.metrics, self.log)
        self._build_ring()
        host, port = split_address(settings.http)
        routes = clock_routes(self.clock) if isinstance(self.clock, OffsetClock) else ()
        self.http = HttpServer(host, port, ready=self.readiness, registry=self.metrics.registry, extra_routes=routes)
        self._findings: list[Finding] | None = None
        self._provision_error: str | None = None
        self._stage = "connecting"
        self._draining = asyncio.Event()
        self._was_ready = False

    def _make_clock(self) -> Clock:
        return OffsetClock(SystemClock()) if self.settings.test_clock else SystemClock()

    def _build_ring(self) -> None:
        settings, log, metrics, clock = self.settings, self.log, self.metrics, self.clock
        publisher, recent = self.publisher, Recent()
        store = JetStreamState(publisher, replicas=settings.replicas, tombstone_ttl_s=settings.tombstone_ttl_s)
        archive = JetStreamArchive(publisher, replicas=settings.replicas)
        snapshots = JetStreamSnapshots(publisher)
        self.driver = driver = Driver(
            clock, JetStreamWakes(publisher), metrics, log, resume_timeout_ms=settings.resume_timeout_ms
        )
        resumes = ResumeService(
            clock,
            store,
            snapshots,
            JetStreamResumes(publisher),
            driver,
            recent,
            self.problems,
            metrics,
            log,
            resume_timeout_ms=settings.resume_timeout_ms,
        )
        terminals = Terminals(
            clock, store, archive, snapshots, driver, recent, self.archived, self.problems, metrics, log
        )
        settling = Settling(
            clock,
            JetStreamPublicity(publisher, self.connection),
            metrics,
            log,
            allowed_reply=lambda subject: topology.is_literal_subject(subject, settings.reply_prefix),
        )
        self.commands = CommandService(
            store,
            archive,
            snapshots,
            settling,
            terminals,
            driver,
            self.lanes,
            recent,
            self.archived,
            self.admission,
            self.problems,
            log,
            offset_ms=lambda: clock.offset_ms if isinstance(clock, OffsetClock) else 0,
            max_payload=lambda: self.connection.max_payload,
            inline_payload_max_bytes=settings.inline_payload_max_bytes,
        )
        wakes = WakeService(clock, store, resumes, driver, self.lanes, recent, self.problems, metrics, log)
        self.feed = Feed(self._follow_state, driver, recent, self.archived, self.problems, metrics, log)
        self.feed.entry_arrived = self.commands.entry_arrived
        store.on_written = self.feed.wrote
        self.reconciler = Reconciler(
            clock,
            self.feed,
            driver,
            self.lanes,
            resumes,
            terminals,
            SnapshotSweeper(self.connection, publisher, snapshots),
            self.watch.state_stream,
            metrics,
            log,
            interval_ms=settings.reconcile_interval_ms,
            snapshot_grace_ms=settings.snapshot_grace_ms,
        )
        self.command_loop = self._pull(topology.COMMAND_SERVICE, self.commands.handle)
        self.wake_loop = self._pull(topology.WAKE_SERVICE, wakes.handle)
        if isinstance(clock, OffsetClock):
            clock.on_shift(driver.wake)

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

    def _on_work_error(self, timer_ref: TimerRef, error: BaseException) -> None:
        self.log.error(events.WORK_FAILED, timer_ref=timer_ref, exc_info=error)

    # -- life -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises when a part of it fails for good."""
        self._listen_for_signals()
        await self.http.start()
        self.log.info(events.SERVICE_STARTING, nats=self.settings.nats)
        self.log.info(events.HTTP_LISTENING, port=self.http.port)
        work = asyncio.create_task(self._work(), name="service")
        drain = asyncio.create_task(self._draining.wait(), name="drain")
        await asyncio.wait({work, drain}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if self._draining.is_set():
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
        await self._prepare_broker()
        await self.publisher.start()
        self._stage = "scanning"
        self.connection.on_returned(self.feed.heard)
        await self.connection.subscribe(topology.STATE_FILTER, self._on_foreign_write)
        await self._until_done(self.feed.start)
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.driver.run(), name="driver")
            group.create_task(self.reconciler.run(), name="reconciler")
            group.create_task(self._check_policies(), name="policies")
            group.create_task(self._check_fill(), name="fill")
            group.create_task(self._scan_archive(), name="archive.scan")
            group.create_task(self._announce_ready(), name="ready")
            group.create_task(self._fail_when_closed(), name="connection")
            await self.command_loop.start()
            await self.wake_loop.start()

    async def _connect(self) -> None:
        self.connection.on_lost(lambda: self.log.warning(events.BROKER_LOST, error=self.connection.last_error))
        self.connection.on_returned(lambda: self.log.info(events.BROKER_RETURNED))
        await self.connection.open()
        self.log.info(events.BROKER_CONNECTED, version=self.connection.server_version)

    async def _prepare_broker(self) -> None:
        """Create what is missing, and wait until what the ring needs is there."""
        self._stage = "preparing"
        while True:
            problem = await self._try_provision()
            await self._read_findings()
            blocking = [finding for finding in self._findings or [] if finding.code == "missing"]
            if problem is None and self._findings is not None and not blocking:
                return
            await asyncio.sleep(_RETRY_S)

    async def _try_provision(self) -> str | None:
        if not self.settings.provision:
            return None
        try:
            done = await self.provisioner.create_missing()
        except BrokerError as error:
            self._provision_error = str(error)
            return str(error)
        self._provision_error = None
        for line in done:
            self.log.info(events.PROVISIONED, what=line)
        return None

    async def _on_foreign_write(self, _: Any) -> None:
        self.feed.heard()

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except BrokerError as error:
                self.log.warning(events.WORK_FAILED, step=self._stage, error=str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def _scan_archive(self) -> None:
        """Until this is done, each start looks into the archive itself."""
        prefix = len(topology.TERMINAL_PREFIX)

        def look(delivery: Any) -> None:
            self.archived.add(TimerRef(delivery.subject[prefix:]))

        await self._until_done(
            lambda: read_all(
                self.connection,
                self.publisher,
                topology.TERMINALS,
                f"{topology.TERMINAL_PREFIX}>",
                look,
                every=False,
            )
        )
        self.archived.complete = True

    async def _fail_when_closed(self) -> None:
        await self.connection.closed.wait()
        raise BrokerError(f"the connection was closed for good: {self.connection.last_error}")

    # -- watching -----------------------------------------------------------------------------------------------

    async def _check_policies(self) -> None:
        while True:
            await asyncio.sleep(self.settings.policy_check_interval_ms / 1000)
            if self.connection.connected:
                await self._read_findings()
                if any(finding.code == "missing" for finding in self._findings or []):
                    await self._try_provision()

    async def _read_findings(self) -> None:
        try:
            self._findings = await self.provisioner.check()
        except BrokerError as error:
            self._findings = [Finding("broker_unavailable", "JetStream", str(error))]

    async def _check_fill(self) -> None:
        while True:
            try:
                self.admission.update(*await self.watch.fills())
            except BrokerError:
                pass  # the connection and the policy check say what is wrong
            if self.watch.skew_ms is not None:
                self.metrics.skew_s = self.watch.skew_ms / 1000
            await asyncio.sleep(_FILL_INTERVAL_S)

    async def _announce_ready(self) -> None:
        while True:
            readiness = self.readiness()
            if readiness.ready and not self._was_ready:
                self.log.info(events.SERVICE_READY, armed=len(self.driver))
            elif self._was_ready and not readiness.ready:
                codes = [reason.code for reason in readiness.reasons]
                self.log.warning(events.SERVICE_NOT_READY, reasons=codes)
            self._was_ready = readiness.ready
            await asyncio.sleep(_READY_INTERVAL_S)

    def readiness(self) -> Readiness:
        """Whether this process does its work, and if not, every reason against it."""
        reasons = [Reason(code, resource, text) for code, resource, text in self._reasons()]
        details = {
            "role": "driver" if self.driver.holds_lease else "standby",
            "instance": self.settings.instance,
            "armed": len(self.driver),
            "problems": len(self.problems),
            "admission": "open" if self.admission.open else "closed",
            "admission_resource": self.admission.resource,
            "in_flight": len(self.lanes),
            "clock_skew_ms": self.watch.skew_ms,
            "stage": self._stage,
        }
        return Readiness(not reasons, reasons, details)

    def _reasons(self) -> list[tuple[str, str, str]]:
        if self._draining.is_set():
            return [("draining", self.settings.instance, "the process is shutting down")]
        if not self.connection.connected:
            why = self.connection.last_error or "no answer yet"
            return [("broker_unreachable", self.settings.nats, f"not connected: {why}; it is tried again")]
        reasons: list[tuple[str, str, str]] = []
        if self._provision_error is not None:
            reasons.append(("provision_failed", "JetStream", self._provision_error))
        reasons += [(finding.code, finding.resource, finding.message) for finding in self._findings or []]
        if not self.feed.ready.is_set():
            reasons.append(("scanning", topology.STATE_STREAM, "the state is still being read"))
        elif not self._all_healthy():
            reasons.append(("consumer_silent", "JetStream", "a consumer does not answer; it is asked again"))
        skew_ms = self.watch.skew_ms
        if skew_ms is not None and abs(skew_ms) > MAX_SKEW_MS:
            reasons.append(
                (
                    "clock_skew",
                    "clock",
                    f"our clock is {skew_ms:.0f} ms off the broker's; at most {MAX_SKEW_MS} is safe",
                )
            )
        if self.admission.full is not None:
            reasons.append(("storage_full", self.admission.full, "no room is left; free some or raise its limit"))
        return reasons

    def _all_healthy(self) -> bool:
        return self.feed.healthy and self.command_loop.healthy and self.wake_loop.healthy

    # -- the end --------------------------------------------------------------------------------------------------

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._draining.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._draining.set()

    async def _drain(self) -> None:
        """Readiness is gone; finish what is under way within the grace, hand back the rest."""
        self.log.info(events.SERVICE_DRAINING, in_flight=len(self.lanes))
        self.driver.holds_lease = False  # whatever becomes due from here on is for others, or for the next start
        grace_s = self.settings.drain_grace_ms / 1000
        try:
            async with asyncio.timeout(grace_s):
                await self.command_loop.stop_pulling()
                await self.wake_loop.stop_pulling()
                await self.commands.stop()
                idle = asyncio.Event()
                self.lanes.on_idle(idle.set)
                await idle.wait()
        except TimeoutError:
            pass
        handed_back = await self.command_loop.hand_back() + await self.wake_loop.hand_back()
        self.log.info(events.SERVICE_STOPPED, handed_back=handed_back)

    async def _close(self) -> None:
        await self.feed.stop()
        await self.publisher.stop()
        await self.connection.close()
        await self.http.stop()


async def serve(settings: Settings, log: Any) -> None:
    """Run one timer service process to its end."""
    await App(settings, log).run()
