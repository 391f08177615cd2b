"""What one replica of the timer service consists of, whatever broker it stands on.

``app`` puts it on JetStream and adds what belongs to a process: feed, reconciliation, leases, HTTP. ``testkit`` and
the tests put it on ports in memory. Nothing here does anything by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.identity import TimerRef
from timer_service.domain.model import Phase
from timer_service.metrics import Metrics
from timer_service.ports import Archive, Publicity, Resumes, Snapshots, StateStore, Wakes
from timer_service.runtime.admission import Admission
from timer_service.runtime.archived import Archived
from timer_service.runtime.commands import CommandService
from timer_service.runtime.driver import Armed, Driver
from timer_service.runtime.lanes import Lanes
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.runtime.resumes import ResumeService
from timer_service.runtime.settling import Settling
from timer_service.runtime.terminals import Terminals
from timer_service.runtime.wakes import WakeService


@dataclass(frozen=True)
class Ports:
    """Where a replica keeps things, and whom it tells."""

    state: StateStore
    archive: Archive
    snapshots: Snapshots
    resumes: Resumes
    wakes: Wakes
    publicity: Publicity


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a replica goes by. The defaults are those of the contract; durations in milliseconds, sizes in bytes."""

    allowed_reply: Callable[[str], bool]
    """Whether an outcome may be published on this subject."""
    max_payload: Callable[[], int]
    """The largest message that the broker takes now."""
    offset_ms: Callable[[], int] = lambda: 0
    """How far the test clock is ahead of the broker's."""
    wall_ms: Callable[[], int] | None = None
    """The clock that markers age by, where that is not the replica's own."""
    resume_timeout_ms: int = 60_000
    inline_payload_max_bytes: int = 1_024
    markers_ms: int = 3_600_000
    watermark_percent: int = 50
    state: str = "state"
    snapshots: str = "snapshots"
    """What admission calls the two stores that starts fill."""


class Replica:
    """The ring from command to resume, wired. Feed it with ``commands.handle`` and ``wakes.handle``; run ``driver``."""

    def __init__(self, ports: Ports, clock: Clock, metrics: Metrics, log: Any, rules: Rules) -> None:
        self._log = log
        self.recent, self.problems = Recent(), Problems(metrics, log)
        self.lanes = Lanes(self._failed)
        self.archived = Archived(rules.wall_ms or clock.now_ms, rules.markers_ms)
        self.admission = Admission(rules.watermark_percent, metrics, log, state=rules.state, snapshots=rules.snapshots)
        self.driver = Driver(clock, ports.wakes, metrics, log, resume_timeout_ms=rules.resume_timeout_ms)
        self.resumes = ResumeService(
            clock, ports.state, ports.snapshots, ports.resumes, self.driver, self.recent, self.problems, metrics, log,
            resume_timeout_ms=rules.resume_timeout_ms,
        )  # fmt: skip
        self.terminals = Terminals(
            clock, ports.state, ports.archive, ports.snapshots, self.driver, self.recent, self.archived, self.problems,
            metrics, log,
        )  # fmt: skip
        settling = Settling(clock, ports.publicity, metrics, log, allowed_reply=rules.allowed_reply)
        self.commands = CommandService(
            ports.state, ports.archive, ports.snapshots, settling, self.terminals, self.driver, self.lanes, self.recent,
            self.archived, self.admission, self.problems, log, offset_ms=rules.offset_ms,
            max_payload=rules.max_payload, inline_payload_max_bytes=rules.inline_payload_max_bytes,
        )  # fmt: skip
        self.wakes = WakeService(
            clock, ports.state, self.resumes, self.driver, self.lanes, self.recent, self.problems, metrics, log,
            offset_ms=rules.offset_ms,
        )  # fmt: skip
        self.driver.look_after = self._look_after

    def _failed(self, timer_ref: TimerRef, error: BaseException) -> None:
        """A mistake of ours in the work for one timer: logged, and the others go on."""
        self._log.error(events.WORK_FAILED, timer_ref=timer_ref, exc_info=error)

    def _look_after(self, armed: Armed) -> None:
        """What the heap does with timers that do not wait."""
        step = self.resumes.look_after if armed.phase is Phase.ELAPSED else self.terminals.resume
        self.lanes.run(armed.key, partial(step, armed))
