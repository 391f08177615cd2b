"""JSON is read without tolerance, and there is one canonical spelling of a value to take hashes over."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.ids import stable_id
from timer_service.wire.canonical import (
    MAX_DEPTH,
    MalformedJson,
    canonical_json,
    payload_sha256,
    sha256_hex,
    strict_loads,
)

VECTORS = json.loads((Path(__file__).parents[2] / "docs/vectors/canonical.json").read_text())


def nested(depth: int, inmost: object = None) -> object:
    """Return `depth` containers in one another, by turns lists and objects."""
    value, levels = ([], depth - 1) if inmost is None else (inmost, depth)
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


# ── the published vectors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vector", VECTORS["values"], ids=lambda vector: vector["note"])
def test_published_values_hold(vector: dict[str, str]):
    """Spelling and hash of every published value are the published ones."""
    value = strict_loads(vector["json"].encode())
    assert canonical_json(value).decode() == vector["canonical"]
    assert payload_sha256(value) == vector["sha256"]
    assert hashlib.sha256(vector["canonical"].encode()).hexdigest() == vector["sha256"]


@pytest.mark.parametrize("vector", VECTORS["numbers"], ids=lambda vector: vector["ieee754_hex"])
def test_published_numbers_hold(vector: dict[str, str]):
    """Doubles are written as in ECMAScript (the samples of RFC 8785, appendix B), alone and inside."""
    (number,) = struct.unpack(">d", bytes.fromhex(vector["ieee754_hex"]))
    assert canonical_json(number).decode() == vector["canonical"]
    assert canonical_json({"n": [number]}).decode() == f'{{"n":[{vector["canonical"]}]}}'


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("number", "spelling"),
    [
        (0.0, "0"), (-0.0, "0"), (1.0, "1"), (-1.5, "-1.5"), (0.1, "0.1"), (1e-4, "0.0001"),
        (1e-5, "0.00001"), (1.25e-5, "0.0000125"), (1e-6, "0.000001"), (1e-7, "1e-7"), (-1.5e-7, "-1.5e-7"),
        (1e15, "1000000000000000"),
        (123456789012345.6, "123456789012345.6"), (1e16, "10000000000000000"), (1.5e16, "15000000000000000"),
        (-1.2345678901234567e19, "-12345678901234567000"), (1e20, "100000000000000000000"), (1e21, "1e+21"),
        (1.5e21, "1.5e+21"), (1e100, "1e+100"), (-5e-324, "-5e-324"),
    ],
)  # fmt: skip
def test_doubles_in_the_layout_of_ecmascript(number: float, spelling: str):
    """Plain digits from 1e-6 to below 1e21, else an exponent with its sign and no leading zeros."""
    assert canonical_json(number).decode() == spelling


@pytest.mark.parametrize(
    "keys",
    [
        ["", "a", "aa", "b"],
        ["A", "a", "é"],
        ["\u007f", "\u0080", "\u07ff", "\u0800"],
        ["\ud7ff", "\U00010000", "\ue000"],
        ["\U0010ffff", "\uffff"],
        ["a\U0001f600", "a\ufb33"],
        ["\U0001f600", "\U0001f601", "\uee00"],
    ],
)
@pytest.mark.parametrize("value", [1, 1.5], ids=["quick way", "way of floats"])
def test_keys_go_by_utf16_code_units(keys: list[str], value: float):
    """A character beyond U+FFFF sorts as its surrogates do: before U+E000. So on both ways of writing."""
    written = json.loads(canonical_json([dict.fromkeys(reversed(keys), value)]))
    assert list(written[0]) == keys


def test_every_character_is_written_as_the_rfc_writes_it():
    """Only quote, backslash and U+0000-1F are escaped: in short if JSON can, else in lower-case hex."""
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    for start in (start for start in range(0, 0x110000, 256) if not 0xD800 <= start < 0xE000):
        characters = list(map(chr, range(start, start + 256)))
        spelled = (short.get(c, f"\\u{ord(c):04x}" if c < " " else c) for c in characters)
        assert canonical_json("".join(characters)) == f'"{"".join(spelled)}"'.encode()


def test_strings_and_literals_are_spelled_alike_on_both_ways():
    """A float somewhere in the value changes nothing about the spelling of the rest."""
    rest: dict[str, object] = {"ü\n": [None, True, False, "\U0001f600", "€\x01", 2**64, -1, {}, []]}
    quick, slow = canonical_json([rest, 1]), canonical_json([rest, 1.5])
    assert quick[:-2] == slow[:-4]


def test_the_order_of_keys_does_not_matter():
    """Two objects with the same members are spelled the same, whatever the order they were built in."""
    one = {"b": {"y": 1, "x": [{"q": 1, "p": 2}]}, "a": 2}
    other = {"a": 2, "b": {"x": [{"p": 2, "q": 1}], "y": 1}}
    assert canonical_json(one) == canonical_json(other) == b'{"a":2,"b":{"x":[{"p":2,"q":1}],"y":1}}'


class Number(IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        math.nan, math.inf, -math.inf, [1, {"a": math.nan}], "\ud800", "a\udfffb", {"\ud800": 1},
        [1.5, "\ud800"], {"\ud800": 1.5}, "\ud83d\ude00", {1: 2}, {None: 1}, {True: 1}, {1.5: 1},
        {"a": 1, 2: 3},
        {"a": {b"k": 1}}, {Text("k"): 1}, {(): 1}, (1, 2), {1, 2}, b"x", bytearray(b"x"),
        Fraction(1, 2), 1j, object(),
        Number.ONE, Text("x"), [[[()]]], {"a": {"b": Number.ONE}},
    ],
    ids=stable_id,
)  # fmt: skip
def test_what_is_not_json_has_no_spelling(value: object):
    """NaN, Infinity, lone surrogates, foreign types and keys that are no strings raise, at any place."""
    for inside in (value, [value], {"k": [0.5, value]}):
        with pytest.raises(MalformedJson):
            canonical_json(inside)
        with pytest.raises(MalformedJson):
            payload_sha256(inside)


def test_sha256_hex():
    """Hashes are lower-case hex SHA-256, of the canonical bytes."""
    assert sha256_hex(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert payload_sha256(None) == sha256_hex(b"null")
    assert payload_sha256({"b": 1, "a": 1.0}) == sha256_hex(b'{"a":1,"b":1}')


# ── depth ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("inmost", [None, 7, 1.5, "x", 10**5_000], ids=["empty", "int", "float", "str", "long"])
def test_256_levels_are_taken_and_257_refused(inmost: object):
    """Both directions count containers in one another, and stop at the same number."""
    text = canonical_json(nested(MAX_DEPTH, inmost))
    assert canonical_json(strict_loads(text)) == text
    with pytest.raises(MalformedJson, match="nested deeper than 256"):
        canonical_json(nested(MAX_DEPTH + 1, inmost))
    for deeper in (b"[" + text + b"]", b'{"a":[],"b":' + text + b"}"):
        with pytest.raises(MalformedJson, match="nested deeper than 256"):
            strict_loads(deeper)


@pytest.mark.parametrize("shape", [("[", "]"), ('{"k":', "}")], ids=["lists", "objects"])
def test_depth_works_from_a_deep_stack(shape: tuple[str, str]):
    """A caller some hundred frames down has the same limits: no way takes more than one frame per level."""
    opening, closing = shape
    text = (opening * MAX_DEPTH + "1.5" + closing * MAX_DEPTH).encode()

    def from_below(frames: int) -> bytes:
        return from_below(frames - 1) if frames else canonical_json(strict_loads(text))

    assert from_below(600) == text


def test_many_brackets_are_not_deep():
    """Width costs no depth, and brackets inside strings do not count."""
    assert strict_loads(b"[" + b"[{}]," * 5_000 + b"[]]") == [[{}]] * 5_000 + [[]]
    assert strict_loads(b'["' + b"[{" * 5_000 + b'"]') == ["[{" * 5_000]


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("levels", [300, 2_000, 100_000])
def test_absurd_nesting_is_refused(opening: bytes, levels: int):
    """A body that is all brackets, closed or not, is refused without exhausting any stack."""
    closing = opening.translate(bytes.maketrans(b"[{", b"]}"), delete=b'"a:')[::-1]
    for body in (opening * levels, opening * levels + b"1" + closing * levels):
        with pytest.raises(MalformedJson):
            strict_loads(body)


def test_a_value_that_contains_itself_has_no_spelling():
    """A cycle is infinitely deep, and refused as such."""
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(MalformedJson, match="nested deeper"):
        canonical_json(cycle)


# ── integers of any size ────────────────────────────────────────────────────────────────────────────────────


def digits(count: int) -> str:
    """Return `count` digits without a pattern, so that none can be lost or moved unseen."""
    text = ""
    block = b"digits"
    while len(text) < count:
        block = hashlib.sha256(block).digest()
        text += str(int.from_bytes(block, "big"))
    return "1" + text[: count - 1]


@contextmanager
def without_digit_limit() -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    "count", [1, 19, 20, 308, 309, 310, 511, 512, 513, 640, 1_024, 1_025, 4_300, 4_301, 9_999, 20_001]
)
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("limit", [640, 4_300, 0])
def test_integers_of_any_length_survive(count: int, sign: str, limit: int):
    """All digits come back, on either side of the process-wide digit limit, which stays where it stands."""
    text = sign + digits(count)
    with without_digit_limit():
        expected = int(text)
        sys.set_int_max_str_digits(limit)
        value = strict_loads(text.encode())
        assert value == expected
        assert canonical_json(value) == text.encode()
        assert canonical_json([value, 0.5]) == f"[{text},0.5]".encode()
        assert sys.get_int_max_str_digits() == limit


ROUND = {
    "10^5000": 10**5_000,
    "10^5000 - 1": 10**5_000 - 1,
    "2^16384": 2**16_384,
    "2^16384 - 1": 2**16_384 - 1,
    "-10^6144": -(10**6_144),
    "2^20480": 2**20_480,
}


@pytest.mark.parametrize("number", ROUND.values(), ids=ROUND.keys())
def test_round_numbers_keep_their_zeros(number: int):
    """Long runs of zeros or nines, where chunks are empty or full, are written and read digit for digit."""
    with without_digit_limit():
        expected = str(number).encode()
    assert canonical_json({"n": number}) == b'{"n":' + expected + b"}"
    assert strict_loads(expected) == number


def test_a_body_full_of_digits():
    """The longest number that fits into a command comes back whole."""
    body = digits(262_144).encode()
    assert canonical_json(strict_loads(body)) == body


def test_a_long_integer_does_not_soften_the_rest():
    """Next to a long integer everything is still read and refused as strictly."""
    long = digits(5_000)
    read: Any = strict_loads(f'{{"a": [{long}, 12, -7, 1.5, "{long}"]}}'.encode())
    assert read["a"][1:] == [12, -7, 1.5, long]
    for rest in (
        '{"b":1,"b":2}',
        "NaN",
        "1e400",
        '"\\ud800"',
        "1,",
        "[" * 300 + "]" * 300,
        "[" * 100_000,
        "01",
        "",
    ):
        with pytest.raises(MalformedJson):
            strict_loads(f"[{long}, {rest}]".encode())


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Expecting value, at character 0"),
    "only space": (b"  \n", "Expecting value"),
    "a word": (b"nul", "Expecting value, at character 0"),
    "capitals": (b"True", "Expecting value"),
    "text after the value": (b"{} x", "Extra data, at character 3"),
    "two values": (b"1 2", "Extra data, at character 2"),
    "NUL after the value": (b"{}\0", "Extra data, at character 2"),
    "open object": (b'{"a":1', "Expecting"),
    "comma at the end of a list": (b"[1,]", "at character"),
    "comma at the end of an object": (b'{"a":1,}', "at character"),
    "no quotes around a key": (b"{a:1}", "Expecting property name"),
    "a number as key": (b"{1:1}", "Expecting property name"),
    "single quotes": (b"['a']", "Expecting value, at character 1"),
    "a comment": (b"[1] // one", "Extra data"),
    "space that JSON does not know": ("[\u00a01]".encode(), "Expecting value, at character 1"),
    "form feed as space": (b"\x0c[1]", "Expecting value"),
    "leading zero": (b"01", "Extra data"),
    "leading plus": (b"+1", "Expecting value"),
    "no digit after the point": (b"1.", "Extra data"),
    "no digit before the point": (b".5", "Expecting value"),
    "no digit in the exponent": (b"1e", "Extra data"),
    "a lone minus": (b"-", "Expecting value"),
    "hexadecimal": (b"0x10", "Extra data"),
    "underscores": (b"1_000", "Extra data"),
    "digits of another script": ("[١]".encode(), "Expecting value"),
    "NaN": (b"NaN", "NaN is not a JSON number"),
    "NaN inside": (b'{"a":[1,NaN]}', "NaN is not a JSON number"),
    "Infinity": (b"Infinity", "Infinity is not a JSON number"),
    "minus Infinity": (b"[-Infinity]", "-Infinity is not a JSON number"),
    "overflow": (b"1e400", "the number 1e400 overflows a double"),
    "negative overflow": (b"[-1.5E+309]", "overflows a double"),
    "the first overflow": (b"1.7976931348623159e308", "overflows a double"),
    "overflow without exponent": (b"1" * 400 + b".0", "overflows a double"),
    "a tab in a string": (b'"a\tb"', "Invalid control character, at character 2"),
    "a new line in a string": (b'"a\nb"', "Invalid control character"),
    "NUL in a string": (b'"\0"', "Invalid control character"),
    "an unknown escape": (b'"\\x41"', "Invalid \\\\escape"),
    "a short \\u": (b'"\\u12"', "Invalid \\\\uXXXX escape"),
    "a \\u with an underscore": (b'"\\u1_23"', "Invalid \\\\uXXXX escape"),
    "open string": (b'"abc', "Unterminated string starting, at character 0"),
    "duplicate key": (b'{"a":1,"a":1}', "duplicate key 'a'"),
    "duplicate key inside": (b'[{"x":{"k":1,"b":2,"k":3}}]', "duplicate key 'k'"),
    "duplicate key by escape": (b'{"a":1,"\\u0061":2}', "duplicate key 'a'"),
    "duplicate empty key": (b'{"":1,"":2}', "duplicate key ''"),
    "duplicate key in a level that is dropped": (b'{"a":{"b":1,"b":2},"a":1}', "duplicate key 'b'"),
    "high surrogate": (b'"\\ud800"', "lone surrogate in a string, at character 1"),
    "low surrogate": (b'"x\\uDFFF"', "lone surrogate in a string, at character 2"),
    "halves the wrong way round": (b'"\\ude00\\ud83d"', "lone surrogate in a string, at character 1"),
    "two high halves and a low one": (b'"\\ud83d\\ud83d\\ude00"', "lone surrogate .* at character 1$"),
    "two low halves": (b'"\\ude00\\ude01"', "lone surrogate in a string, at character 1"),
    "halves with something between": (b'"\\ud83d \\ude00"', "lone surrogate in a string, at character 1"),
    "halves with an escape between": (b'"\\ud83d\\n\\ude00"', "lone surrogate"),
    "halves in two strings": (b'["\\ud83d","\\ude00"]', "lone surrogate in a string, at character 2"),
    "a low half after a pair": (b'"\\ud83d\\ude00\\ude00"', "lone surrogate in a string, at character 13"),
    "a half after a backslash": (b'"\\\\\\ud800"', "lone surrogate in a string, at character 3"),
    "a half in a key": (b'{"\\uD8AB":1}', "lone surrogate"),
    "a half far inside": (b'{"a":[{"b":"\\udc00"}]}', "lone surrogate"),
    "not UTF-8": (b'"\xff"', "not UTF-8 at byte 1"),
    "Latin-1": ('"ü"'.encode("latin-1"), "not UTF-8 at byte 1"),
    "cut UTF-8": (b'"\xe2\x82"', "not UTF-8 at byte 1"),
    "overlong UTF-8": (b'"\xc0\xaf"', "not UTF-8 at byte 1"),
    "a surrogate in UTF-8": (b'"\xed\xa0\x80"', "not UTF-8 at byte 1"),
    "a pair of surrogates in UTF-8 (CESU-8)": (b'"\xed\xa0\xbd\xed\xb8\x80"', "not UTF-8 at byte 1"),
    "beyond Unicode": (b'"\xf4\x90\x80\x80"', "not UTF-8 at byte 1"),
    "byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "UTF-16": ("{}".encode("utf-16-le"), "at character 1"),
    "UTF-16 with a mark": ("{}".encode("utf-16"), "not UTF-8 at byte 0"),
    "UTF-32": ("{}".encode("utf-32-be"), "Expecting value, at character 0"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_exactly_json_is_refused(body: bytes, reason: str):
    """What some reader could take otherwise is refused, with a short reason, and the place if known."""
    with pytest.raises(MalformedJson, match=reason) as caught:
        strict_loads(body)
    assert len(str(caught.value)) <= 120


def test_reasons_stay_short():
    """A reason quotes no more than the beginning of what was wrong, and can itself be sent as UTF-8."""
    for body in (
        b'{"%b":1,"%b":2}' % (b"k" * 9_000, b"k" * 9_000),
        b'{"\\ud800":1,"\\ud800":1}',
        b"9" * 9_000 + b"e1",
    ):
        with pytest.raises(MalformedJson) as caught:
            strict_loads(body)
        assert 0 < len(str(caught.value).encode()) <= 120


TAKEN: dict[str, tuple[bytes, object]] = {
    "space around": (b" \t\r\n{ \"a\" : [ 1 , 2 ] }\n", {"a": [1, 2]}),
    "a value that is no object": (b'"x"', "x"),
    "all literals": (b"[null,true,false]", [None, True, False]),
    "same key in different objects": (b'[{"a":1},{"a":{"a":2}}]', [{"a": 1}, {"a": {"a": 2}}]),
    "keys that differ in case": (b'{"a":1,"A":2}', {"a": 1, "A": 2}),
    "keys that differ in form": ('{"ü":3,"u\u0308":4}'.encode(), {"ü": 3, "u\u0308": 4}),
    "a pair of escaped halves": (b'"\\ud83d\\ude00"', "\U0001f600"),
    "a pair in capitals": (b'"\\uD83D\\uDE00"', "\U0001f600"),
    "a pair in the middle of escapes": (b'"\\n\\ud83d\\ude00\\\\"', "\n\U0001f600\\"),
    "a backslash before text that looks like a half": (b'"\\\\ud800"', "\\ud800"),
    "backslashes before a pair": (b'"\\\\\\\\\\ud83d\\ude00"', "\\\\\U0001f600"),
    "escapes next to the surrogates": (b'"\\ud7ff\\ue000"', "\ud7ff\ue000"),
    "an escaped byte order mark": (b'"\\ufeff"', "\ufeff"),
    "a byte order mark inside a string": (b'"\xef\xbb\xbf"', "\ufeff"),
    "U+2028 and DEL unescaped": ('"\u2028\x7f"'.encode(), "\u2028\x7f"),
    "an escaped NUL": (b'"\\u0000"', "\0"),
    "the word NaN in a string": (b'["NaN","Infinity","1e400"]', ["NaN", "Infinity", "1e400"]),
    "the greatest double": (b"1.7976931348623157e308", sys.float_info.max),
    "a double that rounds down to the greatest": (b"1.7976931348623158e308", sys.float_info.max),
    "an underflow is zero": (b"1e-400", 0.0),
    "a double of many digits": (b"0." + b"3" * 5_000, 1 / 3),
    "minus zero": (b"-0", 0),
}  # fmt: skip


@pytest.mark.parametrize(("body", "value"), TAKEN.values(), ids=TAKEN.keys())
def test_all_of_json_is_taken(body: bytes, value: object):
    """Strict is not narrow: every well-formed text is read, to the value it says."""
    read = strict_loads(body)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"), [("1", int), ("1.0", float), ("1e0", float), ("-0.0", float), ("true", bool)]
)
def test_numbers_keep_their_kind(text: str, kind: type):
    """Digits alone are an integer, a point or an exponent makes a double, and a boolean is neither."""
    assert type(strict_loads(text.encode())) is kind
