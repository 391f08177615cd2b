"""What is sent keeps every value: doubles stay doubles, integers keep their digits, members their order."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.ids import stable_id
from timer_service.wire.canonical import MAX_DEPTH, MalformedJson, canonical_json, exact_json, strict_loads


@pytest.mark.parametrize(
    ("value", "spelling"),
    [
        (1.0, "1.0"), (-0.0, "-0.0"), (0.0, "0.0"), (1, "1"), (1e16, "1e+16"), (0.1, "0.1"), (5e-324, "5e-324"),
        (1e22, "1e+22"), (-1.5, "-1.5"), (2**64, "18446744073709551616"), (10**5000, "1" + "0" * 5000),
        (-(10**5000), "-1" + "0" * 5000), (True, "true"), (None, "null"), ("ü\n\U0001f600", '"ü\\n\U0001f600"'),
        ({"b": 1.0, "a": [{}, [], 2.0]}, '{"b":1.0,"a":[{},[],2.0]}'),
    ],
    ids=lambda part: "int" if type(part) is int else ascii(part)[:24],  # some have more digits than str() takes
)  # fmt: skip
def test_each_value_has_its_spelling(value: Any, spelling: str):
    """Doubles by repr, integers in plain digits past any limit, members in the order in which they came."""
    assert exact_json(value).decode() == spelling


def test_a_double_comes_back_as_a_double():
    """1.0 is read back as a float, where the canonical spelling makes an integer of it."""
    assert [type(number) for number in read(exact_json([1.0, 1, -0.0]))] == [float, int, float]
    assert math.copysign(1, read(exact_json(-0.0))) == -1
    assert type(read(canonical_json(1.0))) is int


def read(text: bytes) -> Any:
    return strict_loads(text)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, "\ud800", "a\udfff", {"\ud800": 1}, {1: 2}, (1, 2), {1}, b"x", object()],
    ids=stable_id,
)
def test_what_is_not_json_is_refused(value: Any):
    """NaN, Infinity, lone surrogates and foreign types raise MalformedJson, at any place."""
    for inside in (value, [value], {"k": [0.5, value]}):
        with pytest.raises(MalformedJson):
            exact_json(inside)


def test_depth_is_limited_as_for_reading():
    """256 levels are written, also from a deep stack; 257 are refused."""
    value: Any = 1.5
    for _ in range(MAX_DEPTH):
        value = [value]

    def from_below(frames: int) -> bytes:
        return from_below(frames - 1) if frames else exact_json(value)

    assert strict_loads(from_below(600)) == value
    with pytest.raises(MalformedJson, match="nested deeper"):
        exact_json([value])
