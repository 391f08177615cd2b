"""What the service stores and publishes: state, terminal record, wake, resume, outcome, rejection."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import TimerRef, is_timer_ref, occurrence_id
from timer_service.domain.model import ABSENT, STATE_VERSION, Absent, EpochMs, JsonText, Number, Timer, Wake

REJECTED_BODY_BYTES = 4096
_NULL = JsonText(b"null")


class UnreadableRecord(Exception):
    """A stored record that is corrupt or of a newer version. It is to be left as it is."""


class Resume(msgspec.Struct, frozen=True):
    """What a flow engine gets. Every field is always there."""

    v: int
    resume_id: str
    timer_ref: TimerRef
    timer: JsonText
    generation: int
    fence: int
    retries_used: int
    max_retries: int | None
    edges: JsonText
    runtime_sha256: str | None
    due_at_ms: int
    elapsed_at_ms: int | None
    payload: JsonText
    payload_sha256: str


class Outcome(msgspec.Struct, frozen=True):
    """What the publisher of a command is told. The last four fields describe the timer as it is now."""

    command_id: str | None
    status: Status
    code: str | None
    message: str | None
    timer_ref: str | None
    generation: int | None
    fence: int | None
    phase: str | None
    due_at_ms: int | None


class Rejection(msgspec.Struct, frozen=True):
    """The stored record of a refused command."""

    v: int
    kind: str
    code: Code
    message: str
    command_id: str | None
    timer_ref: str | None
    received_at_ms: int
    body: str
    body_truncated: bool


class WakeRecord(msgspec.Struct, frozen=True):
    """The driver's message to whichever replica takes the timer on."""

    v: int
    timer_ref: TimerRef
    generation: Number
    woken_at_ms: EpochMs | None
    revision: Number = 0


class Removal(msgspec.Struct, frozen=True):
    """What the marker in place of a removed entry says: where the timer stood when it ended."""

    v: int
    generation: int
    fence: int


class _Version(msgspec.Struct, frozen=True):
    v: int


encode = msgspec.json.Encoder().encode
_state = msgspec.json.Decoder(Timer)
_wake = msgspec.json.Decoder(WakeRecord)
_version = msgspec.json.Decoder(_Version)
_any_resume = msgspec.json.Decoder(Resume)


def decode_timer(data: bytes, timer_ref: TimerRef) -> Timer:
    """A state value or terminal record. Raises UnreadableRecord, naming what is wrong."""
    try:
        timer = _state.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnreadableRecord(_why_unreadable(data, error)) from None
    if timer.v != STATE_VERSION:
        raise UnreadableRecord(f"version {timer.v} is not known; {STATE_VERSION} is")
    if timer.timer_ref != timer_ref:
        raise UnreadableRecord(f"it names {timer.timer_ref}")
    if not timer.timeline:
        raise UnreadableRecord("its timeline is empty")
    return timer


def _why_unreadable(data: bytes, error: Exception) -> str:
    try:
        version = _version.decode(data).v
    except msgspec.MsgspecError:
        return str(error)
    return str(error) if version == STATE_VERSION else f"version {version} is not known; {STATE_VERSION} is"


def terminal_record(timer: Timer) -> Timer:
    """The archive's record of an ended timer: the state with its status, without the payload."""
    return replace(timer, status=timer.phase, payload=ABSENT, snapshot_seq=None)


def resume_of(timer: Timer, payload: JsonText) -> Resume:
    """The resume of an elapsed timer. Equal states give equal resumes, whenever and wherever."""
    return Resume(
        v=1,
        resume_id=occurrence_id(timer.timer_ref, timer.generation),
        timer_ref=timer.timer_ref,
        timer=timer.timer,
        generation=timer.generation,
        fence=timer.fence,
        retries_used=timer.retries_used,
        max_retries=timer.max_retries,
        edges=_NULL if isinstance(timer.edges, Absent) else timer.edges,
        runtime_sha256=timer.runtime_sha256,
        due_at_ms=timer.due_at_ms,
        elapsed_at_ms=timer.current.elapsed_at_ms,
        payload=payload,
        payload_sha256=timer.payload_sha256,
    )


def decode_resume(data: bytes) -> Resume:
    """A resume as published. Raises UnreadableRecord."""
    try:
        resume = _any_resume.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnreadableRecord(str(error)) from None
    if resume.v != 1 or not is_timer_ref(resume.timer_ref):
        raise UnreadableRecord(f"version {resume.v} of {resume.timer_ref!r} is not known")
    return resume


def encode_wake(wake: Wake) -> bytes:
    return encode(WakeRecord(1, wake.timer_ref, wake.generation, wake.woken_at_ms, wake.revision))


def decode_wake(data: bytes) -> Wake:
    """A wake. Raises UnreadableRecord: a wake is disposable, so such a one is dropped and counted."""
    try:
        record = _wake.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnreadableRecord(str(error)) from None
    if record.v != 1 or not is_timer_ref(record.timer_ref):
        raise UnreadableRecord("not a wake of version 1")
    return Wake(record.timer_ref, record.generation, record.woken_at_ms, record.revision)


def outcome_of(
    timer: Timer | None,
    *,
    command_id: str | None,
    timer_ref: str | None,
    status: Status,
    code: str | None = None,
    message: str | None = None,
) -> Outcome:
    """The outcome of a command; ``timer`` is the timer as it is now, None where it is unknown."""
    if timer is None:
        return Outcome(command_id, status, code, message, timer_ref, None, None, None, None)
    return Outcome(
        command_id,
        status,
        code,
        message,
        timer_ref,
        timer.generation,
        timer.fence,
        timer.phase,
        timer.due_at_ms,
    )


def rejection_of(kind: str | None, outcome: Outcome, received_at_ms: int, body: bytes) -> Rejection:
    """The stored rejection; ``body`` is cut at 4 KiB of the text it is stored as."""
    text, truncated = _clip(body)
    return Rejection(
        v=1,
        kind=kind or "unknown",
        code=Code(outcome.code or Code.MALFORMED),
        message=outcome.message or "",
        command_id=outcome.command_id,
        timer_ref=outcome.timer_ref,
        received_at_ms=received_at_ms,
        body=text,
        body_truncated=truncated,
    )


def _clip(body: bytes) -> tuple[str, bool]:
    text = body[: REJECTED_BODY_BYTES + 4].decode("utf-8", "replace").encode()
    if len(body) <= REJECTED_BODY_BYTES and len(text) <= REJECTED_BODY_BYTES:
        return text.decode(), False
    return text[:REJECTED_BODY_BYTES].decode("utf-8", "ignore"), True


def plain(value: Any) -> Any:
    """A record as plain JSON values, for people and for ``--json``."""
    return msgspec.json.decode(encode(value))
