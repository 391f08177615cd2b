"""The published schema: every message and stored record, version 1, for people and for other programs.

``timer_service.wire.schemas`` writes these models as JSON schemas. The service itself reads and writes the
same formats with the faster structs of ``commands`` and ``records``; tests hold the two together. All integers
are strict: booleans, strings and 1.0 are none. Instants are milliseconds since 1970 (UTC), durations
milliseconds. In commands null means absent, except in ``max_retries``; the service writes every field that is
not optional here.

``fields.read`` is the way from bytes to a model: pydantic alone would take duplicate keys, NaN and infinite numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from timer_service.domain.model import MAX_DELAY_MS, MAX_DUE_MS, MAX_RECEIPTS, MAX_TIMELINE, MIN_DUE_MS
from timer_service.wire.canonical import payload_sha256
from timer_service.wire.commands import MAX_WAIT_MS, Kind
from timer_service.wire.fields import (
    Answer,
    CodeText,
    CommandId,
    DueMs,
    EdgeId,
    EpochMs,
    FailureCode,
    Fence,
    Generation,
    KeyPart,
    MaxRetries,
    Model,
    Payload,
    PayloadHash,
    PhaseText,
    ResumeId,
    Retries,
    RuntimeHash,
    StatusText,
    Text,
    TimerRef,
    Version,
    at_most,
    due_instant,
)
from timer_service.wire.records import REJECTED_BODY_BYTES


class LineageKey(Model):
    """Names the timer of a node in one run of a released flow."""

    flow_id: KeyPart
    flow_version: KeyPart
    root_execution_id: KeyPart
    node_id: KeyPart


class NameKey(Model):
    """Names a timer that belongs to no flow. An absent namespace is "default"."""

    name: KeyPart
    namespace: KeyPart | None = "default"


class FullNameKey(NameKey):
    """The same as the service hands it back: with its namespace."""

    namespace: KeyPart


_KEY_FIELDS: Final = frozenset({*LineageKey.model_fields, *NameKey.model_fields})


def _without_null_parts(key: Any) -> Any:
    if not isinstance(key, dict):
        return key
    return {name: part for name, part in key.items() if part is not None or name not in _KEY_FIELDS}


Key = Annotated[LineageKey | NameKey, BeforeValidator(_without_null_parts)]
FullKey = LineageKey | FullNameKey


class Edges(Model):
    """The edges of a flow that leave the timer node."""

    start: EdgeId
    elapsed: EdgeId
    retry: EdgeId | None = None


_ONE_OF_THREE: Final[list[JsonValue]] = [
    {"required": ["delay_ms"], "properties": {"delay_ms": {"type": "integer"}}},
    {"required": ["at"], "properties": {"at": {"type": "string"}}},
    {"required": ["at_ms"], "properties": {"at_ms": {"type": "integer"}}},
]


class Due(Model):
    """When a timer is due, in exactly one of three forms. An instant in the past is due at once."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _ONE_OF_THREE})

    delay_ms: Annotated[int, Field(ge=1, le=MAX_DELAY_MS)] | None = Field(
        default=None, description="Milliseconds after the broker stored the command; at most 100 years."
    )
    at: Annotated[str, Field(json_schema_extra={"format": "date-time"}), AfterValidator(due_instant)] | None = Field(
        default=None,
        description="RFC 3339 with an offset, from 1970 to 2200-01-01T00:00:00Z. Finer than a millisecond rounds up.",
    )
    at_ms: Annotated[int, Field(ge=MIN_DUE_MS, le=MAX_DUE_MS)] | None = Field(
        default=None, description="Epoch milliseconds, from 1970 to 2200-01-01T00:00:00Z."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Due:
        if [self.delay_ms, self.at, self.at_ms].count(None) != 2:
            raise ValueError("exactly one of delay_ms, at and at_ms")
        return self


# -- commands -----------------------------------------------------------------------------------------------


class Command(Model):
    """What every command carries."""

    v: Version
    command_id: CommandId


class Start(Command):
    """Begin a timer, or its next generation. On `durable_timer.commands.start.v1`."""

    timer: Key
    due: Due
    edges: Edges | None = Field(default=None, description="Only with a lineage key; handed back unchanged.")
    max_retries: MaxRetries | None = 0
    payload: Payload = None
    payload_sha256: PayloadHash | None = Field(default=None, description="Checked against the payload when present.")
    runtime_sha256: RuntimeHash | None = Field(default=None, description="Only with a lineage key.")
    if_exists: Literal["reject", "replace"] | None = Field(
        default=None,
        description="What becomes of a living timer; by default a name is replaced, and a lineage is not.",
    )

    @model_validator(mode="after")
    def _lineage_only(self) -> Start:
        if isinstance(self.timer, NameKey) and (self.edges is not None or self.runtime_sha256 is not None):
            raise ValueError("edges and runtime_sha256 belong to lineage timers only")
        return self

    @model_validator(mode="after")
    def _hash_of_payload(self) -> Start:
        if self.payload_sha256 is not None and self.payload_sha256 != payload_sha256(self.payload):
            raise ValueError("payload_sha256 does not match the payload")
        return self


class Cancel(Command):
    """End a waiting timer. On `durable_timer.commands.cancel.v1`."""

    timer_ref: TimerRef
    generation: Generation | None = Field(default=None, description="Cancel only this one.")
    reason: Text | None = None
    wait_ms: Annotated[int, Field(ge=0, le=MAX_WAIT_MS)] | None = Field(
        default=None, description="How long an unknown timer's start may still be on its way; 5,000 by default."
    )


class Feedback(Command):
    """An answer to a resume: it names the occurrence as the resume carried it."""

    timer_ref: TimerRef
    generation: Generation
    fence: Fence


class Complete(Feedback):
    """The work is done. On `durable_timer.commands.complete.v1`."""


class Retry(Feedback):
    """Wait again. On `durable_timer.commands.retry.v1`."""

    due: Due | None = Field(default=None, description="Absent repeats the delay of the last start or retry.")


class Fail(Feedback):
    """The work failed for good. On `durable_timer.commands.fail.v1`."""

    failure_code: FailureCode
    message: Text | None = None


# -- what the service publishes -----------------------------------------------------------------------------


class Outcome(Model):
    """What became of a command, sent to its `Durable-Timer-Reply`. The last four describe the timer as it is now."""

    command_id: CommandId | None = Field(description="Null when the body was unreadable.")
    status: StatusText
    code: CodeText | None
    message: str | None = Field(description="For people.")
    timer_ref: TimerRef | None
    generation: Generation | None
    fence: Fence | None
    phase: PhaseText | None
    due_at_ms: DueMs | None


class Rejection(Model):
    """The record of a refused command. On `durable_timer.rejected.v1.<kind>`."""

    v: Version
    kind: Literal["start", "retry", "complete", "fail", "cancel", "unknown"]
    code: CodeText
    message: str = Field(description="For people.")
    command_id: CommandId | None
    timer_ref: TimerRef | None
    received_at_ms: EpochMs
    body: Annotated[str, at_most(REJECTED_BODY_BYTES)] = Field(
        max_length=REJECTED_BODY_BYTES,
        description=f"The body as text, cut at {REJECTED_BODY_BYTES} bytes; what is not UTF-8 is replaced.",
    )
    body_truncated: bool


class Wake(Model):
    """The driver's message to the replica that takes the timer on. On `durable_timer.wake.v1.<timer_ref>`."""

    v: Version
    timer_ref: TimerRef
    generation: Generation
    woken_at_ms: EpochMs | None = Field(
        description="When the driver published it; null where a schedule did: then the message's own time says it."
    )
    revision: Annotated[int, Field(ge=0)] = Field(default=0, description="Of the state that was armed; 0: unknown.")


class Resume(Model):
    """A timer has elapsed. On `triggers.v2.durable_timer.resume.v1`; every field is always there."""

    v: Version
    resume_id: ResumeId
    timer_ref: TimerRef
    timer: FullKey
    generation: Generation
    fence: Fence
    retries_used: Retries
    max_retries: MaxRetries | None
    edges: Edges | None
    runtime_sha256: RuntimeHash | None
    due_at_ms: DueMs
    elapsed_at_ms: EpochMs
    payload: Payload
    payload_sha256: PayloadHash

    @model_validator(mode="after")
    def _names_its_occurrence(self) -> Resume:
        if self.resume_id != f"{self.timer_ref}.{self.generation}":
            raise ValueError("resume_id is not <timer_ref>.<generation>")
        return self

    @model_validator(mode="after")
    def _hash_of_payload(self) -> Resume:
        if self.payload_sha256 != payload_sha256(self.payload):
            raise ValueError("payload_sha256 does not match the payload")
        return self


# -- stored records -----------------------------------------------------------------------------------------


class Occurrence(Model):
    """One generation in the timeline. Null is "not yet" or "not known"."""

    generation: Generation
    accepted_at_ms: EpochMs = Field(description="When the broker stored the start or retry.")
    due_at_ms: DueMs
    woken_at_ms: EpochMs | None = Field(description="When the driver published the wake.")
    elapsed_at_ms: EpochMs | None = Field(description="When the state said elapsed.")
    resumed_at_ms: EpochMs | None = Field(description="When the last resume known of was published.")
    resumes: Annotated[int, Field(ge=0)] = Field(description="How many resumes were published, as far as known.")
    answer: Answer | None = Field(description="What ended this generation.")
    answered_at_ms: EpochMs | None
    lateness_ms: Annotated[int, Field(ge=0)] | None = Field(description="From due to elapsed.")


Receipt = Annotated[
    tuple[CommandId, Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], CodeText | None],
    Field(strict=False, description="An accepted command: its id, a hash of its content, the code it was told."),
]
Order = Annotated[
    tuple[EpochMs, Annotated[int, Field(ge=0)]],
    Field(strict=False, description="When the broker stored a command: its millisecond and stream sequence."),
]


