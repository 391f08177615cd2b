"""For any JSON value: what is written is read back, and there is one spelling. Any bytes: read or refused."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from timer_service.wire.canonical import (
    MAX_DEPTH,
    MalformedJson,
    canonical_json,
    payload_sha256,
    strict_loads,
)

# Characters around every border that matters: escapes, UTF-8 lengths, surrogates, the two orders of keys.
BORDERS = '"\\/\b\f\n\r\t\0\x1f\x7f\x80\u07ff\u0800\u2028\ud7ff\ue000\ufb33\ufeff\uffff\U00010000\U0001f600\U0010ffff'
TEXTS = st.text(max_size=8) | st.text(st.sampled_from(BORDERS + "ab"), max_size=6)
LONG = st.builds(
    lambda n, power, sign: sign * (10**power + n),
    st.integers(0),
    st.integers(0, 6_000),
    st.sampled_from([1, -1]),
)
DOUBLES = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**22), 10**22).map(float)
LEAVES = st.none() | st.booleans() | st.integers() | TEXTS | DOUBLES


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5))


VALUES = trees(LEAVES | LONG)
USUAL = trees(LEAVES)  # what the library can write, too
FEW = settings(max_examples=150, deadline=None)


def same(one: Any, other: Any) -> bool:
    """Say whether `other` is what reading the spelling of `one` must give: equal, doubles as doubles."""
    if type(one) is float:
        return type(other) in (int, float) and float(other) == one
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def reordered(value: Any, numbers: random.Random) -> Any:
    """Return the same value with the members of all objects in another order."""
    if isinstance(value, dict):
        return {key: reordered(value[key], numbers) for key in numbers.sample(list(value), k=len(value))}
    return [reordered(inner, numbers) for inner in value] if isinstance(value, list) else value


def naive(value: Any) -> str:
    """Write RFC 8785 the slow, obvious way."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: [*memoryview(key.encode("utf-16-le")).cast("H")])
        return "{" + ",".join(f"{naive(key)}:{naive(value[key])}" for key in keys) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(naive, value)) + "]"
    return naive_double(value) if type(value) is float else json.dumps(value, ensure_ascii=False)


def naive_double(value: float) -> str:
    """Follow the steps of Number::toString in ECMAScript, with its names n, k and s."""
    if value <= 0:
        return "0" if value == 0 else "-" + naive_double(-value)
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    s, k = "".join(map(str, digits)), len(digits)
    n = k + int(exponent)
    if k <= n <= 21:
        return s + "0" * (n - k)
    if 0 < n <= 21:
        return s[:n] + "." + s[n:]
    if -6 < n <= 0:
        return "0." + "0" * -n + s
    return s[0] + ("." + s[1:] if k > 1 else "") + f"e{'+' if n > 0 else '-'}{abs(n - 1)}"


@FEW
@given(VALUES)
def test_what_is_written_is_read_back(value: Any):
    """Reading the canonical spelling gives the value, and spelling that again gives the same bytes."""
    text = canonical_json(value)
    read = strict_loads(text)
    assert same(value, read)
    assert canonical_json(read) == text


@FEW
@given(VALUES, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(value: Any, numbers: random.Random):
    """Objects with the same members have the same spelling and the same hash."""
    other = reordered(value, numbers)
    assert canonical_json(other) == canonical_json(value)
    assert payload_sha256(other) == payload_sha256(value)


@FEW
@given(USUAL)
def test_the_spelling_is_that_of_the_rfc(value: Any):
    """Quick and slow way write what an obvious implementation of RFC 8785 writes."""
    assert canonical_json(value).decode() == naive(value)


@settings(max_examples=500, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.floats(1e-8, 1e-4) | st.floats(1e14, 1e23))
def test_doubles_survive(number: float):
    """Every finite double is written as ECMAScript does and comes back as the same double."""
    text = canonical_json(number).decode()
    assert text == naive_double(number)
    assert float(text) == number


@FEW
@given(USUAL, st.booleans(), st.sampled_from([None, 1]))
def test_reading_agrees_with_the_library_on_well_formed_text(value: Any, ascii_only: bool, indent: int | None):
    """Whatever the library writes, escaped or not, spaced or not, is read as the library reads it."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert repr(strict_loads(text.encode())) == repr(json.loads(text))


FRAGMENTS = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', '"a"', '"a":', "\\", "\\u", "\\ud83d", "\\ude00", "\\n", "0", "1",
     "-", ".5", "e9", "e999", "1" * 4_400, "null", "true", "NaN", "Infinity", " ", "\n", "\0", "\ufeff", "ü",
     "😀", "[" * 300, '{"a":' * 300, "]" * 300, "}" * 300]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(FRAGMENTS, max_size=12).map("".join).map(str.encode) | st.binary(max_size=40))
def test_reading_fails_in_one_way_only(body: bytes):
    """Any bytes are either refused as malformed or read to a value that can be spelled and read again."""
    try:
        value = strict_loads(body)
    except MalformedJson:
        return
    assert same(value, strict_loads(canonical_json(value)))


def naive_depth(text: str) -> int:
    """Count the containers in one another; strings go first, which hold no escapes here."""
    depths = [0]
    for character in re.sub('"[^"]*"', "", text):
        depths.append(depths[-1] + (character in "[{") - (character in "]}"))
    return max(depths)


@FEW
@given(
    st.integers(MAX_DEPTH - 3, MAX_DEPTH + 3) | st.integers(1, 2 * MAX_DEPTH),
    st.lists(
        st.sampled_from(["", "[],", '"]]",', '"[[",', "{},", "[[]],", '{"{":1},', "2.5,"]),
        min_size=1,
        max_size=4,
    ),
)
def test_the_limit_on_depth_is_exact(depth: int, siblings: list[str]):
    """Texts of any shape are read up to the limit and refused beyond; siblings and strings do not count."""
    openings = ("[" + siblings[level % len(siblings)] for level in range(depth))
    text = "".join(openings) + "0" + "]" * depth
    try:
        value = strict_loads(text.encode())
    except MalformedJson:
        assert naive_depth(text) > MAX_DEPTH
    else:
        assert naive_depth(text) <= MAX_DEPTH
        assert same(value, strict_loads(canonical_json(value)))
