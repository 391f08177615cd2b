"""Whether the demo kept its promises: judged from the archive's records and from what the handlers really saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Record = Mapping[str, Any]
"""A stored timer as ``TimerClient.get`` returns it; with ``status`` it is one of the archive."""

_STATUS = {"complete": "completed", "cancel": "cancelled"}
_INSTEAD = {"cancel": "cancelled", "replace": "replaced"}


class Promise(msgspec.Struct, frozen=True):
    """What must become of one occurrence: never fire before ``not_before_ms``, and end with ``answer``.

    One that ends with cancel or replace must never fire. ``overdue``: it must fall due while the service is down.
    """

    name: str
    timer_ref: str
    generation: int
    not_before_ms: int
    answer: Literal["complete", "retry", "cancel", "replace"]
    overdue: bool = False

    @property
    def fires(self) -> bool:
        return self.answer in ("complete", "retry")


class Seen(msgspec.Struct, frozen=True):
    """One hand-off, as the handler noted it."""

    resume_id: str
    timer_ref: str
    generation: int
    due_at_ms: int
    seen_at_ms: int


class Outage(msgspec.Struct, frozen=True):
    """From when to when no timer service ran."""

    from_ms: int
    to_ms: int


class Row(msgspec.Struct, frozen=True):
    """What is known of one promised occurrence, and what is wrong with it (nothing when ``problems`` is empty)."""

    promise: Promise
    due_at_ms: int | None
    fired_at_ms: int | None
    seen_at_ms: int | None
    delivered: int
    phase: str | None
    problems: tuple[str, ...]

    @property
    def lateness_ms(self) -> int | None:
        """From due to the first hand-off."""
        if self.seen_at_ms is None or self.due_at_ms is None:
            return None
        return self.seen_at_ms - self.due_at_ms


def judge(
    promises: Sequence[Promise], records: Mapping[str, Record | None], seen: Sequence[Seen], outage: Outage | None
) -> tuple[list[Row], list[str]]:
    """A row for each promise, and all that is wrong in sentences; the demo succeeded when there are none."""
    rows = [_row(promise, records.get(promise.timer_ref), _of(promise, seen), outage) for promise in promises]
    problems = [
        f"{row.promise.name} (generation {row.promise.generation}) {text}" for row in rows for text in row.problems
    ]
    return rows, problems + _unfinished(promises, records) + _strangers(promises, seen)


def _of(promise: Promise, seen: Sequence[Seen]) -> list[Seen]:
    place = (promise.timer_ref, promise.generation)
    return sorted((one for one in seen if (one.timer_ref, one.generation) == place), key=lambda one: one.seen_at_ms)


def _row(promise: Promise, record: Record | None, seen: list[Seen], outage: Outage | None) -> Row:
    entry = _entry(record, promise.generation)
    problems = _fired_wrongly(promise, entry, seen) if promise.fires else _fired_at_all(promise, entry, seen)
    if entry is None:
        problems.append("is not in the stored record")
    elif entry["answer"] != promise.answer:
        problems.append(f"was ended by {entry['answer'] or 'nothing'}; it should have been by {promise.answer}")
    if promise.overdue:
        problems += _not_overdue(entry, seen, outage)
    return Row(
        promise=promise,
        due_at_ms=None if entry is None else entry["due_at_ms"],
        fired_at_ms=None if entry is None else entry["elapsed_at_ms"],
        seen_at_ms=seen[0].seen_at_ms if seen else None,
        delivered=len(seen),
        phase=None if record is None or record["generation"] != promise.generation else record["phase"],
        problems=tuple(problems),
    )


def _entry(record: Record | None, generation: int) -> Mapping[str, Any] | None:
    timeline = [] if record is None else record["timeline"]
    return next((entry for entry in timeline if entry["generation"] == generation), None)


def _fired_wrongly(promise: Promise, entry: Mapping[str, Any] | None, seen: list[Seen]) -> list[str]:
    problems = []
    if not seen:
        problems.append("never reached its handler")
    if len(seen) > 1:
        problems.append(f"reached its handler {len(seen)} times")
    due_at_ms = promise.not_before_ms if entry is None else max(promise.not_before_ms, entry["due_at_ms"])
    early_ms = [due_at_ms - one.seen_at_ms for one in seen if one.seen_at_ms < due_at_ms]
    problems += [f"was handed over {by} ms early" for by in early_ms]
    if entry is not None and entry["elapsed_at_ms"] is None:
        problems.append("did not fire, says the record")
    elif entry is not None and entry["elapsed_at_ms"] < due_at_ms:
        problems.append(f"fired {due_at_ms - entry['elapsed_at_ms']} ms early, says the record")
    return problems


def _fired_at_all(promise: Promise, entry: Mapping[str, Any] | None, seen: list[Seen]) -> list[str]:
    problems = []
    if seen:
        problems.append(f"reached its handler although it was {_INSTEAD[promise.answer]}")
    if entry is not None and entry["elapsed_at_ms"] is not None:
        problems.append(f"fired although it was {_INSTEAD[promise.answer]}, says the record")
    return problems


def _not_overdue(entry: Mapping[str, Any] | None, seen: list[Seen], outage: Outage | None) -> list[str]:
    if entry is None or outage is None or not outage.from_ms <= entry["due_at_ms"] < outage.to_ms:
        return ["did not fall due during the outage, so the outage shows nothing"]
    if any(one.seen_at_ms < outage.to_ms for one in seen):
        return ["was handed over while no service ran"]
    return []


def _unfinished(promises: Sequence[Promise], records: Mapping[str, Record | None]) -> list[str]:
    """The last promise of a timer says how its archive record must end."""
    last = {promise.timer_ref: promise for promise in promises}
    problems = []
    for ref, promise in last.items():
        status = (records.get(ref) or {}).get("status")
        if status is None:
            problems.append(f"{promise.name} has no record in the archive")
        elif status != _STATUS[promise.answer]:
            problems.append(f"{promise.name} ended as {status}; it should be {_STATUS[promise.answer]}")
    return problems


def _strangers(promises: Sequence[Promise], seen: Sequence[Seen]) -> list[str]:
    known = {(promise.timer_ref, promise.generation) for promise in promises}
    strange = {one.resume_id for one in seen if (one.timer_ref, one.generation) not in known}
    return [f"{resume_id} reached a handler, and nobody had started it" for resume_id in sorted(strange)]
