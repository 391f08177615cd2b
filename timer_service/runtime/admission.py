"""Admission: only starts take up new room, so only starts are held back when room gets short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timer_service import events
from timer_service.metrics import Metrics
from timer_service.ports import Fill

HOLD_MS = 2_000
"""How long a held start waits before it is looked at again."""
_COMMANDS_SHORT_PERCENT = 50
_FULL_PERCENT = 99
_FULL_BYTES = 4 * 1024


class Admission:
    """Open while what starts fill is below the watermark. Fed by whoever watches the broker.

    Between two readings it counts along what starts take, so that a burst can't run past the watermark.
    """

    def __init__(self, watermark_percent: int, metrics: Metrics, log: Any, *, state: str, snapshots: str) -> None:
        self._watermark = watermark_percent
        self._metrics = metrics
        self._log = log
        self._state, self._snapshots = state, snapshots
        self._fills: Mapping[str, Fill] = {}
        self._taken: dict[str, int] = {}
        self.open = True
        self.reason = ""
        self.resource: str | None = None
        self.commands_short = False
        """Starts can't be kept waiting: their own queue is more than half full."""
        self.full: str | None = None
        """A resource without any room left: then even what lives can't go on."""

    def update(self, fills: Mapping[str, Fill], commands: Fill) -> None:
        """Take a reading: by resource name, and of the command stream."""
        self.commands_short = commands.percent > _COMMANDS_SHORT_PERCENT
        self._fills, self._taken = fills, {}
        self.full = next((name for name, fill in fills.items() if _is_full(fill)), None)
        short = [(fill.percent, name) for name, fill in fills.items() if fill.percent >= self._watermark]
        if short:
            self._close(*max(short))
        elif not self.open:
            self.open, self.reason, self.resource = True, "", None
            self._metrics.admission_open = True
            self._log.info(events.ADMISSION_OPENED)

    def admit(self, state_bytes: int, snapshot_bytes: int) -> bool:
        """Whether a start that takes so much room may go on; it is counted when it may."""
        for name, size in ((self._state, state_bytes), (self._snapshots, snapshot_bytes)):
            fill = self._fills.get(name)
            if fill is None or not size or not self.open:
                continue
            taken = self._taken[name] = self._taken.get(name, 0) + size
            grown = Fill(fill.used + taken, fill.limit)
            if grown.percent >= self._watermark:
                self._close(grown.percent, name)
        return self.open

    def _close(self, percent: float, resource: str) -> None:
        reason = f"{resource} is {percent:.0f}% full; starts are held from {self._watermark}% on"
        if self.open:
            self._log.warning(events.ADMISSION_CLOSED, resource=resource, reason=reason)
            self._metrics.admission_open = False
        self.open, self.reason, self.resource = False, reason, resource


def _is_full(fill: Fill) -> bool:
    return fill.limit > 0 and (fill.percent >= _FULL_PERCENT or fill.limit - fill.used < _FULL_BYTES)
