"""The resume as a handler gets it, and the reading of it from what the broker delivers."""

from __future__ import annotations

from typing import Any

import msgspec

from notify_consumer.errors import UnreadableResume
from timer_service.domain.identity import occurrence_id, parse_occurrence_id
from timer_service.wire import records
from timer_service.wire.canonical import MalformedJson, strict_loads
from timer_service.wire.records import UnreadableRecord


class Resume(msgspec.Struct, frozen=True):
    """One occurrence of a timer that has elapsed.

    ``resume_id`` is its idempotency key: however often it is handed over, it is the same. ``timer`` is the key
    object, ``payload`` and ``edges`` are as they were given to Start (integers of any size survive), instants are
    epoch milliseconds. ``max_retries`` None is "without limit". Where a resume does not say when it elapsed,
    ``elapsed_at_ms`` is its due time.
    """

    v: int
    resume_id: str
    timer_ref: str
    timer: dict[str, str]
    generation: int
    fence: int
    retries_used: int
    max_retries: int | None
    edges: dict[str, str | None] | None
    runtime_sha256: str | None
    due_at_ms: int
    elapsed_at_ms: int
    payload: Any
    payload_sha256: str


def read_resume(data: bytes) -> Resume:
    """The resume in ``data``. Raises UnreadableResume; never anything else, whatever the bytes are."""
    try:
        record = records.decode_resume(data)
        resume = _resume(record)
        _check(resume)
    except (UnreadableRecord, MalformedJson, msgspec.ValidationError, ValueError) as error:
        raise UnreadableResume(str(error), _readable_id(data)) from None
    return resume


def _resume(record: records.Resume) -> Resume:
    elapsed_at_ms = record.due_at_ms if record.elapsed_at_ms is None else record.elapsed_at_ms
    return Resume(
        v=record.v,
        resume_id=record.resume_id,
        timer_ref=record.timer_ref,
        timer=msgspec.convert(strict_loads(bytes(record.timer)), dict[str, str]),
        generation=record.generation,
        fence=record.fence,
        retries_used=record.retries_used,
        max_retries=record.max_retries,
        edges=msgspec.convert(strict_loads(bytes(record.edges)), dict[str, str | None] | None),
        runtime_sha256=record.runtime_sha256,
        due_at_ms=record.due_at_ms,
        elapsed_at_ms=elapsed_at_ms,
        payload=strict_loads(bytes(record.payload)),
        payload_sha256=record.payload_sha256,
    )


def _check(resume: Resume) -> None:
    """What a feedback command must be able to rely on."""
    timer_ref, generation = parse_occurrence_id(resume.resume_id)
    if (timer_ref, generation) != (resume.timer_ref, resume.generation):
        named = occurrence_id(timer_ref, resume.generation)
        raise ValueError(f"resume_id is {resume.resume_id}, but the occurrence is {named}")
    if resume.fence < 1:
        raise ValueError(f"fence is {resume.fence}; 1 is the least")
    if "flow_id" not in resume.timer and "name" not in resume.timer:
        raise ValueError("timer has neither flow_id nor name")


class _Named(msgspec.Struct):
    """As much of a resume as can be read when the rest can't."""

    resume_id: str


def _readable_id(data: bytes) -> str | None:
    try:
        resume_id = msgspec.json.decode(data, type=_Named).resume_id
        parse_occurrence_id(resume_id)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return resume_id
