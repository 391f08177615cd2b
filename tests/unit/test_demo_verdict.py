"""The demo's judge must not be fooled: each way in which a timer can go wrong fails the demo."""

from __future__ import annotations

from typing import Any

import pytest

from timer_service.demo_verdict import Outage, Promise, Seen, judge

T = 1_000_000
OUTAGE = Outage(T + 3_000, T + 6_000)
TEA = Promise("tea", "ref-tea", 0, T + 1_000, "complete")
METER = Promise("meter", "ref-meter", 0, T + 2_000, "cancel")
PIZZA_OLD = Promise("pizza", "ref-pizza", 0, T + 1_500, "replace")
PIZZA = Promise("pizza", "ref-pizza", 1, T + 2_500, "complete")
CALL = Promise("call", "ref-call", 0, T + 500, "retry")
CALL_AGAIN = Promise("call", "ref-call", 1, T + 2_000, "complete")
TRAIN = Promise("train", "ref-train", 0, T + 4_000, "complete", overdue=True)
PROMISES = [TEA, METER, PIZZA_OLD, PIZZA, CALL, CALL_AGAIN, TRAIN]


def entry(promise: Promise, **other: Any) -> dict[str, Any]:
    fired = (OUTAGE.to_ms + 800 if promise.overdue else promise.not_before_ms + 5) if promise.fires else None
    return {
        "generation": promise.generation,
        "due_at_ms": promise.not_before_ms,
        "elapsed_at_ms": fired,
        "answer": promise.answer,
        **other,
    }


def record(*promises: Promise, status: str = "completed", **other: Any) -> dict[str, Any]:
    last = promises[-1]
    timeline = [entry(promise) for promise in promises]
    return {"generation": last.generation, "phase": status, "status": status, "timeline": timeline, **other}


def seen(promise: Promise, after_due_ms: int = 10) -> Seen:
    at_ms = OUTAGE.to_ms + 900 if promise.overdue else promise.not_before_ms + after_due_ms
    occurrence = f"{promise.timer_ref}.{promise.generation}"
    return Seen(occurrence, promise.timer_ref, promise.generation, promise.not_before_ms, at_ms)


def good_records() -> dict[str, Any]:
    return {
        "ref-tea": record(TEA),
        "ref-meter": record(METER, status="cancelled"),
        "ref-pizza": record(PIZZA_OLD, PIZZA),
        "ref-call": record(CALL, CALL_AGAIN),
        "ref-train": record(TRAIN),
    }


def good_seen() -> list[Seen]:
    return [seen(promise) for promise in PROMISES if promise.fires]


def problems(records: dict[str, Any] | None = None, sightings: list[Seen] | None = None) -> list[str]:
    return judge(PROMISES, records or good_records(), good_seen() if sightings is None else sightings, OUTAGE)[1]


def test_kept_promises_leave_nothing_to_say() -> None:
    """When all fired once, on time, and nothing else did, there is no problem, and each row has its lateness."""
    rows, found = judge(PROMISES, good_records(), good_seen(), OUTAGE)
    assert found == []
    assert [row.lateness_ms for row in rows] == [10, None, None, 10, 10, 10, 2_900]
    assert [row.delivered for row in rows] == [1, 0, 0, 1, 1, 1, 1]


def test_a_hand_off_before_due_is_early() -> None:
    """A handler that saw its timer one millisecond before it was due fails the demo."""
    sightings = [one for one in good_seen() if one.timer_ref != "ref-tea"] + [seen(TEA, after_due_ms=-1)]
    assert problems(sightings=sightings) == ["tea (generation 0) was handed over 1 ms early"]


def test_a_record_that_fired_before_due_is_early() -> None:
    """The record's own time of firing counts too."""
    records = good_records()
    records["ref-tea"]["timeline"] = [entry(TEA, elapsed_at_ms=TEA.not_before_ms - 2)]
    assert problems(records) == ["tea (generation 0) fired 2 ms early, says the record"]


def test_a_due_time_that_moved_forward_is_early() -> None:
    """A due time in the record that lies before what was promised does not excuse an early hand-off."""
    records = good_records()
    records["ref-tea"]["timeline"] = [entry(TEA, due_at_ms=T, elapsed_at_ms=T + 1)]
    sightings = [one for one in good_seen() if one.timer_ref != "ref-tea"] + [seen(TEA, after_due_ms=-900)]
    found = problems(records, sightings)
    assert "tea (generation 0) was handed over 900 ms early" in found
    assert "tea (generation 0) fired 999 ms early, says the record" in found


def test_a_second_hand_off_is_a_double() -> None:
    """The same resume_id handled twice fails the demo."""
    assert problems(sightings=[*good_seen(), seen(PIZZA, after_due_ms=400)]) == [
        "pizza (generation 1) reached its handler 2 times"
    ]


def test_a_missing_hand_off_is_a_loss() -> None:
    """A timer that no handler saw fails the demo, whatever its record says."""
    sightings = [one for one in good_seen() if one.timer_ref != "ref-train"]
    assert problems(sightings=sightings) == ["train (generation 0) never reached its handler"]


def test_a_cancelled_timer_that_fires_fails() -> None:
    """Cancelled but handed over is a broken promise."""
    assert problems(sightings=[*good_seen(), seen(METER)]) == [
        "meter (generation 0) reached its handler although it was cancelled"
    ]


def test_a_replaced_occurrence_that_fires_fails() -> None:
    """The old generation must never be handed over, nor have fired by the record."""
    records = good_records()
    records["ref-pizza"]["timeline"][0]["elapsed_at_ms"] = T + 1_501
    assert problems(records, [*good_seen(), seen(PIZZA_OLD)]) == [
        "pizza (generation 0) reached its handler although it was replaced",
        "pizza (generation 0) fired although it was replaced, says the record",
    ]


@pytest.mark.parametrize("missing", [None, {"generation": 0, "phase": "elapsed", "timeline": [entry(TEA)]}])
def test_a_timer_without_archive_record_fails(missing: Any) -> None:
    """The demo ends in archive records; a timer that is unknown or still live has none."""
    assert "tea has no record in the archive" in problems({**good_records(), "ref-tea": missing})


def test_another_end_than_planned_fails() -> None:
    """A timer that failed or was answered otherwise is not what was promised."""
    records = good_records()
    records["ref-tea"] = record(TEA, status="failed")
    records["ref-tea"]["timeline"] = [entry(TEA, answer="fail")]
    assert problems(records) == [
        "tea (generation 0) was ended by fail; it should have been by complete",
        "tea ended as failed; it should be completed",
    ]


def test_a_lost_generation_fails() -> None:
    """Each promised generation must be told in the timeline."""
    assert "call (generation 0) is not in the stored record" in problems(
        {**good_records(), "ref-call": record(CALL_AGAIN)}
    )


def test_an_outage_that_hit_nothing_fails() -> None:
    """The timer that shows the crash must have fallen due while nobody ran, or the demo shows nothing."""
    assert judge(PROMISES, good_records(), good_seen(), Outage(T, T + 1))[1] == [
        "train (generation 0) did not fall due during the outage, so the outage shows nothing"
    ]
    assert judge(PROMISES, good_records(), good_seen(), None)[1] != []


def test_a_stranger_fails() -> None:
    """A hand-off that belongs to no promise is somebody's mistake."""
    stranger = Seen("ref-tea.1", "ref-tea", 1, T, T + 1)
    assert problems(sightings=[*good_seen(), stranger]) == ["ref-tea.1 reached a handler, and nobody had started it"]
