"""Admission: only starts take up new room, so only starts are held back when room gets short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timer_service import events
from timer_service.metrics import Metrics
from timer_service.ports import Fill

HOLD_MS = 2_000


class Admission:
    """Open while state, snapshots, archive and resumes are below the watermark. Fed by whoever watches the broker."""

    def __init__(self, watermark_percent: int, metrics: Metrics, log: Any) -> None:
        self._watermark = watermark_percent
        self._metrics = metrics
        self._log = log
        self.open = True
        self.reason = ""
        self.resource: str | None = None
        self.commands_short = False
        self.full: str | None = None
        """A resource without any room left: then even what lives can't go on."""

    def update(self, fills: Mapping[str, Fill], commands: Fill) -> None:
        """Take a reading: by resource name, and of the command stream."""
        self.commands_short = commands.percent > 50
        short = [(fill.percent, name) for name, fill in fills.items() if fill.percent >= self._watermark]
        full = [name for name, fill in fills.items() if fill.percent >= 99.5]
        self.full = full[0] if full else None
        if short:
            percent, name = max(short)
            self._close(name, f"{name} is {percent:.0f}% full; starts are held from {self._watermark}% on")
        elif not self.open:
            self.open, self.reason, self.resource = True, "", None
            self._metrics.admission_open = True
            self._log.info(events.ADMISSION_OPENED)

    def hold_ms(self) -> int:
        """How long a held start waits before it is looked at again."""
        return HOLD_MS

    def _close(self, resource: str, reason: str) -> None:
        if self.open:
            self._log.warning(events.ADMISSION_CLOSED, resource=resource, reason=reason)
            self._metrics.admission_open = False
        self.open, self.reason, self.resource = False, reason, resource
