"""Prometheus metrics of the timer service. None is labelled by timer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENESS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 3600)


class Metrics:
    """One registry a process; label children are kept, since looking one up costs more than counting."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[str, ...], Counter] = {}
        self.armed = Gauge("durable_timer_armed", "Entries in the heap", registry=self.registry)
        self.problems = Gauge(
            "durable_timer_problems",
            "State entries that can't be read, left untouched",
            registry=self.registry,
        )
        self.admission_open = Gauge(
            "durable_timer_admission_open",
            "1 while starts are taken, 0 while they are held",
            registry=self.registry,
        )
        self.admission_open.set(1)
        self.lateness = Histogram(
            "durable_timer_lateness_seconds",
            "From due to elapsed",
            buckets=_LATENESS_BUCKETS,
            registry=self.registry,
        )
        self._commands = Counter(
            "durable_timer_commands", "Settled commands", ("kind", "status", "code"), registry=self.registry
        )
        self._resumes = Counter("durable_timer_resumes", "Resumes published", registry=self.registry)
        self._repairs = Counter(
            "durable_timer_repairs", "What the reconciler mended", ("kind",), registry=self.registry
        )
        self._wakes = Counter("durable_timer_wakes", "Wakes settled", ("result",), registry=self.registry)
        self._replies = Counter(
            "durable_timer_replies_ignored",
            "Reply subjects outside the allowed prefix",
            registry=self.registry,
        )
        self.skew = Gauge("durable_timer_clock_skew_seconds", "Our clock minus the broker's", registry=self.registry)

    def command(self, kind: str, status: str, code: str) -> None:
        self._child("command", self._commands, kind, status, code).inc()

    def resume(self) -> None:
        self._resumes.inc()

    def repair(self, kind: str) -> None:
        self._repairs.labels(kind).inc()

    def wake(self, result: str) -> None:
        self._child("wake", self._wakes, result).inc()

    def reply_ignored(self) -> None:
        self._replies.inc()

    def _child(self, name: str, counter: Counter, *labels: str) -> Counter:
        child = self._children.get((name, *labels))
        if child is None:
            child = self._children[(name, *labels)] = counter.labels(*labels)
        return child
