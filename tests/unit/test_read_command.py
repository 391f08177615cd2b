"""Which commands are refused on sight, and with which code: the table of the contract, section 3."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.support.commands import ENVELOPE, LINEAGE, NAME, REF, body_of, fields_of, read
from timer_service.domain.codes import Code
from timer_service.domain.identity import LineageKey, derive_timer_ref
from timer_service.domain.model import ABSENT, MAX_DELAY_MS, MAX_DUE_MS, Cancel, Complete, Due, Fail, Retry, Start
from timer_service.wire.canonical import payload_sha256
from timer_service.wire.commands import KINDS, MAX_BODY_BYTES, BadCommand, Kind, read_command
from timer_service.wire.instants import format_instant, parse_instant_ms

A_HASH = "0123456789abcdef" * 4
FEEDBACK: tuple[Kind, ...] = ("retry", "complete", "fail")


def started(**changes: Any) -> Start:
    command = read("start", body_of("start", **changes))
    assert isinstance(command, Start)
    return command


def refused(kind: str, body: bytes) -> BadCommand:
    with pytest.raises(BadCommand) as caught:
        read(kind, body)
    return caught.value


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────

NOT_JSON: dict[str, bytes] = {
    "an empty body": b"",
    "broken JSON": b'{"v": 1',
    "no object": b"[]",
    "null": b"null",
    "a string": b'"start"',
    "two objects": b"{} {}",
    "not UTF-8": b'{"v": 1, "command_id": "\xff"}',
    "UTF-16": json.dumps(fields_of("start")).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + body_of("start"),
    "a duplicate key": body_of("start")[:-1] + b', "v": 1}',
    "a duplicate key in the payload": body_of("start")[:-1] + b', "payload": {"a": 1, "a": 1}}',
    "NaN": body_of("start")[:-1] + b', "payload": NaN}',
    "Infinity": body_of("start")[:-1] + b', "payload": [-Infinity]}',
    "a number beyond a double": body_of("start")[:-1] + b', "payload": 1e400}',
    "a lone surrogate": body_of("start")[:-1] + b', "payload": "\\ud800"}',
    "a lone surrogate in a key part": body_of("start", timer={"name": "\ud800"}),
    "nested too deep": body_of("start")[:-1] + b', "payload": ' + b"[" * 300 + b"]" * 300 + b"}",
    "all brackets": b"[" * 200_000,
    "integers of a thousand digits in a field": body_of("start", due=...)[:-1]
    + b', "due": {"at_ms": %s}}' % (b"9" * 5000),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_what_is_not_one_strict_json_object_is_malformed(kind: Kind, body: bytes):
    """Whatever the kind: broken JSON, and JSON that two readers could understand differently."""
    assert refused(kind, body).code is Code.MALFORMED


def each(kinds: tuple[Kind, ...], field: str, *values: Any) -> list[tuple[Kind, dict[str, Any]]]:
    """``field`` set to each of ``values``, for each kind."""
    return [(kind, {field: value}) for kind in kinds for value in values]


def of_lineage(field: str, *values: Any) -> list[tuple[Kind, dict[str, Any]]]:
    return [("start", {"timer": LINEAGE, field: value}) for value in values]


def of_name(part: str, *values: Any) -> list[tuple[Kind, dict[str, Any]]]:
    return [("start", {"timer": {"name": "a", part: value}}) for value in values]


START: tuple[Kind, ...] = ("start",)
BAD_PARTS = ("", "a\n", "\0", "\x7f", "\x85", "x" * 257, "é" * 129)
MALFORMED: list[tuple[Kind, dict[str, Any]]] = [
    *each(KINDS, "v", ..., None, True, "1", 1.0, 2.0, [1]),
    *each(KINDS, "command_id", ..., None, "", 7, "x" * 129, "é", "a\nb", "\x7f"),
    *each(KINDS, "unknown", 1, None),
    *((kind, {"timer_ref": REF, "timer": NAME}) for kind in KINDS),
    *each(START, "timer", ..., None, "order-42", {}, [NAME]),
    *of_name("name", None, 42, *BAD_PARTS),
    *of_name("namespace", 42, *BAD_PARTS),
    *of_name("unknown", None, "a"),
    *of_name("flow_id", "f"),
    *each(START, "timer", {"namespace": "a"}, {**LINEAGE, "name": "a"}, {**LINEAGE, "namespace": "a"}),
    *(("start", {"timer": {**LINEAGE, part: bad}}) for part in LINEAGE for bad in (None, 7, "", "a\0", "x" * 257)),
    *each(START, "due", 1_000, "PT1S", [1], {"in": 5}, {"delay_ms": 5, "unknown": None}),
    *each(START, "due", *({form: bad} for form in ("delay_ms", "at_ms") for bad in (True, "5", 5.0, 1.5, 1e3, [5]))),
    *each(START, "due", {"at": 5}, {"at": True}, {"at": ["2030-01-01T00:00:00Z"]}),
    *each(START, "max_retries", -1, True, "1", 1.0, [], 2**63),
    *each(START, "payload_sha256", 5, True, []),
    *each(START, "if_exists", "Replace", "", True, 1),
    *each(START, "edges", {"start": "a", "elapsed": "b"}, {}),  # a named timer has no edges
    *each(START, "runtime_sha256", A_HASH),  # nor a runtime
    *of_lineage("edges", {}, [], "a", 1, False, {"start": "a"}, {"elapsed": "b"}, {"start": "a", "elapsed": None}),
    *of_lineage("edges", {"start": "", "elapsed": "b"}, {"start": "a", "elapsed": ""}, {"start": "a", "elapsed": 1}),
    *of_lineage("edges", {"start": "a", "elapsed": "b", "retry": ""}, {"start": "a", "elapsed": "b", "unknown": "c"}),
    *of_lineage("runtime_sha256", "", A_HASH[1:], A_HASH + "0", "g" + A_HASH[1:], A_HASH + "\n", 5),
    *each(
        (*FEEDBACK, "cancel"), "timer_ref", ..., None, "", 5, REF[1:], REF + "a", REF.upper(), "1" + REF[1:], REF + "\n"
    ),
    *each(FEEDBACK, "generation", ..., None, -1, True, "0", 0.0),
    *each(FEEDBACK, "fence", ..., None, 0, -1, True, "1", 1.0),
    *each(("retry",), "due", 5, [], {"delay_ms": True}, {"delay_ms": "5"}, {"unknown": 5}),
    *each(("fail",), "failure_code", ..., None, "", "No", "no stock", "no-stock", "x" * 65, "é", 5, "no_stock\n"),
    *each(("fail",), "message", 5, True, []),
    *each(("cancel",), "generation", -1, True, "0", 0.0),
    *each(("cancel",), "wait_ms", -1, 10_001, True, "0", 5.0),
    *each(("cancel",), "reason", 5, True, []),
    ("cancel", {"fence": 1}),
    ("complete", {"due": {"delay_ms": 5}}),
]


@pytest.mark.parametrize(("kind", "changes"), MALFORMED, ids=lambda part: ascii(part)[:60])
def test_a_broken_schema_is_malformed(kind: Kind, changes: dict[str, Any]):
    """Missing and unknown fields, wrong types (booleans, strings and doubles are no integers), bad parts."""
    assert refused(kind, body_of(kind, **changes)).code is Code.MALFORMED


@pytest.mark.parametrize(
    "subject",
    [
        "durable_timer.commands.begin.v1",
        "durable_timer.commands.Start.v1",
        "durable_timer.commands..v1",
        "durable_timer.commands.start",
        "durable_timer.commands.start.1",
        "durable_timer.commands.start.v",
        "durable_timer.commands.start.v01",
        "durable_timer.commands.start.v1x",
        "durable_timer.commands.start.v-1",
        "durable_timer.commands.start.v٣",
        "durable_timer.commands.start.v1.more",
        "durable_timer.commands.start.v" + "1" * 5000,
    ],
)
def test_a_subject_that_names_no_command_is_malformed(subject: str):
    """Unknown kinds, and versions that are not written v and a plain number."""
    with pytest.raises(BadCommand) as caught:
        read_command(subject, body_of("start"), ENVELOPE)
    assert caught.value.code is Code.MALFORMED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 2, 999_999_999])
def test_another_version_in_the_subject(kind: Kind, version: int):
    """A version in the subject that is not 1 is unsupported, before anything else is looked at."""
    for body in (body_of(kind), b"from the future"):
        with pytest.raises(BadCommand) as caught:
            read_command(f"durable_timer.commands.{kind}.v{version}", body, ENVELOPE)
        assert caught.value.code is Code.UNSUPPORTED_VERSION


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 2, -1, 2**64])
def test_another_version_in_the_body(kind: Kind, version: int):
    """An integer ``v`` that is not 1 is unsupported, whatever the future may have done to the other fields."""
    assert refused(kind, body_of(kind, v=version)).code is Code.UNSUPPORTED_VERSION
    assert refused(kind, json.dumps({"v": version, "id": "x"}).encode()).code is Code.UNSUPPORTED_VERSION


@pytest.mark.parametrize("kind", KINDS)
def test_integers_with_more_digits_than_python_prints(kind: Kind):
    """Wherever they stand they are refused as what they are: nothing tries to print them."""
    for digits in (b"9" * 5_000, b"-" + b"9" * 5_000, b"9" * 4_300, b"-" + b"9" * 4_300):
        assert refused(kind, b'{"v": %s}' % digits).code is Code.UNSUPPORTED_VERSION
        for field in (b"generation", b"fence", b"max_retries", b"wait_ms", b"unknown"):
            body = body_of(kind, **{field.decode(): ...})[:-1] + b', "%s": %s}' % (field, digits)
            try:
                read(kind, body)
            except BadCommand as bad:
                assert bad.code is Code.MALFORMED  # noqa: PT017 - some are taken: a generation has no upper bound


def padded(kind: Kind, size: int) -> bytes:
    """A valid body of exactly ``size`` bytes, in which characters and bytes differ in number."""
    fields = fields_of(kind)
    if kind == "start":
        fields["payload"] = "é"
    text = json.dumps(fields, ensure_ascii=False)
    return (text + " " * (size - len(text.encode()))).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_256_kib_are_taken_and_one_byte_more_is_too_large(kind: Kind):
    """The limit counts bytes, not characters, and is inclusive."""
    assert MAX_BODY_BYTES == 262_144
    assert read(kind, padded(kind, MAX_BODY_BYTES)).command_id == "c-1"
    assert refused(kind, padded(kind, MAX_BODY_BYTES + 1)).code is Code.TOO_LARGE


def test_too_large_is_said_of_any_bytes():
    """A body past the limit is refused for its size alone; nobody reads it."""
    assert refused("start", b"\xff" * (MAX_BODY_BYTES + 1)).code is Code.TOO_LARGE


TEXT_FIELDS: list[tuple[Kind, str, int]] = [("fail", "message", 1_024), ("cancel", "reason", 1_024)]


@pytest.mark.parametrize(("kind", "field", "limit"), TEXT_FIELDS)
@pytest.mark.parametrize("unit", ["x", "é", "€", "\U0001f600"])
def test_text_fields_are_limited_in_bytes(kind: Kind, field: str, limit: int, unit: str):
    """1,024 bytes of UTF-8 pass, one more is too large, however many characters they are."""
    fits = unit * (limit // len(unit.encode()))
    fits += "x" * (limit - len(fits.encode()))
    assert getattr(read(kind, body_of(kind, **{field: fits})), field) == fits
    assert refused(kind, body_of(kind, **{field: fits + "x"})).code is Code.TOO_LARGE


@pytest.mark.parametrize("edge", ["start", "elapsed", "retry"])
def test_edges_are_limited_in_bytes(edge: str):
    """256 bytes pass, 257 are too large."""
    edges = {"start": "a", "elapsed": "b"}
    assert started(timer=LINEAGE, edges={**edges, edge: "é" * 128}).lineage
    body = body_of("start", timer=LINEAGE, edges={**edges, edge: "é" * 128 + "x"})
    assert refused("start", body).code is Code.TOO_LARGE


INVALID_DUE: dict[str, Any] = {
    "absent": ...,
    "null": None,
    "no form": {},
    "only null": {"delay_ms": None, "at": None, "at_ms": None},
    "two forms": {"delay_ms": 5, "at_ms": 5},
    "all forms": {"delay_ms": 5, "at": "2030-01-01T00:00:00Z", "at_ms": 5},
    "zero": {"delay_ms": 0},
    "negative": {"delay_ms": -1},
    "over 100 years": {"delay_ms": MAX_DELAY_MS + 1},
    "delay 2^63": {"delay_ms": 2**63},
    "delay -9e15": {"delay_ms": -9_000_000_000_000_000},
    "before 1970": {"at_ms": -1},
    "after 2200": {"at_ms": MAX_DUE_MS + 1},
    "microseconds": {"at_ms": 1_700_000_000_000_000},
    "2^53+1": {"at_ms": 2**53 + 1},
    "2^63": {"at_ms": 2**63},
    "2^64": {"at_ms": 2**64},
    "-9e15": {"at_ms": -9_000_000_000_000_000},
    "no offset": {"at": "2030-01-01T00:00:00"},
    "date only": {"at": "2030-01-01"},
    "a space for the T": {"at": "2030-01-01 00:00:00Z"},
    "no seconds": {"at": "2030-01-01T00:00Z"},
    "second 60": {"at": "2016-12-31T23:59:60Z"},
    "minute 60": {"at": "2030-01-01T00:60:00Z"},
    "hour 24": {"at": "2030-01-01T24:00:00Z"},
    "30 February": {"at": "2030-02-30T00:00:00Z"},
    "29 February of 2100": {"at": "2100-02-29T00:00:00Z"},
    "month 13": {"at": "2030-13-01T00:00:00Z"},
    "year 0": {"at": "0000-01-01T00:00:00Z"},
    "year 1969": {"at": "1969-12-31T23:59:59.999Z"},
    "year 9999": {"at": "9999-12-31T23:59:59Z"},
    "year 10000": {"at": "10000-01-01T00:00:00Z"},
    "a moment after 2200": {"at": "2200-01-01T00:00:00.0000001Z"},
    "before 1970 by its offset": {"at": "1970-01-01T00:59:59+01:00"},
    "after 2200 by its offset": {"at": "2200-01-01T00:00:00-00:01"},
    "offset without colon": {"at": "2030-01-01T00:00:00+0100"},
    "offset of 24 hours": {"at": "2030-01-01T00:00:00+24:00"},
    "offset of 60 minutes": {"at": "2030-01-01T00:00:00+01:60"},
    "no digits after the point": {"at": "2030-01-01T00:00:00.Z"},
    "other digits": {"at": "٢٠٣٠-01-01T00:00:00Z"},
    "space around": {"at": " 2030-01-01T00:00:00Z"},
    "a newline at the end": {"at": "2030-01-01T00:00:00Z\n"},
    "empty": {"at": ""},
    "words": {"at": "tomorrow"},
    "very long": {"at": "2" * 100_000},
}


@pytest.mark.parametrize("due", INVALID_DUE.values(), ids=INVALID_DUE.keys())
def test_invalid_due(due: Any):
    """Absent where needed, zero, negative, out of range, unreadable, without offset, not exactly one form."""
    assert refused("start", body_of("start", due=due)).code is Code.INVALID_DUE
    if due not in (..., None):
        assert refused("retry", body_of("retry", due=due)).code is Code.INVALID_DUE


def test_a_payload_with_another_hash():
    """``payload_sha256`` must be the lower-case hash of the canonical payload; absent payload counts as null."""
    assert refused("start", body_of("start", payload={"a": 1}, payload_sha256=A_HASH)).code is Code.HASH_MISMATCH
    right = payload_sha256({"a": 1})
    assert refused("start", body_of("start", payload={"a": 1}, payload_sha256=right.upper())).code is Code.HASH_MISMATCH
    assert refused("start", body_of("start", payload={"a": 1}, payload_sha256="")).code is Code.HASH_MISMATCH
    assert refused("start", body_of("start", payload={"a": 2}, payload_sha256=right)).code is Code.HASH_MISMATCH
    assert started(payload={"a": 1}, payload_sha256=right).payload_sha256 == right
    null = hashlib.sha256(b"null").hexdigest()
    assert started(payload_sha256=null).payload_sha256 == started(payload=None).payload_sha256 == null


# ── what a refusal tells ────────────────────────────────────────────────────────────────────────────────────


def test_a_refusal_names_what_was_readable():
    """The command id and the timer are told where they can be read, else null."""
    bad = refused("start", body_of("start", due=None))
    assert (bad.command_id, bad.timer_ref) == ("c-1", REF)
    bad = refused("cancel", body_of("cancel", command_id="é"))
    assert (bad.command_id, bad.timer_ref) == (None, REF)
    bad = refused("complete", body_of("complete", timer_ref="?", v=9))
    assert (bad.command_id, bad.timer_ref) == ("c-1", None)
    bad = refused("start", body_of("start", timer={"name": ""}))
    assert (bad.command_id, bad.timer_ref) == ("c-1", None)
    bad = refused("start", b"{")
    assert (bad.command_id, bad.timer_ref) == (None, None)


@pytest.mark.parametrize(
    "changes",
    [{"x" * 200_000: 1}, {"if_exists": "y" * 200_000}, {"due": {"z" * 200_000: 1}}],
    ids=["field", "enum", "due"],
)
def test_a_refusal_is_short(changes: dict[str, Any]):
    """What was sent may be quoted, but not at length."""
    bad = refused("start", body_of("start", **changes))
    assert len(bad.message) == len(str(bad)) == 500


# ── what is taken, and what it becomes ──────────────────────────────────────────────────────────────────────


def test_a_start_of_a_name():
    """Defaults: the namespace is filled in, a living timer is replaced, no retries, a null payload."""
    start = started()
    assert json.loads(bytes(start.timer)) == {"name": "order-42", "namespace": "default"}
    assert start.timer_ref == REF
    assert (start.lineage, start.replace, start.max_retries, bytes(start.payload)) == (False, True, 0, b"null")
    assert (start.edges, start.runtime_sha256, start.due) == (ABSENT, None, Due(delay_ms=1_000))
    assert (start.order, start.accepted_at_ms) == (ENVELOPE.order, ENVELOPE.accepted_at_ms)


def test_a_start_of_a_lineage():
    """A living lineage is not replaced unless asked for; edges and runtime are kept as they were sent."""
    edges = {"start": "e1", "elapsed": "e2", "retry": None}
    start = started(timer=LINEAGE, edges=edges, runtime_sha256=A_HASH.upper())
    assert start.timer_ref == derive_timer_ref(LineageKey(**LINEAGE))
    assert json.loads(bytes(start.timer)) == LINEAGE
    assert (start.lineage, start.replace, start.runtime_sha256) == (True, False, A_HASH.upper())
    assert not isinstance(start.edges, type(ABSENT))
    assert json.loads(bytes(start.edges)) == edges


@pytest.mark.parametrize("timer", [NAME, LINEAGE], ids=["name", "lineage"])
def test_if_exists(timer: dict[str, str]):
    """Either kind of key may ask for either way; null is the default of its kind."""
    assert started(timer=timer, if_exists="replace").replace is True
    assert started(timer=timer, if_exists="reject").replace is False
    assert started(timer=timer, if_exists=None).replace is started(timer=timer).replace is (timer is NAME)


@pytest.mark.parametrize(("sent", "read_as"), [(..., 0), (None, None), (0, 0), (7, 7), (2**63 - 1, 2**63 - 1)], ids=str)
def test_max_retries(sent: Any, read_as: int | None):
    """Absent is one-shot, null is without limit."""
    assert started(max_retries=sent).max_retries == read_as


@pytest.mark.parametrize(
    "part", ["x", "x" * 256, "é" * 128, " ", "a b", "*", ">", "..", ".a", "\u00a0", "\u00c9", "E\u0301"]
)
def test_key_parts_are_taken_as_they_are(part: str):
    """1 to 256 bytes without control characters, wildcards and spaces included; nothing is normalised."""
    start = started(timer={"name": part, "namespace": part})
    assert json.loads(bytes(start.timer)) == {"name": part, "namespace": part}
    assert json.loads(bytes(started(timer=dict.fromkeys(LINEAGE, part)).timer)) == dict.fromkeys(LINEAGE, part)


@pytest.mark.parametrize("command_id", ["a", "x" * 128, " ", "~", "a b*>.", '"\\'])
def test_command_ids(command_id: str):
    """1 to 128 printable ASCII characters."""
    for kind in KINDS:
        assert read(kind, body_of(kind, command_id=command_id)).command_id == command_id


@pytest.mark.parametrize("delay_ms", [1, 1_000, MAX_DELAY_MS])
def test_delays(delay_ms: int):
    """From one millisecond to exactly 100 years."""
    assert started(due={"delay_ms": delay_ms, "at": None}).due == Due(delay_ms=delay_ms)
    assert read("retry", body_of("retry", due={"delay_ms": delay_ms})).due == Due(delay_ms=delay_ms)  # type: ignore[union-attr]


@pytest.mark.parametrize("at_ms", [0, 1, 1_700_000_000_000, MAX_DUE_MS])
def test_instants_in_milliseconds(at_ms: int):
    """From 1970 to 2200, both included; the same instant as text means the same."""
    assert started(due={"at_ms": at_ms}).due == Due(at_ms=at_ms)
    assert started(due={"at": format_instant(at_ms)}).due == Due(at_ms=at_ms)


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1969-12-31T23:59:59.9991Z", 0),
        ("1970-01-01T00:00:00-00:00", 0),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1969-12-31T19:00:00-05:00", 0),
        ("1970-01-01T00:00:00.001Z", 1),
        ("1970-01-01T00:00:00.0001Z", 1),
        ("1970-01-01T00:00:00.0010000Z", 1),
        ("1970-01-01T00:00:00.0010001Z", 2),
        ("1970-01-01T00:00:00.9990000000000000000001Z", 1_000),
        ("1970-01-01T00:00:59.999999Z", 60_000),
        ("1970-01-01t00:00:00.1z", 100),
        ("2000-02-29T12:34:56.789+23:59", 951_827_696_789 - 86_340_000),
        ("2199-12-31T23:59:59.9999Z", MAX_DUE_MS),
        ("2200-01-01T00:00:00.000Z", MAX_DUE_MS),
        ("2200-01-01T12:00:00+12:00", MAX_DUE_MS),
    ],
)
def test_instants_as_text(text: str, at_ms: int):
    """RFC 3339 with any offset; what is finer than a millisecond rounds up, so that nothing is early."""
    assert started(due={"at": text}).due == Due(at_ms=at_ms)


def test_instants_as_text_are_read_as_they_are_written():
    """Formatting an instant and reading it again gives the same instant."""
    for at_ms in (0, 1, 999, 1_000, 951_782_400_000, 1_700_000_000_123, MAX_DUE_MS):
        assert parse_instant_ms(format_instant(at_ms)) == at_ms


def test_feedback_and_cancel_keep_their_fields():
    """Numbers and texts come through as they were sent; what is absent has its default."""
    complete = read("complete", body_of("complete", generation=3, fence=9))
    assert isinstance(complete, Complete)
    assert (complete.timer_ref, complete.generation, complete.fence) == (REF, 3, 9)
    retry = read("retry", body_of("retry"))
    assert isinstance(retry, Retry)
    assert retry.due is None
    fail = read("fail", body_of("fail", failure_code="x" * 64, message=None))
    assert isinstance(fail, Fail)
    assert (fail.failure_code, fail.message) == ("x" * 64, None)
    cancel = read("cancel", body_of("cancel"))
    assert isinstance(cancel, Cancel)
    assert (cancel.generation, cancel.reason, cancel.wait_ms) == (None, None, 5_000)


@pytest.mark.parametrize(("sent", "read_as"), [(..., 5_000), (None, 5_000), (0, 0), (10_000, 10_000)], ids=str)
def test_wait_ms(sent: Any, read_as: int):
    """0 to 10,000 ms; 5,000 when nothing is said."""
    cancel = read("cancel", body_of("cancel", wait_ms=sent))
    assert isinstance(cancel, Cancel)
    assert cancel.wait_ms == read_as


@pytest.mark.parametrize(
    "text",
    [b"1.0", b"-0.0", b"1e2", b"1" * 30, b"9" * 5000, b'"\\u00e9"', b'{ "b" : 1, "a" : [ ] }'],
    ids=lambda text: text.decode()[:24],
)
def test_payloads_keep_their_own_text(text: bytes):
    """A payload is carried as its sender wrote it, value for value; the hash is over its canonical spelling."""
    body = body_of("start")[:-1] + b', "payload": ' + text + b"}"
    command = read("start", body)
    assert isinstance(command, Start)
    assert bytes(command.payload) == text


# ── the content that makes a repetition a duplicate ─────────────────────────────────────────────────────────


def content(kind: Kind, **changes: Any) -> str:
    return read(kind, body_of(kind, **changes)).content


@pytest.mark.parametrize("kind", KINDS)
def test_content_does_not_depend_on_spelling(kind: Kind):
    """Key order and white space do not matter, nor does the command id."""
    changes: dict[str, Any] = {"payload": {"b": [1, 2.5], "a": None}} if kind == "start" else {}
    fields = fields_of(kind, **changes)
    turned = dict(reversed(fields.items()))
    if kind == "start":
        turned["payload"] = {"a": None, "b": [1, 2.5]}
    other = json.dumps(turned, indent=3).encode()
    assert read(kind, other).content == content(kind, **changes)
    assert content(kind, command_id="another") == content(kind)


CHANGED: list[tuple[Kind, dict[str, Any], dict[str, Any]]] = [
    ("start", {}, {"timer": {"name": "order-43"}}),
    ("start", {}, {"timer": {**NAME, "namespace": "other"}}),
    ("start", {}, {"due": {"delay_ms": 1_001}}),
    ("start", {"due": {"at_ms": 5}}, {"due": {"delay_ms": 5}}),
    ("start", {}, {"max_retries": 1}),
    ("start", {}, {"max_retries": None}),
    ("start", {}, {"payload": 0}),
    ("start", {"payload": {"a": None}}, {"payload": {}}),
    ("start", {"payload": [1, 2]}, {"payload": [2, 1]}),
    ("start", {}, {"if_exists": "reject"}),
    ("start", {"timer": LINEAGE}, {"timer": LINEAGE, "runtime_sha256": A_HASH}),
    ("start", {"timer": LINEAGE}, {"timer": LINEAGE, "edges": {"start": "a", "elapsed": "b"}}),
    (
        "start",
        {"timer": LINEAGE, "edges": {"start": "a", "elapsed": "b"}},
        {"timer": LINEAGE, "edges": {"start": "b", "elapsed": "a"}},
    ),
    ("cancel", {}, {"generation": 0}),
    ("cancel", {}, {"reason": ""}),
    ("cancel", {}, {"wait_ms": 0}),
    ("cancel", {}, {"timer_ref": "a" * 26}),
    *((kind, {}, {"generation": 1}) for kind in FEEDBACK),
    *((kind, {}, {"fence": 3}) for kind in FEEDBACK),
    ("retry", {}, {"due": {"delay_ms": 1}}),
    ("fail", {}, {"failure_code": "other"}),
    ("fail", {}, {"message": "x"}),
]


@pytest.mark.parametrize(("kind", "before", "after"), CHANGED, ids=lambda part: ascii(part)[:50])
def test_any_changed_field_changes_the_content(kind: Kind, before: dict[str, Any], after: dict[str, Any]):
    """A reused command id with another content is told from a repetition."""
    assert content(kind, **before) != content(kind, **after)


def test_the_kind_belongs_to_the_content():
    """The same fields as another kind are another content."""
    assert content("complete") != content("retry")


@pytest.mark.parametrize(
    ("kind", "absent", "null"),
    [
        ("start", {}, dict.fromkeys(("payload", "payload_sha256", "edges", "runtime_sha256", "if_exists"))),
        ("start", {}, {"due": {"delay_ms": 1_000, "at": None, "at_ms": None}}),
        ("start", {}, {"timer": {**NAME, "namespace": None}}),
        (
            "start",
            {"timer": LINEAGE, "edges": {"start": "a", "elapsed": "b"}},
            {"timer": LINEAGE, "edges": {"start": "a", "elapsed": "b", "retry": None}},
        ),
        ("retry", {}, {"due": None}),
        ("fail", {}, {"message": None}),
        ("cancel", {}, {"generation": None, "reason": None, "wait_ms": None}),
    ],
    ids=["start", "due", "timer", "edges", "retry", "fail", "cancel"],
)  # fmt: skip
def test_absent_and_null_are_the_same_content(kind: Kind, absent: dict[str, Any], null: dict[str, Any]):
    """Optional fields may be left out or null, inside objects too; only ``max_retries`` tells the two apart."""
    assert content(kind, **absent) == content(kind, **null)
