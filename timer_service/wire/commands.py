"""Reading commands: bytes from a publisher to a value of the domain, or a ``BadCommand`` with its code.

Bodies are read twice on purpose: once strictly (duplicate keys, numbers, surrogates, depth) for the value
that is hashed, once by msgspec for the typed fields and the payload's own text, which is kept as it was sent.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from timer_service.domain.codes import Code
from timer_service.domain.identity import (
    LineageKey,
    NameKey,
    TimerRef,
    check_key_part,
    derive_timer_ref,
    is_timer_ref,
)
from timer_service.domain.model import (
    ABSENT,
    MAX_DELAY_MS,
    MAX_DUE_MS,
    MIN_DUE_MS,
    AnyCommand,
    Cancel,
    Complete,
    Due,
    Fail,
    JsonText,
    Order,
    Retry,
    Start,
)
from timer_service.wire.bodies import (
    CancelBody,
    CommandBody,
    CompleteBody,
    DueBody,
    EdgesBody,
    FailBody,
    KeyBody,
    RetryBody,
    StartBody,
)
from timer_service.wire.canonical import MalformedJson, canonical_json, sha256_hex, strict_loads
from timer_service.wire.instants import parse_instant_ms

COMMAND_VERSION = 1
MAX_BODY_BYTES = 256 * 1024
MAX_TEXT_BYTES = 1024
MAX_EDGE_BYTES = 256
MAX_RETRIES_LIMIT = 2**63 - 1
MAX_WAIT_MS = 10_000
DEFAULT_WAIT_MS = 5_000
MAX_MESSAGE_CHARS = 500

Kind = Literal["start", "retry", "complete", "fail", "cancel"]
KINDS: tuple[Kind, ...] = ("start", "retry", "complete", "fail", "cancel")

_COMMAND_ID = re.compile(r"[\x20-\x7e]{1,128}")
_FAILURE_CODE = re.compile(r"[a-z0-9_]{1,64}")
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


class BadCommand(Exception):
    """A command that can't be read. ``command_id`` and ``timer_ref`` are set as far as they were readable.

    The message may quote what was sent, so it is cut: a refusal must not be as large as what it refuses.
    """

    def __init__(self, code: Code, message: str) -> None:
        message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"
        super().__init__(message)
        self.code = code
        self.message = message
        self.command_id: str | None = None
        self.timer_ref: str | None = None


_BODIES: dict[Kind, type[CommandBody]] = {
    "start": StartBody,
    "retry": RetryBody,
    "complete": CompleteBody,
    "fail": FailBody,
    "cancel": CancelBody,
}
_DECODERS = {kind: msgspec.json.Decoder(body) for kind, body in _BODIES.items()}
_EDGES = msgspec.json.Decoder(EdgesBody)
_encode = msgspec.json.Encoder().encode


def _encode_raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


class Envelope(msgspec.Struct, frozen=True):
    """What the broker knows of a stored command."""

    order: Order
    accepted_at_ms: int


@lru_cache(maxsize=64)
def subject_kind(subject: str) -> tuple[Kind | None, int | None]:
    """Kind and version named by a command subject; None for what is not known."""
    tokens = subject.split(".")
    if len(tokens) != 4:
        return None, None
    kind = tokens[2] if tokens[2] in _BODIES else None
    version = tokens[3][1:]
    known = tokens[3][:1] == "v" and _NUMBER.fullmatch(version) is not None
    return kind, int(version) if known else None


def read_command(subject: str, body: bytes, envelope: Envelope) -> AnyCommand:
    """The command in ``body``. Raises BadCommand; never anything else, whatever the bytes are."""
    kind, version = subject_kind(subject)
    if kind is None or version is None:
        raise BadCommand(Code.MALFORMED, "the subject names no known kind of command")
    if version != COMMAND_VERSION:
        raise BadCommand(Code.UNSUPPORTED_VERSION, f"version {version} of {kind} is not known; 1 is")
    if len(body) > MAX_BODY_BYTES:
        raise BadCommand(Code.TOO_LARGE, f"the body has {len(body)} bytes; {MAX_BODY_BYTES} is the limit")
    fields = _object(body)
    try:
        return _read_fields(kind, fields, body, envelope)
    except BadCommand as bad:
        bad.command_id = _readable_id(fields)
        bad.timer_ref = _readable_ref(fields)
        raise


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = strict_loads(body)
    except MalformedJson as error:
        raise BadCommand(Code.MALFORMED, str(error)) from None
    if not isinstance(value, dict):
        raise BadCommand(Code.MALFORMED, "the body is not a JSON object")
    return value


def _read_fields(kind: Kind, fields: dict[str, Any], body: bytes, envelope: Envelope) -> AnyCommand:
    version = fields.get("v")
    if type(version) is int and version != COMMAND_VERSION:
        raise BadCommand(Code.UNSUPPORTED_VERSION, f"v is not {COMMAND_VERSION}, the one version known")
    try:
        read = _DECODERS[kind].decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadCommand(Code.MALFORMED, str(error)) from None
    if not _COMMAND_ID.fullmatch(read.command_id):
        raise BadCommand(Code.MALFORMED, "command_id is not 1 to 128 printable ASCII characters")
    match read:
        case StartBody():
            return _start(read, fields.get("payload"), envelope)
        case CancelBody():
            return _cancel(read, envelope)
        case _:
            return _feedback(kind, read, envelope)


# -- start --------------------------------------------------------------------------------------------------


def _start(read: StartBody, payload: object, envelope: Envelope) -> Start:
    key = timer_key(read.timer)
    lineage = isinstance(key, LineageKey)
    edges = _edges(read.edges, lineage)
    payload_sha256 = sha256_hex(canonical_json(payload))
    if read.payload_sha256 is not None and read.payload_sha256 != payload_sha256:
        raise BadCommand(Code.HASH_MISMATCH, f"payload_sha256 does not match; the payload's is {payload_sha256}")
    return Start(
        command_id=read.command_id,
        timer_ref=derive_timer_ref(key),
        content=_content("start", replace(read, payload=_encode_raw(payload_sha256), edges=_encode_raw(edges))),
        order=envelope.order,
        accepted_at_ms=envelope.accepted_at_ms,
        timer=JsonText(_encode(key)),
        lineage=lineage,
        replace=_replaces(read.if_exists, lineage),
        due=_due(read.due),
        max_retries=_max_retries(read.max_retries),
        payload=read.payload,
        payload_sha256=payload_sha256,
        edges=ABSENT if edges is None else read.edges,
        runtime_sha256=_runtime(read.runtime_sha256, lineage),
    )


def timer_key(body: KeyBody) -> LineageKey | NameKey:
    """The key of ``body`` with its namespace filled in. Raises BadCommand(malformed)."""
    lineage = (body.flow_id, body.flow_version, body.root_execution_id, body.node_id)
    key: LineageKey | NameKey
    if body.name is not None and not any(part is not None for part in lineage):
        key = NameKey(body.name, "default" if body.namespace is None else body.namespace)
    elif body.name is None and body.namespace is None and None not in lineage:
        key = LineageKey(*lineage)  # type: ignore[arg-type]
    else:
        raise BadCommand(
            Code.MALFORMED,
            "timer must have flow_id, flow_version, root_execution_id and node_id, or name (and namespace)",
        )
    for field in key.__struct_fields__:
        reason = check_key_part(getattr(key, field))
        if reason is not None:
            raise BadCommand(Code.MALFORMED, f"timer.{field}: {reason}")
    return key


def _replaces(if_exists: str | None, lineage: bool) -> bool:
    return not lineage if if_exists is None else if_exists == "replace"


def _max_retries(value: int | msgspec.UnsetType | None) -> int | None:
    if isinstance(value, msgspec.UnsetType):
        return 0
    if value is None or 0 <= value <= MAX_RETRIES_LIMIT:
        return value
    raise BadCommand(Code.MALFORMED, f"max_retries is not an integer from 0 to {MAX_RETRIES_LIMIT}, or null")


def _edges(raw: msgspec.Raw, lineage: bool) -> EdgesBody | None:
    if bytes(raw) == b"null":
        return None
    if not lineage:
        raise BadCommand(Code.MALFORMED, "edges belong to lineage timers only")
    try:
        edges = _EDGES.decode(raw)
    except msgspec.MsgspecError as error:
        raise BadCommand(Code.MALFORMED, f"edges: {error}") from None
    for name in edges.__struct_fields__:
        _edge(name, getattr(edges, name))
    return edges


def _edge(name: str, value: str | None) -> None:
    if value == "":
        raise BadCommand(Code.MALFORMED, f"edges.{name} is empty")
    _limit(f"edges.{name}", value, MAX_EDGE_BYTES)


def _runtime(value: str | None, lineage: bool) -> str | None:
    if value is None:
        return None
    if not lineage:
        raise BadCommand(Code.MALFORMED, "runtime_sha256 belongs to lineage timers only")
    if not _SHA256.fullmatch(value):
        raise BadCommand(Code.MALFORMED, "runtime_sha256 is not 64 hex digits")
    return value


# -- cancel and feedback ------------------------------------------------------------------------------------


def _cancel(read: CancelBody, envelope: Envelope) -> Cancel:
    wait_ms = DEFAULT_WAIT_MS if read.wait_ms is None else read.wait_ms
    if not 0 <= wait_ms <= MAX_WAIT_MS:
        raise BadCommand(Code.MALFORMED, f"wait_ms is not within 0 to {MAX_WAIT_MS}")
    if read.generation is not None:
        _at_least("generation", read.generation, 0)
    return Cancel(
        command_id=read.command_id,
        timer_ref=_timer_ref(read.timer_ref),
        content=_content("cancel", read),
        order=envelope.order,
        accepted_at_ms=envelope.accepted_at_ms,
        generation=read.generation,
        reason=_limit("reason", read.reason, MAX_TEXT_BYTES),
        wait_ms=wait_ms,
    )


def _feedback(kind: Kind, read: Any, envelope: Envelope) -> AnyCommand:
    _at_least("generation", read.generation, 0)
    _at_least("fence", read.fence, 1)
    common = {
        "command_id": read.command_id,
        "timer_ref": _timer_ref(read.timer_ref),
        "content": _content(kind, read),
        "order": envelope.order,
        "accepted_at_ms": envelope.accepted_at_ms,
        "generation": read.generation,
        "fence": read.fence,
    }
    match read:
        case RetryBody():
            return Retry(**common, due=None if read.due is None else _due(read.due))
        case FailBody():
            if not _FAILURE_CODE.fullmatch(read.failure_code):
                raise BadCommand(Code.MALFORMED, "failure_code is not 1 to 64 of a-z, 0-9 and _")
            message = _limit("message", read.message, MAX_TEXT_BYTES)
            return Fail(**common, failure_code=read.failure_code, message=message)
        case _:
            return Complete(**common)


# -- fields that several share ------------------------------------------------------------------------------


def _due(body: DueBody | None) -> Due:
    forms = () if body is None else [f for f in (body.delay_ms, body.at, body.at_ms) if f is not None]
    if body is None or len(forms) != 1:
        raise BadCommand(Code.INVALID_DUE, "due must have exactly one of delay_ms, at and at_ms")
    if body.delay_ms is not None:
        if not 1 <= body.delay_ms <= MAX_DELAY_MS:
            raise BadCommand(Code.INVALID_DUE, f"delay_ms is not within 1 to {MAX_DELAY_MS} (100 years)")
        return Due(delay_ms=body.delay_ms)
    return Due(at_ms=_instant(body))


def _instant(body: DueBody) -> int:
    try:
        at_ms = body.at_ms if body.at is None else parse_instant_ms(body.at)
    except ValueError as error:
        raise BadCommand(Code.INVALID_DUE, f"due.at: {error}") from None
    if at_ms is None or not MIN_DUE_MS <= at_ms <= MAX_DUE_MS:
        raise BadCommand(Code.INVALID_DUE, "the instant is not within 1970-01-01 and 2200-01-01T00:00:00Z")
    return at_ms


def _timer_ref(text: str) -> TimerRef:
    if not is_timer_ref(text):
        raise BadCommand(Code.MALFORMED, "timer_ref is not 26 characters of a-z and 2-7")
    return TimerRef(text)


def _limit(name: str, text: str | None, limit: int) -> str | None:
    if text is not None and (size := len(text.encode())) > limit:
        raise BadCommand(Code.TOO_LARGE, f"{name} has {size} bytes; {limit} is the limit")
    return text


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BadCommand(Code.MALFORMED, f"{name} is less than {least}")


def _content(kind: Kind, read: CommandBody) -> str:
    """A hash of what was sent: the kind and all fields but the id. Half of a SHA-256 tells contents apart.

    Taken over the fields as they were read, so spelling and order of the JSON do not matter, and null counts as
    absent (but in ``max_retries``, where it has a meaning of its own). Fields that a later version adds must be
    omitted when absent, so that what is stored stays comparable.
    """
    return sha256_hex(kind.encode() + _encode(replace(read, command_id="")))[:32]


def _readable_id(fields: dict[str, Any]) -> str | None:
    value = fields.get("command_id")
    return value if isinstance(value, str) and _COMMAND_ID.fullmatch(value) else None


def _readable_ref(fields: dict[str, Any]) -> str | None:
    value = fields.get("timer_ref")
    if isinstance(value, str) and is_timer_ref(value):
        return value
    try:
        return derive_timer_ref(timer_key(msgspec.convert(fields.get("timer"), KeyBody)))
    except (BadCommand, msgspec.ValidationError):
        return None
