"""A timer's reference is the same for the same key, for ever, and another one for every other key."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from timer_service.domain.identity import (
    LineageKey,
    NameKey,
    TimerKey,
    TimerRef,
    check_key_part,
    derive_timer_ref,
    is_timer_ref,
    occurrence_id,
    parse_occurrence_id,
)

VECTORS = json.loads((Path(__file__).parents[2] / "docs/vectors/identity.json").read_text())["vectors"]
REF = TimerRef("abcdefghijklmnopqrstuvwx27")


def key_of(timer: dict[str, str]) -> TimerKey:
    return LineageKey(**timer) if "flow_id" in timer else NameKey(**timer)


def naive_preimage(timer: dict[str, str]) -> bytes:
    if "flow_id" in timer:
        parts = ["flow", *(timer[k] for k in ("flow_id", "flow_version", "root_execution_id", "node_id"))]
    else:
        parts = ["name", timer.get("namespace", "default"), timer["name"]]
    return b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)


def naive_ref(timer: dict[str, str]) -> str:
    bits = "".join(f"{byte:08b}" for byte in hashlib.sha256(naive_preimage(timer)).digest())
    return "".join("abcdefghijklmnopqrstuvwxyz234567"[int(bits[at : at + 5], 2)] for at in range(0, 130, 5))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["note"])
def test_published_vectors_hold(vector: dict[str, Any]):
    """Every published key has its published reference, also by a second, naive way of computing it."""
    assert derive_timer_ref(key_of(vector["timer"])) == vector["timer_ref"]
    assert naive_preimage(vector["timer"]).hex() == vector["hashed_hex"]
    assert naive_ref(vector["timer"]) == vector["timer_ref"]


def test_published_vectors_are_worth_publishing():
    """Every published part is a valid one, and different keys have different references."""
    for vector in VECTORS:
        assert [check_key_part(part) for part in vector["timer"].values()] == [None] * len(vector["timer"])
        assert is_timer_ref(vector["timer_ref"])
    assert len({v["timer_ref"] for v in VECTORS}) == len({v["hashed_hex"] for v in VECTORS}) == len(VECTORS) - 1


def test_both_naive_and_fast_derivation_agree_on_many_keys():
    """Over thousands of keys every base32 character is taken from the right bits."""
    for number in range(2_000):
        timer = {"namespace": f"n{number % 7}", "name": str(number)}
        assert derive_timer_ref(key_of(timer)) == naive_ref(timer)


DIFFERENT = {
    "a border moved between namespace and name": (NameKey("c", "ab"), NameKey("bc", "a")),
    "a border moved inside a lineage": (LineageKey("ab", "c", "r", "n"), LineageKey("a", "bc", "r", "n")),
    "two parts swapped": (LineageKey("a", "b", "c", "d"), LineageKey("a", "c", "b", "d")),
    "namespace and name swapped": (NameKey("a", "b"), NameKey("b", "a")),
    "another case": (NameKey("Invoice"), NameKey("invoice")),
    "spaces around": (NameKey("invoice"), NameKey(" invoice ")),
    "composed and decomposed": (NameKey("Gr\u00fc\u00dfe"), NameKey("Gru\u0308\u00dfe")),
    "folded": (NameKey("Gr\u00fc\u00dfe"), NameKey("Gr\u00fcsse")),
    "a compatibility form": (NameKey("\ufb01n"), NameKey("fin")),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_keys_that_differ_in_a_byte_are_different_timers(one: TimerKey, other: TimerKey):
    """Nothing is folded, normalised or trimmed, and no part can lend characters to its neighbour."""
    assert one != other
    assert derive_timer_ref(one) != derive_timer_ref(other)


def test_a_name_without_namespace_is_in_the_default_namespace():
    """Leaving the namespace out and writing "default" name the same timer."""
    assert NameKey("x") == NameKey("x", "default")
    assert derive_timer_ref(NameKey("x")) == derive_timer_ref(NameKey("x", "default"))


def test_keys_are_values():
    """Keys are immutable, equal by content and usable in sets; a lineage never equals a name."""
    key = LineageKey("f", "1", "r", "n")
    assert {key, LineageKey("f", "1", "r", "n"), NameKey("f")} == {key, NameKey("f")}
    with pytest.raises(AttributeError):
        key.flow_id = "g"  # type: ignore[misc]
    assert msgspec.to_builtins(NameKey("x")) == {"name": "x", "namespace": "default"}


def test_a_key_with_a_lone_surrogate_has_no_reference():
    """What has no UTF-8 form is refused rather than hashed in some made-up form."""
    with pytest.raises(ValueError, match="surrogates"):
        derive_timer_ref(NameKey("\ud800"))


GOOD_PARTS = {
    "one byte": "x",
    "256 bytes": "x" * 256,
    "256 bytes of two-byte characters": "ü" * 128,
    "256 bytes of four-byte characters": "😀" * 64,
    "256 bytes of mixed characters": "x" * 253 + "€",
    "spaces": "  ",
    "punctuation": "a.b*c>d/e\"f'g\\h",
    "umlauts": "Grüße",
    "the first after the second control block": "\u00a0",
    "the last before the second control block": "~",
    "zero width and direction marks are not of category Cc": "\u200b\u200f\ufeff",
    "line and paragraph separators are not of category Cc": "\u2028\u2029",
    "a private character": "\ue000",
    "an unassigned character": "\u0378",
    "a noncharacter": "\uffff",
    "the last code point": "\U0010ffff",
}


@pytest.mark.parametrize("part", GOOD_PARTS.values(), ids=GOOD_PARTS.keys())
def test_a_part_of_1_to_256_bytes_is_taken(part: str):
    """Any characters but controls may be in a part, counted in bytes of UTF-8."""
    assert check_key_part(part) is None


BAD_PARTS = {
    "empty": ("", "is empty"),
    "257 bytes": ("x" * 257, "has 257 bytes"),
    "257 bytes in fewer characters": ("ü" * 128 + "x", "has 257 bytes"),
    "260 bytes in 65 characters": ("😀" * 65, "has 260 bytes"),
    "high surrogate": ("a\ud800", "surrogate"),
    "low surrogate": ("\udfffb", "surrogate"),
    "surrogates as a pair of halves": ("\ud83d\ude00", "surrogate"),
    "control at the end": ("abc\n", r"control character U\+000A"),
    "control among others": ("Grüße\u0085!", r"control character U\+0085"),
}


@pytest.mark.parametrize(("part", "reason"), BAD_PARTS.values(), ids=BAD_PARTS.keys())
def test_a_bad_part_is_refused_with_the_reason(part: str, reason: str):
    """Empty, too long in bytes, with controls or lone surrogates: refused, and the text says which."""
    found = check_key_part(part)
    assert found is not None
    assert re.search(reason, found)


def test_exactly_the_control_characters_are_refused():
    """Surrogates apart, a part may hold every code point but those of Unicode category Cc."""
    everything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    refused = {character for character in everything if check_key_part(character) is not None}
    assert refused == {character for character in everything if unicodedata.category(character) == "Cc"}


@pytest.mark.parametrize("text", ["a" * 26, "z" * 26, "2" * 26, "7" * 26, REF])
def test_the_form_of_a_reference_is_recognised(text: str):
    """26 characters of a-z and 2-7 are a reference."""
    assert is_timer_ref(text)


@pytest.mark.parametrize(
    "text",
    ["", "a" * 25, "a" * 27, "A" * 26, "a" * 25 + "1", "a" * 25 + "8", "a" * 25 + "0", "a" * 26 + "\n",
     " " + "a" * 25, "a" * 25 + "=", "a" * 25 + ".", "a" * 25 + "ä", "a" * 25 + "\uff41"],
)  # fmt: skip
def test_everything_else_is_no_reference(text: str):
    """Another length, case or alphabet, or something around it, is no reference."""
    assert not is_timer_ref(text)


@pytest.mark.parametrize("generation", [0, 1, 9, 10, 2**53, 10**18])
def test_an_occurrence_id_is_read_back(generation: int):
    """Reference and generation come back from the id that was made of them."""
    text = occurrence_id(REF, generation)
    assert text == f"{REF}.{generation}"
    assert parse_occurrence_id(text) == (REF, generation)


@pytest.mark.parametrize(
    "text",
    ["", REF, f"{REF}.", ".0", f"{REF}.00", f"{REF}.01", f"{REF}.-1", f"{REF}.+1", f"{REF}. 1", f"{REF}.1\n",
     f"{REF}.1.2", f"{REF}.1_0", f"{REF}.1٣", f"{REF[:-1]}.1", f"{REF}x.1", f"{REF.upper()}.1",
     f"{REF}.{'9' * 5_000}"],
)  # fmt: skip
def test_an_occurrence_id_has_one_spelling(text: str):
    """Anything that was not made by `occurrence_id` is refused, so equal occurrences have equal texts."""
    with pytest.raises(ValueError, match="not an occurrence id"):
        parse_occurrence_id(text)
