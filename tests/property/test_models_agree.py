"""The published models and the service's own reader and writer agree: on every command, and on every record."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from tests.support.bodies import as_body, bodies, mutated
from tests.support.commands import LINEAGE, REF, body_of, read
from tests.support.lives import lives
from timer_service.domain.codes import Code, Status
from timer_service.domain.model import ABSENT, MAX_DELAY_MS, MAX_DUE_MS, Absent, Phase, Timer, Wake
from timer_service.wire import models
from timer_service.wire.canonical import strict_loads
from timer_service.wire.commands import BadCommand, Kind
from timer_service.wire.fields import Model
from timer_service.wire.fields import read as read_model
from timer_service.wire.records import (
    Removal,
    encode,
    encode_wake,
    outcome_of,
    rejection_of,
    resume_of,
    terminal_record,
)
from timer_service.wire.schemas import MESSAGES, schema_of

SCHEMAS = {name: Draft202012Validator(schema_of(name)) for name in MESSAGES}
HASH = "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"  # of null


def taken_by_reader(kind: Kind, body: bytes) -> bool:
    try:
        read(kind, body)
    except BadCommand:
        return False
    return True


def taken_by_model(kind: Kind, body: bytes) -> bool:
    try:
        read_model(models.COMMANDS[kind], body)
    except ValueError:
        return False
    return True


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────

EDGES = {"start": "a", "elapsed": "b"}
TABLE: list[tuple[Kind, dict[str, Any], bool]] = [
    *((kind, {}, True) for kind in models.COMMANDS),
    *((kind, {"unknown": None}, False) for kind in models.COMMANDS),
    *((kind, {"v": bad}, False) for kind in models.COMMANDS for bad in (0, 2, True, 1.0, "1", None, ...)),
    ("start", {"command_id": "x" * 128}, True),
    ("start", {"command_id": "x" * 129}, False),
    ("start", {"command_id": "a\n"}, False),
    ("start", {"timer": {"name": "é" * 128}}, True),
    ("start", {"timer": {"name": "é" * 128 + "x"}}, False),
    ("start", {"timer": {"name": "a\n"}}, False),
    ("start", {"timer": {"name": "a\x85"}}, False),
    ("start", {"timer": {"name": "a", "namespace": None}}, True),
    ("start", {"timer": {"name": "a", "node_id": None}}, True),
    ("start", {"timer": {"name": "a", "node_id": "b"}}, False),
    ("start", {"timer": {"name": "a", "other": None}}, False),
    ("start", {"timer": {**LINEAGE, "name": None}}, True),
    ("start", {"timer": {**LINEAGE, "namespace": "a"}}, False),
    ("start", {"timer": LINEAGE, "edges": EDGES, "runtime_sha256": "aF" * 32}, True),
    ("start", {"timer": LINEAGE, "edges": {**EDGES, "retry": None}, "runtime_sha256": None}, True),
    ("start", {"timer": LINEAGE, "edges": {**EDGES, "retry": "é" * 129}}, False),
    ("start", {"timer": LINEAGE, "runtime_sha256": "aF" * 32 + "\n"}, False),
    ("start", {"edges": EDGES}, False),
    ("start", {"runtime_sha256": "aF" * 32}, False),
    ("start", {"due": None}, False),
    ("start", {"due": {"delay_ms": 5, "at": None}}, True),
    ("start", {"due": {"delay_ms": 5, "at_ms": 5}}, False),
    ("start", {"due": {"delay_ms": True}}, False),
    *(("start", {"due": {"delay_ms": ms}}, taken) for ms, taken in ((0, False), (1, True), (MAX_DELAY_MS, True))),
    ("start", {"due": {"delay_ms": MAX_DELAY_MS + 1}}, False),
    *(("start", {"due": {"at_ms": ms}}, taken) for ms, taken in ((-1, False), (0, True), (MAX_DUE_MS, True))),
    ("start", {"due": {"at_ms": MAX_DUE_MS + 1}}, False),
    ("start", {"due": {"at": "2200-01-01T00:00:00Z"}}, True),
    ("start", {"due": {"at": "2200-01-01T00:00:00.0001Z"}}, False),
    ("start", {"due": {"at": "2030-01-01T00:00:00"}}, False),
    ("start", {"max_retries": None}, True),
    ("start", {"max_retries": 2**63}, False),
    ("start", {"payload": {"a": [1.5, 2**70, None]}}, True),
    ("start", {"payload_sha256": HASH}, True),
    ("start", {"payload_sha256": HASH.upper()}, False),
    ("start", {"payload": 1, "payload_sha256": HASH}, False),
    ("cancel", {"wait_ms": 10_000, "generation": 0, "reason": "é" * 512}, True),
    ("cancel", {"reason": "é" * 512 + "x"}, False),
    ("cancel", {"wait_ms": 10_001}, False),
    ("retry", {"due": None}, True),
    ("retry", {"due": {}}, False),
    ("fail", {"failure_code": "x" * 64, "message": None}, True),
    ("fail", {"failure_code": "x" * 65}, False),
    ("fail", {"failure_code": "No"}, False),
    ("complete", {"fence": 0}, False),
    ("complete", {"fence": 10**400, "generation": 2**64}, True),
    ("complete", {"fence": 2.0}, False),
]


@pytest.mark.parametrize(("kind", "changes", "verdict"), TABLE, ids=lambda part: ascii(part)[:60])
def test_models_and_reader_judge_alike(kind: Kind, changes: dict[str, Any], verdict: bool):
    """Each body is taken by both, or refused by both."""
    body = body_of(kind, **changes)
    assert (taken_by_reader(kind, body), taken_by_model(kind, body)) == (verdict, verdict)


@settings(max_examples=150, deadline=None)
@given(bodies())
def test_valid_commands(sent: tuple[Kind, dict[str, Any]]):
    """Whatever is valid is taken by reader, model and published schema."""
    kind, fields = sent
    body = json.dumps(fields).encode()
    assert taken_by_reader(kind, body)
    assert taken_by_model(kind, body)
    SCHEMAS[f"command.{kind}"].validate(fields)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutated_commands(data: st.DataObject):
    """With wrong types, missing and unknown fields, and values at their bounds, the verdicts are still the same."""
    kind, fields = data.draw(bodies())
    body = as_body(data.draw(mutated(fields)))
    assert taken_by_model(kind, body) == taken_by_reader(kind, body)


@pytest.mark.parametrize(
    "tail", [b', "v": 1}', b', "payload": NaN}', b', "payload": 1e400}', b', "payload": "\\ud800"}', b"} x"]
)
def test_models_read_as_strictly(tail: bytes):
    """``fields.read`` refuses duplicate keys and what is no JSON number, as the service does."""
    body = body_of("start")[:-1] + tail
    assert not taken_by_model("start", body)
    assert not taken_by_reader("start", body)


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────


def check(name: str, data: bytes) -> Model:
    """``data`` is what model and published schema say; returns it as a model."""
    SCHEMAS[name].validate(strict_loads(data))
    return read_model(MESSAGES[name], data)


FEW = settings(max_examples=60, deadline=None)


@FEW
@given(lives())
def test_states_and_terminal_records(timer: Timer):
    """Whatever has happened to a timer, its state and its terminal record are as published."""
    state = check("state", encode(timer))
    assert isinstance(state, models.State)
    assert (state.generation, state.fence, state.phase) == (timer.generation, timer.fence, timer.phase)
    if timer.phase.ended:
        terminal = check("terminal", encode(terminal_record(timer)))
        assert isinstance(terminal, models.Terminal)
        assert (terminal.status, terminal.ended_at_ms) == (timer.phase, timer.ended_at_ms)
        assert (terminal.failure_code is None) == (timer.phase is not Phase.FAILED)
        check("removal", encode(Removal(v=1, generation=timer.generation, fence=timer.fence)))


@FEW
@given(lives(most=8))
def test_resumes_and_wakes(timer: Timer):
    """The resume of an elapsed timer hands back what the start brought; every field is there."""
    check("wake", encode_wake(Wake(timer.timer_ref, timer.generation, timer.due_at_ms)))
    if timer.phase is Phase.ELAPSED:
        assert not isinstance(timer.payload, Absent)
        resume = check("resume", encode(resume_of(timer, timer.payload)))
        assert isinstance(resume, models.Resume)
        assert resume.payload == strict_loads(bytes(timer.payload))
        assert (resume.edges is None) == isinstance(timer.edges, Absent)


@FEW
@given(st.none() | lives(most=6), st.sampled_from(Status), st.none() | st.sampled_from(Code), st.text())
def test_outcomes(timer: Timer | None, status: Status, code: Code | None, message: str):
    """An outcome describes the timer as it is now, or says null."""
    known = None if timer is None else timer.timer_ref
    sent = outcome_of(timer, command_id="c", timer_ref=known, status=status, code=code, message=message)
    outcome = check("outcome", encode(sent))
    assert isinstance(outcome, models.Outcome)
    assert (outcome.generation, outcome.phase) == ((None, None) if timer is None else (timer.generation, timer.phase))


@FEW
@given(
    st.sampled_from([None, *models.COMMANDS]),
    st.binary(max_size=40) | st.integers(0, 6_000).flatmap(lambda size: st.sampled_from(["é", "x", "\0", "€"]).map(
        lambda unit: (unit * size).encode())),
    st.sampled_from(Code),
)  # fmt: skip
def test_rejections(kind: str | None, body: bytes, code: Code):
    """A rejection shows the body as text of at most 4 KiB and says when it is cut."""
    outcome = outcome_of(None, command_id=None, timer_ref=REF, status=Status.REJECTED, code=code, message="no")
    rejection = check("rejection", encode(rejection_of(kind, outcome, 5, body)))
    assert isinstance(rejection, models.Rejection)
    assert rejection.kind == (kind or "unknown")
    text = body.decode(errors="replace")
    assert rejection.body_truncated == (len(text.encode()) > 4_096 or len(body) > 4_096)
    assert text.startswith(rejection.body)
    assert rejection.body_truncated or rejection.body == text
    assert not rejection.body_truncated or len(rejection.body.encode()) > 4_096 - 4


@FEW
@given(lives(most=4), st.integers(1, 2**53))
def test_a_snapshot_takes_the_place_of_the_payload(timer: Timer, seq: int):
    """A state whose payload is kept elsewhere is as published, too."""
    check("state", encode(replace(timer, payload=ABSENT, snapshot_seq=seq)))
