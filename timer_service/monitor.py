"""Watching: is the broker as it must be, is there room, are the clocks close; and so, is this process ready?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from timer_service import events
from timer_service.config import Settings
from timer_service.errors import BrokerError
from timer_service.http import Readiness, Reason
from timer_service.jetstream import permissions
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.provision import BLOCKING, Finding, Provisioner
from timer_service.jetstream.watch import MAX_SKEW_MS, Watch
from timer_service.metrics import Metrics
from timer_service.runtime.admission import Admission
from timer_service.urls import shown_url

_RETRY_S = 1.0
_FILL_INTERVAL_S = 1.0
_READY_INTERVAL_S = 0.05
_DENIED_S = 6.0
"""What was refused is tried again within this: a read after 3 s, an acknowledgement with the next delivery after 5."""


class Monitor:
    """Keeps the reasons against being ready. ``ring`` adds those of the moving parts, ``details`` what they count."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        provisioner: Provisioner,
        watch: Watch,
        admission: Admission,
        metrics: Metrics,
        log: Any,
        *,
        ring: Callable[[], list[Reason]],
        details: Callable[[], dict[str, Any]],
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._provisioner = provisioner
        self._watch = watch
        self._admission = admission
        self._metrics = metrics
        self._log = log
        self._ring = ring
        self._details = details
        self._findings: list[Finding] | None = None
        self._provision_error: str | None = None
        self._was_ready = False
        self.draining = asyncio.Event()

    async def prepare_broker(self) -> None:
        """Create what is missing, unless told not to, and wait until what the ring needs is there."""
        while True:
            await self._create_missing()
            await self._read_findings()
            if self._provision_error is None and not self._missing():
                return
            await asyncio.sleep(_RETRY_S)

    async def check_policies(self) -> None:
        """Look for drift, deleted resources and lost permissions, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.policy_check_interval_ms / 1000)
            if self._connection.connected:
                await self._read_findings()
                if self._missing() or self._provision_error is not None:
                    await self._create_missing()

    async def read_fill(self) -> None:
        """Look once how full the streams are. Raises BrokerError."""
        self._admission.begin()
        self._admission.update(*await self._watch.fills())

    async def check_fill(self) -> None:
        """Watch how full the streams are, and the broker's clock, until cancelled."""
        while True:
            try:
                await self.read_fill()
            except BrokerError as error:
                self._log.debug(events.WORK_FAILED, step="fill", error=str(error))  # the policy check tells people
            if self._watch.skew_ms is not None:
                self._metrics.skew_s = self._watch.skew_ms / 1000
            await asyncio.sleep(_FILL_INTERVAL_S)

    async def announce(self) -> None:
        """Log when readiness comes and goes, until cancelled."""
        while True:
            self.readiness()
            await asyncio.sleep(_READY_INTERVAL_S)

    def readiness(self) -> Readiness:
        """Whether this process does its work, and if not, every reason against it.

        Whoever asks, a change is in the log before the answer is out.
        """
        reasons = self._reasons()
        details = {
            "instance": self._settings.instance,
            "admission": "open" if self._admission.open else "closed",
            "admission_resource": self._admission.resource,
            "clock_skew_ms": self._watch.skew_ms,
            **self._details(),
        }
        self._log_change(reasons)
        return Readiness(not reasons, reasons, details)

    def _log_change(self, reasons: list[Reason]) -> None:
        was_ready, self._was_ready = self._was_ready, not reasons
        if self._was_ready and not was_ready:
            self._log.info(events.SERVICE_READY, **self._details())
        elif was_ready and not self._was_ready:
            self._log.warning(events.SERVICE_NOT_READY, reasons=[reason.code for reason in reasons])

    def _reasons(self) -> list[Reason]:
        if self.draining.is_set():
            return [Reason("draining", self._settings.instance, "the process is shutting down")]
        if not self._connection.connected:
            why = self._connection.last_error or "no answer yet"
            return [
                Reason("broker_unreachable", shown_url(self._settings.nats), f"not connected: {why}; it is tried again")
            ]
        return [*self._broker_reasons(), *self._ring(), *self._clock_reasons(), *self._room_reasons()]

    def _broker_reasons(self) -> list[Reason]:
        found = [*(self._findings or []), *self._lately_denied()]
        denied = {finding.message: finding for finding in reversed(found) if finding.code == "permission_denied"}
        found = [finding for finding in found if denied.get(finding.message, finding) is finding]
        reasons = [Reason(finding.code, finding.resource, finding.message) for finding in found]
        if self._provision_error is not None:
            reasons.insert(0, Reason("provision_failed", "JetStream", self._provision_error))
        return reasons

    def _lately_denied(self) -> list[Finding]:
        """What the broker has refused since the last check but one, in whatever the ring tried."""
        window_s = self._settings.policy_check_interval_ms / 1000 + _DENIED_S
        return permissions.findings(self._connection.denied_since(time.monotonic() - window_s))

    def _clock_reasons(self) -> list[Reason]:
        skew_ms = self._watch.skew_ms
        if skew_ms is None or abs(skew_ms) <= MAX_SKEW_MS:
            return []
        text = f"our clock is {skew_ms:.0f} ms off the broker's; {MAX_SKEW_MS} ms is the most that is safe"
        return [Reason("clock_skew", "clock", text)]

    def _room_reasons(self) -> list[Reason]:
        full = self._admission.full
        text = "no room is left; free some or raise its limit"
        return [] if full is None else [Reason("storage_full", full, text)]

    def _missing(self) -> bool:
        return self._findings is None or any(finding.code in BLOCKING for finding in self._findings)

    async def _create_missing(self) -> None:
        if not self._settings.provision:
            return
        try:
            done = await self._provisioner.create_missing()
        except BrokerError as error:
            self._provision_error = str(error)
            return
        self._provision_error = None
        for line in done:
            self._log.info(events.PROVISIONED, what=line)

    async def _read_findings(self) -> None:
        found: list[Finding] = []
        try:
            found += await permissions.missing_permissions(self._connection, native=self._settings.driver == "native")
            found += await self._provisioner.check()
        except BrokerError as error:
            found.append(Finding("broker_unavailable", "JetStream", str(error)))
        self._findings = found
