"""Who works, and who drives: a process works under its name, and of all that work one drives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from timer_service import events
from timer_service.http import Reason
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import PullLoop
from timer_service.jetstream.lease import Lease
from timer_service.jetstream.publish import Publisher
from timer_service.metrics import Metrics
from timer_service.runtime.driver import Driver

DUPLICATE = "duplicate_instance"


class Name:
    """One process at a time works under a name; a second one stands by until the first ends or dies."""

    def __init__(self, connection: Connection, publisher: Publisher, program: str, instance: str, log: Any) -> None:
        self._instance = instance
        self._log = log
        self._changed = asyncio.Event()
        self._said = ""
        self.lease = Lease(connection, publisher, topology.name_lease(program, instance), instance, log)
        self.lease.on_change(self._on_change)

    @property
    def ours(self) -> bool:
        return self.lease.mine

    async def until(self, ours: bool) -> None:
        """Wait until the name is ours, or another's."""
        while self.ours is not ours:
            self._changed.clear()
            await self._changed.wait()

    @property
    def duplicate(self) -> list[Reason]:
        """The reason against being ready where another process that lives has the name."""
        if self.ours or self.lease.rival is None:
            return []
        text = (
            f"another process runs as {self._instance!r}; give each a name of its own with --instance. "
            "This one takes over when the other ends"
        )
        return [Reason(DUPLICATE, self._instance, text)]

    @property
    def reasons(self) -> list[Reason]:
        """All that the name has against being ready."""
        if self.duplicate:
            return self.duplicate
        if self.lease.trouble is not None:
            text = f"the lease on the name {self._instance!r} can't be written: {self.lease.trouble}"
            return [Reason("lease_unavailable", topology.LEASE_STREAM, text)]
        text = f"the name {self._instance!r} is not ours yet: its lease is being read, or its last holder may yet live"
        return [] if self.ours else [Reason("name_pending", topology.LEASE_STREAM, text)]

    def _on_change(self) -> None:
        self._changed.set()
        rival = self.lease.rival
        if rival is not None and rival.process != self._said:
            self._said = rival.process
            self._log.warning(events.INSTANCE_DUPLICATE, code=DUPLICATE, name=self._instance, process=rival.process)


class Roles:
    """What a timer service may do: pull under its name, and drive with the lease ``driver``."""

    def __init__(
        self,
        connection: Connection,
        publisher: Publisher,
        instance: str,
        driver: Driver,
        metrics: Metrics,
        log: Any,
        *,
        loops: Sequence[PullLoop],
    ) -> None:
        self.name = Name(connection, publisher, topology.TIMER_SERVICE, instance, log)
        self.lease = Lease(connection, publisher, topology.DRIVER_LEASE, instance, log)
        self._driver = driver
        self._loops = loops
        self._settled = False
        driver.lease_lasts = lambda: self.lease.held
        metrics.driving = lambda: driver.holds_lease
        self.lease.on_change(self._on_change)
        self._on_change()

    def _on_change(self) -> None:
        self._driver.holds_lease = self.lease.held
        self._settled = self._settled or self.lease.held or self.lease.rival is not None

    @property
    def reasons(self) -> list[Reason]:
        """What the roles have against being ready: at the start also that nobody knows yet who drives."""
        if self._settled or not self.name.ours or self.lease.trouble is not None:
            return self.name.reasons
        text = "who drives is being found out: the lease is being read, or its last holder may yet live"
        return [*self.name.reasons, Reason("role_pending", topology.LEASE_STREAM, text)]

    async def start(self) -> None:
        """Begin to contend for the name."""
        await self.name.lease.start()

    async def run(self, draining: asyncio.Event) -> None:
        """Pull and drive as long as no other process has our name, until cancelled."""
        while True:
            await self.name.until(ours=True)
            if draining.is_set():
                return
            await self.lease.start()
            for loop in self._loops:
                await loop.start()
            await self.name.until(ours=False)
            for loop in self._loops:
                await loop.stop_pulling()
                await loop.hand_back()
            await self.lease.give_up()

    async def give_up(self) -> None:
        """Let others drive, and have the name, at once."""
        await self.lease.give_up()
        await self.name.lease.give_up()
