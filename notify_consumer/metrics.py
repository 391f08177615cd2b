"""Prometheus metrics of the notify consumer. None is labelled by timer or flow."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from notify_consumer.outbox.base import FEEDBACK_LANE, State, Survey

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 3600)


class Metrics:
    """One registry a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._resumes = Counter("notify_consumer_resumes", "Resumes taken in", ("result",), registry=self.registry)
        self._handoffs = Counter("notify_consumer_handoffs", "Handlers called", ("result",), registry=self.registry)
        self._feedbacks = Counter(
            "notify_consumer_feedbacks", "Feedbacks sent", ("kind", "result"), registry=self.registry
        )
        self._dead = Counter("notify_consumer_dead", "Rows moved to the dead state", registry=self.registry)
        self._leases_lost = Counter("notify_consumer_leases_lost", "Claims lost", registry=self.registry)
        self._rows = Gauge("notify_consumer_rows", "Rows in the outbox", ("state",), registry=self.registry)
        self._handling = Gauge("notify_consumer_handling", "Handlers that are running", registry=self.registry)
        self._waited = Histogram(
            "notify_consumer_wait_seconds",
            "From when a row could be claimed until it was",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._ran = Histogram(
            "notify_consumer_handler_seconds",
            "How long handlers ran, whatever came of it",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._longest = Gauge(
            "notify_consumer_longest_handler_seconds",
            "For how long the oldest running handler runs",
            registry=self.registry,
        )
        self._oldest = Gauge(
            "notify_consumer_oldest_ready_seconds",
            "For how long the oldest row waits that could be claimed: for its handler, or with an answer to be sent",
            ("state",),
            registry=self.registry,
        )

    def running(self) -> AbstractContextManager[object]:
        """Measures what is within: one call of a handler."""
        return self._ran.time()

    def resumes(self, result: str, count: int = 1) -> None:
        """``new``, ``repeated`` or ``unreadable``."""
        self._resumes.labels(result).inc(count)

    def handoff(self, result: str) -> None:
        """``complete``, ``retry``, ``fail``, ``error``, or ``refused`` for a payload that fits no handler."""
        self._handoffs.labels(result).inc()

    def feedback(self, kind: str, result: str) -> None:
        """``settled``, ``refused`` or ``unheard``."""
        self._feedbacks.labels(kind, result).inc()

    def dead(self) -> None:
        self._dead.inc()

    def lease_lost(self) -> None:
        self._leases_lost.inc()

    def claimed(self, waited_ms: int) -> None:
        self._waited.observe(max(waited_ms, 0) / 1000)

    def handling(self, count: int, longest_s: float) -> None:
        self._handling.set(count)
        self._longest.set(longest_s)

    def waiting(self, survey: Survey, now_ms: int) -> None:
        """As good as ``now_ms`` agrees with the store's clock."""
        since = {State.PENDING: now_ms, State.ANSWERED: now_ms}
        for lane, found in survey.lanes.items():
            state = State.ANSWERED if lane == FEEDBACK_LANE else State.PENDING
            since[state] = min(since[state], found.oldest_ms)
        for state, oldest_ms in since.items():
            self._oldest.labels(state.value).set((now_ms - oldest_ms) / 1000)

    def rows(self, counts: Mapping[State, int]) -> None:
        for state, count in counts.items():
            self._rows.labels(state.value).set(count)
