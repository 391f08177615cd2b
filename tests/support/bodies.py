"""Hypothesis strategies: valid command bodies, with a liking for bounds, and bodies near them."""

from __future__ import annotations

import copy
import json
from typing import Any

import hypothesis.strategies as st

from tests.support.commands import LINEAGE, REF
from timer_service.domain.model import MAX_DELAY_MS, MAX_DUE_MS
from timer_service.wire.canonical import payload_sha256
from timer_service.wire.commands import KINDS, Kind
from timer_service.wire.instants import format_instant

kinds: st.SearchStrategy[Kind] = st.sampled_from([*KINDS, "start", "start", "start"])  # the one with most fields

_VISIBLE = st.characters(exclude_categories=["Cs", "Cc"])
_ASCII = st.characters(min_codepoint=0x20, max_codepoint=0x7E)


def _within(characters: st.SearchStrategy[str], size: int) -> st.SearchStrategy[str]:
    """Text of 1 to ``size`` bytes, sometimes of exactly so many."""
    text = st.text(characters, min_size=1, max_size=size // 4)
    return text | text.map(lambda start: start + "x" * (size - len(start.encode())))


def integers(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most) | st.sampled_from([least, least + 1, most - 1, most])


command_ids = _within(_ASCII, 128)
parts = _within(_VISIBLE, 256)
hashes = st.text("0123456789abcdefABCDEF", min_size=64, max_size=64)
names = st.fixed_dictionaries({"name": parts}, optional={"namespace": st.none() | parts})
lineages = st.fixed_dictionaries(dict.fromkeys(LINEAGE, parts))
edges = st.fixed_dictionaries({"start": parts, "elapsed": parts}, optional={"retry": st.none() | parts})
instants = integers(0, MAX_DUE_MS)
dues = st.one_of(
    st.fixed_dictionaries({"delay_ms": integers(1, MAX_DELAY_MS)}, optional={"at": st.none()}),
    st.fixed_dictionaries({"at_ms": instants}, optional={"delay_ms": st.none()}),
    st.fixed_dictionaries({"at": instants.map(format_instant)}, optional={"at_ms": st.none()}),
)
_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(_VISIBLE)
)
json_values = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(_VISIBLE), inner, max_size=3),
    max_leaves=8,
)
payloads = json_values

LONG = "an integer with more digits than Python reads or prints"
"""Stands in a body for such an integer, which ``as_body`` writes out."""

JUNK: st.SearchStrategy[Any] = json_values | st.sampled_from(
    [
        None, True, False, 0, 1, 2, -1, 1.0, 0.5, 1e300, 2**53 + 1, 2**63, 2**64, -(2**63), 10_000, 10_001,
        MAX_DELAY_MS + 1, MAX_DUE_MS + 1, "", "5", "1", "x" * 129, "x" * 257, "é" * 129, "x" * 1_025, "\0", "a\n",
        REF, REF.upper(), "a" * 64, "reject", "replace", "2030-01-01T00:00:00Z", "2030-01-01", "1969-12-31T23:59:59Z",
        [], [1], {}, LONG,
    ]
)  # fmt: skip
# What would do in the field of that name, or nearly.
_NEAR: dict[str, st.SearchStrategy[Any]] = {
    "timer": st.sampled_from(
        [{"name": "a"}, {"name": "a", "node_id": None}, {"name": "a", "node_id": "b"}, {"name": 1}]
    ),
    "due": st.sampled_from([{"delay_ms": 0}, {"delay_ms": None}, {"at": "x"}, {"at": ""}, {"delay_ms": 1, "at_ms": 1}]),
    "at": st.text("0123456789-T:.Z+", max_size=30) | st.datetimes().map(lambda naive: naive.isoformat() + "Z"),
    "edges": st.sampled_from([{"start": "a", "elapsed": "b"}, {"start": "a"}, {"start": "a", "elapsed": ""}, [], 0]),
    "v": st.sampled_from([0, 1, 2, "1", True, 1.0, LONG]),
    "delay_ms": st.integers(-1, 2),
    "wait_ms": st.integers(9_999, 10_002),
    "payload_sha256": st.sampled_from(["", "a" * 64]),
}
_FIELD_NAMES = st.sampled_from(
    [
        "v", "command_id", "timer", "timer_ref", "generation", "fence", "due", "edges", "max_retries", "payload",
        "payload_sha256", "runtime_sha256", "if_exists", "failure_code", "message", "reason", "wait_ms", "unknown",
        "name", "namespace", "node_id", "delay_ms", "at", "at_ms", "retry",
    ]
)  # fmt: skip


