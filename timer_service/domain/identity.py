"""Who a timer is: keys, the references derived from them, and the ids of its occurrences.

A key names a timer in full and is handed back whole. Subjects and KV keys only ever carry the `TimerRef`,
whose alphabet (a-z, 2-7) is safe in both and whose length does not depend on the key. Key parts count byte
for byte: nothing here folds case, normalises Unicode or trims.
"""

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import NewType

import msgspec

TimerRef = NewType("TimerRef", str)

REF_LENGTH = 26
KEY_PART_MAX_BYTES = 256
DEFAULT_NAMESPACE = "default"


class LineageKey(msgspec.Struct, frozen=True, gc=False):
    """Key of a timer node in one run of a released flow."""

    flow_id: str
    flow_version: str
    root_execution_id: str
    node_id: str


class NameKey(msgspec.Struct, frozen=True, gc=False):
    """Key of a timer that belongs to no flow."""

    name: str
    namespace: str = DEFAULT_NAMESPACE


TimerKey = LineageKey | NameKey

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
# One look-up per ten bits. Against base64.b32encode this makes a reference about three times cheaper.
_PAIRS = tuple(high + low for high in _ALPHABET for low in _ALPHABET)

_REF = re.compile(r"[a-z2-7]{26}")
_OCCURRENCE = re.compile(r"([a-z2-7]{26})\.(0|[1-9][0-9]{0,18})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _framed(part: str) -> bytes:
    raw = part.encode()
    return len(raw).to_bytes(4, "big") + raw


_FLOW_TAG = _framed("flow")
_NAME_TAG = _framed("name")


def derive_timer_ref(key: TimerKey) -> TimerRef:
    """Return the reference of `key`: 26 characters of a-z and 2-7, the same for equal keys, for ever.

    Every part goes into the hash behind its byte length, so ("ab", "c") and ("a", "bc") are different timers.
    The parts are taken as they are; check them with `check_key_part` first. A lone surrogate raises
    UnicodeEncodeError (a ValueError).
    """
    if isinstance(key, LineageKey):
        return _hashed(_FLOW_TAG, (key.flow_id, key.flow_version, key.root_execution_id, key.node_id))
    return _hashed(_NAME_TAG, (key.namespace, key.name))


def _hashed(tag: bytes, parts: Iterable[str]) -> TimerRef:
    framed = tag
    for part in parts:
        raw = part.encode()
        framed += len(raw).to_bytes(4, "big") + raw
    return TimerRef(_base32_head(sha256(framed).digest()))


def _base32_head(digest: bytes) -> str:
    """Return the first 26 base32 characters of `digest`: three groups of 40 bits, then 10 more."""
    pairs = _PAIRS
    a = int.from_bytes(digest[:5], "big")
    b = int.from_bytes(digest[5:10], "big")
    c = int.from_bytes(digest[10:15], "big")
    return (
        f"{pairs[a >> 30]}{pairs[a >> 20 & 1023]}{pairs[a >> 10 & 1023]}{pairs[a & 1023]}"
        f"{pairs[b >> 30]}{pairs[b >> 20 & 1023]}{pairs[b >> 10 & 1023]}{pairs[b & 1023]}"
        f"{pairs[c >> 30]}{pairs[c >> 20 & 1023]}{pairs[c >> 10 & 1023]}{pairs[c & 1023]}"
        f"{pairs[digest[15] << 2 | digest[16] >> 6]}"
    )


def is_timer_ref(text: str) -> bool:
    """Say whether `text` has the form of a reference: exactly 26 characters of a-z and 2-7."""
    return _REF.fullmatch(text) is not None


def occurrence_id(ref: TimerRef, generation: int) -> str:
    """Return the id of one occurrence, `<ref>.<generation>`: the idempotency key of its resume."""
    return f"{ref}.{generation}"


def parse_occurrence_id(text: str) -> tuple[TimerRef, int]:
    """Return reference and generation of an occurrence id; ValueError for anything else.

    Only the one spelling is read (no sign, space or leading zero), so two ids are equal exactly when their
    texts are. Generations of more than 19 digits are refused: no timer gets there.
    """
    match = _OCCURRENCE.fullmatch(text)
    if match is None:
        raise ValueError(f"not an occurrence id: {text[:80]!r}")
    return TimerRef(match[1]), int(match[2])


def check_key_part(text: str) -> str | None:
    """Return why `text` may not be a part of a key, or None when it may.

    A part has 1 to 256 bytes of UTF-8, no control characters (U+0000-1F, U+007F-9F) and no lone surrogates.
    """
    if text.isascii() and text.isprintable() and 0 < len(text) <= KEY_PART_MAX_BYTES:
        return None  # nearly every key ends here
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "contains a lone surrogate"
    if size == 0:
        return "is empty"
    if size > KEY_PART_MAX_BYTES:
        return f"has {size} bytes of UTF-8, the limit is {KEY_PART_MAX_BYTES}"
    control = _CONTROL.search(text)
    return None if control is None else f"contains the control character U+{ord(control[0]):04X}"