class Record(Model):
    """What the live state and the terminal record share."""

    v: Version
    timer_ref: TimerRef
    timer: FullKey
    phase: PhaseText
    generation: Generation
    fence: Fence
    due_at_ms: DueMs
    retries_used: Retries
    max_retries: MaxRetries | None
    payload_sha256: PayloadHash
    timeline: list[Occurrence] = Field(
        min_length=1, max_length=MAX_TIMELINE, description="The last 16 generations, the present one last."
    )
    receipts: list[Receipt] = Field(
        min_length=1, max_length=MAX_RECEIPTS, description="The last 16 accepted commands, also of former lives."
    )
    applied: Order = Field(description="The newest start or cancel applied; older ones are superseded.")
    start_content: str = Field(pattern=r"^[0-9a-f]{32}$", description="A hash of the last start's content.")
    delay_ms: Annotated[int, Field(ge=1, le=MAX_DELAY_MS)] | None = Field(
        default=None, description="The last delay that a start or retry gave, in milliseconds."
    )
    edges: Edges | None = None
    runtime_sha256: RuntimeHash | None = None
    cancel_requested: bool = Field(default=False, description="A cancel came too late: a retry will end the timer.")
    archive_seq: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Stream sequence of the terminal record before this life; 0: none."
    )


class State(Record):
    """A live timer, in the KV bucket `DURABLE_TIMER_STATE` under its timer_ref."""

    payload: Payload = None
    snapshot_seq: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Where a payload too large to travel here is kept: its stream sequence."
    )
    failure_code: FailureCode | None = Field(default=None, description="Only between the end and its archiving.")
    message: Text | None = None
    ended_at_ms: EpochMs | None = None


class Terminal(Record):
    """The archive record of an ended timer. On `durable_timer.terminal.v1.<timer_ref>`."""

    status: Literal["completed", "failed", "cancelled"]
    failure_code: FailureCode | None
    message: Text | None
    ended_at_ms: EpochMs


class Removal(Model):
    """What stands for a while in place of a removed entry: where the timer stood when it ended."""

    v: Version
    generation: Generation
    fence: Fence


COMMANDS: Final[dict[Kind, type[Command]]] = {
    "start": Start,
    "retry": Retry,
    "complete": Complete,
    "fail": Fail,
    "cancel": Cancel,
}
"""The model of each kind of command."""
