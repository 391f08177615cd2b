"""The published schema: every message and stored record, version 1, for people and for other programs.

``timer_service.wire.schemas`` writes these models as JSON schemas. The service itself reads and writes the
same formats with the faster structs of ``commands`` and ``records``; tests hold the two together. All integers
are strict: booleans, strings and 1.0 are none. Instants are milliseconds since 1970 (UTC), durations
milliseconds. In commands null means absent, except in ``max_retries``; the service writes every field that is
not optional here.

``read`` is the way from bytes to a model: pydantic alone would take duplicate keys, NaN and infinite numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import KEY_PART_MAX_BYTES, check_key_part
from timer_service.domain.model import MAX_DELAY_MS, MAX_DUE_MS, MAX_RECEIPTS, MAX_TIMELINE, MIN_DUE_MS, Phase
from timer_service.wire.canonical import payload_sha256, strict_loads
from timer_service.wire.commands import MAX_EDGE_BYTES, MAX_RETRIES_LIMIT, MAX_TEXT_BYTES, MAX_WAIT_MS, Kind
from timer_service.wire.instants import parse_instant_ms
from timer_service.wire.records import REJECTED_BODY_BYTES


class Model(BaseModel):
    """Strict types, no unknown fields, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


M = TypeVar("M", bound=Model)


def read(model: type[M], data: bytes) -> M:
    """The message in ``data``. Raises ValueError: MalformedJson, or pydantic's ValidationError."""
    return model.model_validate(strict_loads(data))


# -- fields that several share ------------------------------------------------------------------------------


def _key_part(text: str) -> str:
    reason = check_key_part(text)
    if reason is not None:
        raise ValueError(reason)
    return text


def _at_most(limit: int) -> AfterValidator:
    def check(text: str) -> str:
        size = len(text.encode())
        if size > limit:
            raise ValueError(f"has {size} bytes of UTF-8; {limit} is the limit")
        return text

    return AfterValidator(check)


def _due_instant(text: str) -> str:
    if not MIN_DUE_MS <= parse_instant_ms(text) <= MAX_DUE_MS:
        raise ValueError("not within 1970-01-01 and 2200-01-01T00:00:00Z")
    return text


Version = Annotated[int, Field(ge=1, le=1, description="Version of the format.")]
CommandId = Annotated[
    str,
    Field(
        pattern=r"^[ -~]{1,128}$",
        description="Chosen by the publisher, unique within one timer: 1 to 128 printable ASCII characters.",
    ),
]
TimerRef = Annotated[
    str,
    Field(
        pattern=r"^[a-z2-7]{26}$",
        description="Derived from the key: the first 26 base32 characters of a SHA-256 over its parts.",
    ),
]
ResumeId = Annotated[
    str,
    Field(
        pattern=r"^[a-z2-7]{26}\.(0|[1-9][0-9]*)$",
        description="The occurrence, `<timer_ref>.<generation>`. Receivers drop duplicates by it.",
    ),
]
KeyPart = Annotated[
    str,
    Field(
        min_length=1,
        max_length=KEY_PART_MAX_BYTES,
        pattern="^[^\x00-\x1f\x7f-\x9f]*$",
        description=f"1 to {KEY_PART_MAX_BYTES} bytes of UTF-8 without control characters, compared byte for byte.",
    ),
    AfterValidator(_key_part),
]
EdgeId = Annotated[
    str,
    Field(min_length=1, max_length=MAX_EDGE_BYTES, description=f"1 to {MAX_EDGE_BYTES} bytes of UTF-8."),
    _at_most(MAX_EDGE_BYTES),
]
Text = Annotated[
    str,
    Field(max_length=MAX_TEXT_BYTES, description=f"Free text of up to {MAX_TEXT_BYTES} bytes of UTF-8."),
    _at_most(MAX_TEXT_BYTES),
]
FailureCode = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$", description="What went wrong, for programs.")]
RuntimeHash = Annotated[
    str, Field(pattern=r"^[0-9A-Fa-f]{64}$", description="The pinned released runtime; handed back unchanged.")
]
PayloadHash = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256, in lower-case hex, over the canonical JSON of the payload (RFC 8785).",
    ),
]
Payload = Annotated[Any, Field(description="Any JSON value; handed back unchanged.")]
Generation = Annotated[
    int, Field(ge=0, description="Which occurrence of the timer, from 0; each new one gets the next.")
]
Fence = Annotated[int, Field(ge=1, description="Grows by one at every accepted transition and never goes back.")]
Retries = Annotated[int, Field(ge=0, description="Retries used since the last start.")]
MaxRetries = Annotated[int, Field(ge=0, le=MAX_RETRIES_LIMIT, description="Retries allowed; null is without limit.")]
EpochMs = Annotated[int, Field(ge=0, description="Epoch milliseconds.")]
DueMs = Annotated[int, Field(ge=MIN_DUE_MS, le=MAX_DUE_MS, description="When it is due, in epoch milliseconds.")]
Answer = Literal["complete", "retry", "fail", "cancel", "replace"]
# Lax where pydantic's strictness would ask for an enum member: on the wire they are strings.
PhaseText = Annotated[Phase, Field(strict=False, description="Where the timer stands.")]
CodeText = Annotated[Code, Field(strict=False, description="Why.")]
StatusText = Annotated[Status, Field(strict=False, description="How the command was settled.")]


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
    at: Annotated[str, Field(json_schema_extra={"format": "date-time"}), AfterValidator(_due_instant)] | None = Field(
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
    body: Annotated[str, _at_most(REJECTED_BODY_BYTES)] = Field(
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