@st.composite
def starts(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a valid start."""
    lineage = draw(st.booleans())
    fields: dict[str, Any] = {"timer": draw(lineages if lineage else names), "due": draw(dues)}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "max_retries": st.none() | integers(0, 2**63 - 1),
        "payload": payloads,
        "if_exists": st.sampled_from([None, "reject", "replace"]),
    }
    if lineage:
        optional |= {"edges": st.none() | edges, "runtime_sha256": st.none() | hashes}
    fields |= draw(st.fixed_dictionaries({}, optional=optional))
    if draw(st.booleans()):
        fields["payload_sha256"] = draw(st.sampled_from([None, payload_sha256(fields.get("payload"))]))
    return fields


def _by_ref(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    refs = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=26, max_size=26)
    return st.fixed_dictionaries({"timer_ref": refs}, optional=optional)


def _feedback(
    required: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    answered = {"timer_ref": st.just(REF), "generation": integers(0, 2**63), "fence": integers(1, 2**63)}
    return st.fixed_dictionaries({**answered, **required}, optional=optional)


_texts = st.none() | _within(st.characters(exclude_categories=["Cs"]), 1_024)
_FIELDS: dict[Kind, st.SearchStrategy[dict[str, Any]]] = {
    "start": starts(),
    "retry": _feedback({}, due=st.none() | dues),
    "complete": _feedback({}),
    "fail": _feedback(
        {"failure_code": st.text("abcdefghijklmnopqrstuvwxyz0123456789_", min_size=1, max_size=64)}, message=_texts
    ),
    "cancel": _by_ref(
        generation=st.none() | integers(0, 2**63), reason=_texts, wait_ms=st.none() | integers(0, 10_000)
    ),
}


@st.composite
def bodies(draw: st.DrawFn, kind: Kind | None = None) -> tuple[Kind, dict[str, Any]]:
    """A kind, any if none is given, and the fields of a valid command of that kind."""
    chosen = draw(kinds) if kind is None else kind
    return chosen, {"v": 1, "command_id": draw(command_ids), **draw(_FIELDS[chosen])}


def as_body(fields: Any, digits: int = 5_000, **spelling: Any) -> bytes:
    """``fields`` as JSON, with the long integers in it written out."""
    return json.dumps(fields, **spelling).replace(json.dumps(LONG), "9" * digits).encode()


@st.composite
def mutated(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` with up to three changes, at the top or one level down: a value, a field less, a field more."""
    changed = copy.deepcopy(fields)  # and drawn values below: they may be shared, and are changed here
    for _ in range(draw(st.integers(0, 3))):
        inner = [value for value in changed.values() if isinstance(value, dict)]
        target = draw(st.sampled_from([changed, changed, *inner]))
        names = [*target]
        match draw(st.sampled_from(["value", "value", "less", "more"])):
            case "value" if names:
                name = draw(st.sampled_from([*names, *(name for name in names if name in _NEAR)]))
                target[name] = copy.deepcopy(draw(_NEAR.get(name, JUNK) | JUNK))
            case "less" if names:
                del target[draw(st.sampled_from(names))]
            case _:
                name = draw(_FIELD_NAMES)
                target[name] = copy.deepcopy(draw(_NEAR.get(name, JUNK) | JUNK))
    return changed
