"""Prometheus metrics of the timer service. None is labelled by timer.

What is counted on the ring is counted in plain integers and handed to prometheus-client when somebody asks: its own
counters take a lock each time, which at ten a timer is a few percent of all work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 3600)


class Metrics(Collector):
    """One registry a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.armed: Callable[[], int] = lambda: 0
        self.driving: Callable[[], bool] = lambda: True
        self.problems = 0
        self.admission_open = True
        self.skew_s = 0.0
        self.replies_ignored = 0
        self._commands: Counter[tuple[str, str, str]] = Counter()
        self._resumes = 0
        self._repairs: Counter[str] = Counter()
        self._wakes: Counter[str] = Counter()
        self._lateness_counts = [0] * (len(_BUCKETS_S) + 1)
        self._lateness_sum_s = 0.0

    def command(self, kind: str, status: str, code: str) -> None:
        self._commands[kind, status, code] += 1

    def resume(self) -> None:
        self._resumes += 1

    def repair(self, kind: str) -> None:
        self._repairs[kind] += 1

    def wake(self, result: str) -> None:
        self._wakes[result] += 1

    def lateness(self, late_ms: int) -> None:
        """A timer elapsed ``late_ms`` after it was due."""
        late_s = late_ms / 1000
        self._lateness_counts[bisect_left(_BUCKETS_S, late_s)] += 1
        self._lateness_sum_s += late_s

    # -- when somebody asks -----------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Everything as it is now."""
        yield GaugeMetricFamily("durable_timer_armed", "Entries in the heap", self.armed())
        yield GaugeMetricFamily("durable_timer_driver", "1 while this process drives wakes", int(self.driving()))
        yield GaugeMetricFamily(
            "durable_timer_problems", "State entries that can't be read, left untouched", self.problems
        )
        yield GaugeMetricFamily(
            "durable_timer_admission_open", "1 while starts are taken, 0 while they are held", int(self.admission_open)
        )
        yield GaugeMetricFamily("durable_timer_clock_skew_seconds", "Our clock minus the broker's", self.skew_s)
        yield CounterMetricFamily("durable_timer_resumes", "Resumes published", self._resumes)
        yield CounterMetricFamily(
            "durable_timer_replies_ignored", "Reply subjects outside the allowed prefix", self.replies_ignored
        )
        yield self._labelled_commands()
        yield _labelled("durable_timer_repairs", "What the reconciler mended", "kind", self._repairs)
        yield _labelled("durable_timer_wakes", "Wakes settled", "result", self._wakes)
        yield self._lateness_histogram()

    def _labelled_commands(self) -> Metric:
        family = CounterMetricFamily("durable_timer_commands", "Settled commands", labels=("kind", "status", "code"))
        for labels, value in self._commands.items():
            family.add_metric(labels, value)
        return family

    def _lateness_histogram(self) -> Metric:
        total, buckets = 0, []
        for bound, count in zip((*map(float, _BUCKETS_S), "+Inf"), self._lateness_counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        return HistogramMetricFamily(
            "durable_timer_lateness_seconds", "From due to elapsed", buckets=buckets, sum_value=self._lateness_sum_s
        )


def _labelled(name: str, text: str, label: str, values: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family
