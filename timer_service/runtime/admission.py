"""Admission: only starts take up new room, so only starts are held back when room gets short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from timer_service import events
from timer_service.metrics import Metrics
from timer_service.ports import Fill

_COMMANDS_SHORT_PERCENT = 50
_FULL_PERCENT = 99
_FULL_BYTES = 4 * 1024
_REFUSAL_READINGS = 3
"""For so many readings a refused write counts as "full": whoever was refused tries again with each."""


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
        self._before: Counter[str] = Counter()
        self._since: Counter[str] = Counter()
        self._readings = 0
        self._refusals: dict[str, int] = {}
        self.open = True
        self.reason = ""
        self.resource: str | None = None
        self.commands_short = False
        """Starts can't be kept waiting: their own queue is more than half full."""
        self.full: str | None = None
        """A resource without any room left: then even what lives can't go on."""
        self.on_reading: Callable[[], None] = lambda: None
        """Called after each reading: what waits for room may be tried."""

    def begin(self) -> None:
        """A reading is about to be asked for.

        What was admitted before may or may not be in it, since it may still be on its way: it is counted once more.
        """
        self._before, self._since = self._since, Counter()

    def update(self, fills: Mapping[str, Fill], commands: Fill) -> None:
        """Take a reading: by resource name, and of the command stream."""
        self.commands_short = commands.percent > _COMMANDS_SHORT_PERCENT
        self._fills = fills
        self._readings += 1
        self._refusals = {name: at for name, at in self._refusals.items() if self._readings - at < _REFUSAL_READINGS}
        full = [name for name, fill in fills.items() if _is_full(fill)]
        self.full = next(iter([*full, *self._refusals]), None)
        short = [(fill.percent, name) for name, fill in fills.items() if fill.percent >= self._watermark]
        if short:
            self._close_short(*max(short))
        elif self._refusals:
            self._close_refused(next(iter(self._refusals)))
        elif not self.open:
            self.open, self.reason, self.resource = True, "", None
            self._metrics.admission_open = True
            self._log.info(events.ADMISSION_OPENED)
        self.on_reading()

    def refused(self, resource: str) -> None:
        """The broker refused a write for want of room, whatever the readings say."""
        if resource not in self._refusals:
            self._log.warning(events.STORAGE_REFUSED, resource=resource)
        self._refusals[resource] = self._readings
        self.full = self.full or resource
        if self.open:
            self._close_refused(resource)

    def admit(self, state_bytes: int, snapshot_bytes: int) -> bool:
        """Whether a start that takes so much room may go on; it is counted when it may."""
        for name, size in ((self._state, state_bytes), (self._snapshots, snapshot_bytes)):
            fill = self._fills.get(name)
            if fill is None or not size or not self.open:
                continue
            self._since[name] += size
            grown = Fill(fill.used + self._before[name] + self._since[name], fill.limit)
            if grown.percent >= self._watermark:
                self._close_short(grown.percent, name)
        return self.open

    def _close_short(self, percent: float, resource: str) -> None:
        self._close(f"{resource} is {percent:.0f}% full; starts are held from {self._watermark}% on", resource)

    def _close_refused(self, resource: str) -> None:
        self._close(f"{resource} has no room left; starts are held", resource)

    def _close(self, reason: str, resource: str) -> None:
        if self.open or resource != self.resource:
            self._log.warning(events.ADMISSION_CLOSED, resource=resource, reason=reason)
            self._metrics.admission_open = False
        self.open, self.reason, self.resource = False, reason, resource


def _is_full(fill: Fill) -> bool:
    return fill.limit > 0 and (fill.percent >= _FULL_PERCENT or fill.limit - fill.used < _FULL_BYTES)
