"""What the models of messages are made of: the base of all, the way in, and the fields that several share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import KEY_PART_MAX_BYTES, check_key_part
from timer_service.domain.model import MAX_DUE_MS, MIN_DUE_MS, Phase
from timer_service.wire.canonical import strict_loads
from timer_service.wire.commands import MAX_EDGE_BYTES, MAX_RETRIES_LIMIT, MAX_TEXT_BYTES
from timer_service.wire.instants import parse_instant_ms


class Model(BaseModel):
    """Strict types, no unknown fields, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


M = TypeVar("M", bound=Model)


def read(model: type[M], data: bytes) -> M:
    """The message in ``data``. Raises ValueError: MalformedJson, or pydantic's ValidationError."""
    return model.model_validate(strict_loads(data))


def _key_part(text: str) -> str:
    reason = check_key_part(text)
    if reason is not None:
        raise ValueError(reason)
    return text


def at_most(limit: int) -> AfterValidator:
    def check(text: str) -> str:
        size = len(text.encode())
        if size > limit:
            raise ValueError(f"has {size} bytes of UTF-8; {limit} is the limit")
        return text

    return AfterValidator(check)


def due_instant(text: str) -> str:
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
    at_most(MAX_EDGE_BYTES),
]
Text = Annotated[
    str,
    Field(max_length=MAX_TEXT_BYTES, description=f"Free text of up to {MAX_TEXT_BYTES} bytes of UTF-8."),
    at_most(MAX_TEXT_BYTES),
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
