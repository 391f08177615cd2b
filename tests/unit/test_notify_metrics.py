"""What the metrics say of an outbox."""

from __future__ import annotations

import re

import pytest

from notify_consumer.metrics import Metrics
from notify_consumer.outbox.base import FEEDBACK_LANE, Survey, Waiting

NOW_MS = 1_000_000


@pytest.mark.parametrize(
    ("lanes", "pending_s", "answered_s"),
    [
        ({}, 0, 0),
        ({"a": Waiting(1, NOW_MS - 1_500), "b": Waiting(9, NOW_MS - 4_000)}, 4, 0),
        ({FEEDBACK_LANE: Waiting(1, NOW_MS - 2_500)}, 0, 2.5),
        ({"a": Waiting(1, NOW_MS - 1_000), FEEDBACK_LANE: Waiting(1, NOW_MS - 3_000)}, 1, 3),
        ({"a": Waiting(1, NOW_MS + 60_000)}, 0, 0),
    ],
)
def test_the_oldest_row_that_waits(lanes: dict[str, Waiting], pending_s: float, answered_s: float) -> None:
    """The oldest of all flows that waits for its handler, and of the answers; never negative, whatever the clocks."""
    metrics = Metrics()
    metrics.waiting(Survey({"a": Waiting(1, 0)}, None), NOW_MS)  # an older look, which is forgotten
    metrics.waiting(Survey(lanes, None), NOW_MS)
    values = {
        state: metrics.registry.get_sample_value("notify_consumer_oldest_ready_seconds", {"state": state})
        for state in ("pending", "answered")
    }
    assert values == {"pending": pending_s, "answered": answered_s}


def test_what_is_measured_in_a_unit_says_so() -> None:
    """Histograms are of seconds; no metric is labelled by a timer, a resume or a flow."""
    for family in Metrics().registry.collect():
        assert re.fullmatch(r"notify_consumer_[a-z_]+", family.name)
        assert family.type != "histogram" or family.name.endswith("_seconds")
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {"state", "result", "kind", "le"}
