"""Whatever bytes come in, reading ends with a command or with BadCommand, and equal contents have equal hashes."""

from __future__ import annotations

import json
import random
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.support.bodies import JUNK, LONG, as_body, bodies, kinds, mutated
from tests.support.commands import ENVELOPE
from timer_service.domain.codes import Code
from timer_service.domain.identity import is_timer_ref
from timer_service.domain.model import AnyCommand, Command
from timer_service.wire.canonical import canonical_json
from timer_service.wire.commands import BadCommand, Kind, read_command, subject_kind

DIGITS = st.sampled_from([4_300, 4_301, 10_000])
FEW = settings(max_examples=200, deadline=None)
AT_ADMISSION = {
    Code.MALFORMED,
    Code.UNSUPPORTED_VERSION,
    Code.TOO_LARGE,
    Code.INVALID_DUE,
    Code.HASH_MISMATCH,
}
SUBJECTS = st.builds("durable_timer.commands.{}.v{}".format, kinds, st.sampled_from(["1", "1", "1", "2", "", "x"]))


def outcome(subject: str, body: bytes) -> AnyCommand | BadCommand:
    """What reading ends with; any other exception breaks the test. Both kinds of end are checked for sanity."""
    try:
        command = read_command(subject, body, ENVELOPE)
    except BadCommand as bad:
        check_refusal(bad)
        return bad
    assert isinstance(command, Command)
    assert type(command).__name__.lower() == subject_kind(subject)[0]
    assert is_timer_ref(command.timer_ref)
    return command


def check_refusal(bad: BadCommand) -> None:
    assert bad.code in AT_ADMISSION
    assert 0 < len(bad.message) <= 500
    assert bad.command_id is None or 0 < len(bad.command_id) <= 128
    assert bad.timer_ref is None or is_timer_ref(bad.timer_ref)


@FEW
@given(SUBJECTS | st.text(), st.binary())
def test_any_bytes(subject: str, body: bytes):
    """Bytes that mean nothing are refused, whatever the subject."""
    assert isinstance(outcome(subject, body), BadCommand)


@FEW
@given(SUBJECTS, JUNK)
def test_any_json(subject: str, value: Any):
    """So is JSON of any other shape."""
    assert isinstance(outcome(subject, as_body(value)), BadCommand)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_valid_commands_and_their_neighbours(data: st.DataObject):
    """Bodies near a valid one, where most branches are: with other values, without fields, with more of them."""
    kind, fields = data.draw(bodies())
    outcome(f"durable_timer.commands.{kind}.v1", as_body(data.draw(mutated(fields)), data.draw(DIGITS)))


@FEW
@given(bodies(), st.sampled_from([LONG, LONG, "-", 1.5, None, True, "", [], {}]), st.data())
def test_one_value_of_another_kind(sent: tuple[Kind, dict[str, Any]], value: Any, data: st.DataObject):
    """One field, at the top or inside, holds what it never should: nothing but a refusal comes of it."""
    kind, fields = sent
    target = data.draw(st.sampled_from([fields, *(inner for inner in fields.values() if isinstance(inner, dict))]))
    if target:
        target[data.draw(st.sampled_from([*target]))] = value
    outcome(f"durable_timer.commands.{kind}.v1", as_body(fields, data.draw(DIGITS)))


@FEW
@given(st.data())
def test_torn_and_overwritten_bodies(data: st.DataObject):
    """Valid bodies cut off, or with some bytes exchanged."""
    kind, fields = data.draw(bodies())
    body = bytearray(json.dumps(fields, ensure_ascii=data.draw(st.booleans())).encode())
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[at] = data.draw(st.integers(0, 255))
    outcome(f"durable_timer.commands.{kind}.v1", bytes(body[: data.draw(st.integers(0, len(body)))]))
    outcome(f"durable_timer.commands.{kind}.v1", bytes(body))


def shuffled(value: Any, numbers: random.Random) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key], numbers) for key in numbers.sample(list(value), k=len(value))}
    return [shuffled(inner, numbers) for inner in value] if isinstance(value, list) else value


def content(kind: Kind, fields: dict[str, Any], **spelling: Any) -> str | None:
    command = outcome(f"durable_timer.commands.{kind}.v1", json.dumps(fields, **spelling).encode())
    return None if isinstance(command, BadCommand) else command.content


@FEW
@given(bodies(), st.randoms(use_true_random=False), st.sampled_from([None, 1]), st.booleans())
def test_content_is_the_same_for_every_spelling(
    sent: tuple[Kind, dict[str, Any]], numbers: random.Random, indent: int | None, ascii_only: bool
):
    """Key order, white space and escapes leave the content as it is, and so does the command id."""
    kind, fields = sent
    expected = content(kind, fields)
    assert expected is not None
    other = {**shuffled(fields, numbers), "command_id": "another"}
    assert content(kind, other, indent=indent, ensure_ascii=ascii_only) == expected


@FEW
@given(st.data())
def test_content_tells_two_commands_apart(data: st.DataObject):
    """Two bodies that differ in more than the spelling, and are both taken, have different contents."""
    kind, fields = data.draw(bodies())
    other = data.draw(mutated(fields))
    ours, theirs = content(kind, fields), content(kind, other)
    if theirs is not None:
        assert (ours == theirs) == (meaning(fields) == meaning(other))


def meaning(fields: dict[str, Any]) -> bytes:
    """The fields without id and without what is null, in their one spelling."""
    sent = {name: value for name, value in fields.items() if value is not None or name == "max_retries"}
    del sent["command_id"]
    for name in ("timer", "due", "edges"):
        if name in sent:
            sent[name] = {key: value for key, value in sent[name].items() if value is not None}
    sent.setdefault("payload", None)
    return canonical_json(sent)
