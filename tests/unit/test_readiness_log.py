"""The log and ``/readyz`` tell the same story, in this order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from notify_consumer.app import NotifyConsumer
from notify_consumer.config import Settings as NotifySettings
from notify_consumer.handlers import Handlers
from timer_service.config import Settings
from timer_service.http import Reason
from timer_service.monitor import Monitor


class Log:
    """Remembers the names of events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **_: Any) -> None:
        self.events.append(event)

    warning = info


def test_a_change_is_logged_before_readyz_answers() -> None:
    """Who sees 200 finds `service.ready` in the log, however soon it looks; each change is logged once."""
    log, reasons = Log(), [Reason("scanning", "state", "…")]
    broker: Any = SimpleNamespace(
        connected=True, denied_since=lambda _: [], skew_ms=0, open=True, resource=None, full=None
    )
    monitor = Monitor(
        Settings(), broker, broker, broker, broker, broker, log, ring=lambda: list(reasons), details=lambda: {}
    )
    assert not monitor.readiness().ready
    assert log.events == []
    reasons.clear()
    assert monitor.readiness().ready
    assert monitor.readiness().ready
    assert log.events == ["service.ready"]
    monitor.draining.set()
    assert not monitor.readiness().ready
    assert log.events == ["service.ready", "service.not_ready"]


def test_a_notify_consumer_logs_it_before_it_answers(tmp_path: Any) -> None:
    """Every reason is logged when it comes, once."""
    consumer = NotifyConsumer(NotifySettings(outbox=f"sqlite:{tmp_path}/o.db"), Handlers())
    log = Log()
    consumer._log = log
    assert not consumer.readiness().ready
    assert not consumer.readiness().ready
    assert log.events == ["service.not_ready"] * len(consumer.readiness().reasons)
