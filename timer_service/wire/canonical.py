"""JSON without tolerance: strict reading, and the one spelling (RFC 8785) that hashes are taken over.

Both directions keep integers of any size, past the digit limit of `int()` and `str()`, and leave that
process-wide limit alone. Both refuse what two readers could understand differently: duplicate keys, NaN,
Infinity, numbers beyond a double, lone surrogates. What `canonical_json` writes, `strict_loads` reads.

The canonical form is for hashing, not for sending or storing: it writes the doubles 1.0 and -0.0 as 1 and 0, as
the RFC asks. `exact_json` keeps them.
"""

import json
import re
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, Inexact
from hashlib import sha256
from math import isfinite
from typing import Any, Final, NoReturn

import msgspec

MAX_DEPTH: Final = 256


class MalformedJson(ValueError):
    """Not JSON as this service takes it; the text says why, in a few words."""


_TOO_DEEP: Final = f"nested deeper than {MAX_DEPTH} levels"
_SURROGATE: Final = "lone surrogate in a string"

# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def strict_loads(body: bytes) -> object:
    """Return the value of one JSON text in UTF-8; MalformedJson for anything that is not exactly that.

    Refused, besides broken syntax: a byte order mark, other encodings, duplicate keys, NaN and Infinity,
    numbers that overflow a double, lone surrogates (escaped ones too), anything after the value, more than
    `MAX_DEPTH` levels. Integers of any size come back as int, all other numbers as float. The limit on the
    size of `body` is the caller's.
    """
    text = _decoded(body)
    value = _parsed(text)
    # Two cheap tests clear nearly every message: too few brackets to be deep, no escape that could be half
    # a character.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _survey(value)
    if "\\u" in text:
        _check_escapes(text)
    return value


def _decoded(body: bytes) -> str:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise MalformedJson(f"not UTF-8 at byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise MalformedJson("begins with a byte order mark")
    return text


def _parsed(text: str) -> object:
    try:
        return _scanned(text)
    except json.JSONDecodeError as error:
        raise MalformedJson(f"{error.msg.removesuffix(' at')}, at character {error.pos}") from None
    except RecursionError:
        raise MalformedJson(_TOO_DEEP) from None


def _scanned(text: str) -> object:
    try:
        return _DECODER.decode(text)
    except (MalformedJson, json.JSONDecodeError):
        raise
    except ValueError:
        # An integer past the digit limit of int(). So rare that such a body may be read twice; a hook for all
        # integers would slow down every message.
        return _LONG_DECODER.decode(text)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise MalformedJson(f"duplicate key {_first_repeated(pairs)[:64]!r}")
    return members


def _first_repeated(pairs: list[tuple[str, object]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return key


def _float(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise MalformedJson(f"the number {digits[:32]} overflows a double")
    return value


def _constant(name: str) -> NoReturn:
    raise MalformedJson(f"{name} is not a JSON number")


def _int(digits: str) -> int:
    if len(digits) <= _CHUNK_DIGITS:
        return int(digits)
    return -_long_int(digits[1:]) if digits[0] == "-" else _long_int(digits)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
_LONG_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_constant=_constant, parse_int=_int
)


_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
# In well-formed JSON every backslash begins an escape, so reading them from left to right keeps them apart.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F])|.)", re.DOTALL
)


def _check_escapes(text: str) -> None:
    """Raise MalformedJson for an escaped surrogate without its other half; raw ones did not survive UTF-8."""
    if _SURROGATE_ESCAPE.search(text) is None:
        return
    for escape in _ESCAPE.finditer(text):
        if escape["lone"]:
            raise MalformedJson(f"{_SURROGATE}, at character {escape.start()}")


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────

_encode: Final = msgspec.json.Encoder().encode
_encode_sorted: Final = msgspec.json.Encoder(order="deterministic").encode


def canonical_json(value: object) -> bytes:
    """Return the canonical UTF-8 spelling of a JSON value: the same bytes whatever the order of keys.

    RFC 8785, except that integers of any size stay in plain digits. Takes exactly dict (with str keys), list,
    str, int, float, bool and None, no subclasses; MalformedJson for other types, NaN, Infinity, lone
    surrogates and more than `MAX_DEPTH` levels.
    """
    has_floats = _survey(value)
    try:
        return (None if has_floats else _quick(value)) or _encode(_spelled(value))
    except UnicodeEncodeError:
        raise MalformedJson(_SURROGATE) from None


def exact_json(value: object) -> bytes:
    """Return a JSON spelling that keeps every value: 1.0 stays 1.0, and members stay in their order.

    For sending. Doubles are written as `repr` does, integers of any size in plain digits. Takes and refuses the
    same as `canonical_json`; what it writes, `strict_loads` reads back equal, type for type.
    """
    _survey(value)
    try:
        return _encode(_exact(value))
    except UnicodeEncodeError:
        raise MalformedJson(_SURROGATE) from None


def payload_sha256(value: object) -> str:
    """Return the lower-case hex SHA-256 of the canonical spelling; raises as `canonical_json` does."""
    return sha256_hex(canonical_json(value))


def sha256_hex(data: bytes) -> str:
    """Return the lower-case hex SHA-256 of `data`."""
    return sha256(data).hexdigest()


_CONTAINERS: Final = frozenset({dict, list})
_TYPES: Final = _CONTAINERS | {str, int, float, bool, type(None)}
_ASTRAL: Final = re.compile(rb"[\xf0-\xf4]")


def _survey(value: object) -> bool:
    """Check types, keys and depth, one level after the other; return whether there is a float anywhere."""
    level: list[Any] = [value]
    seen: set[type] = set()
    key_types: set[type] = set()
    for _ in range(MAX_DEPTH + 1):
        types = set(map(type, level))
        seen |= types
        if types.isdisjoint(_CONTAINERS):
            _refuse_strangers(seen, key_types)
            return float in seen
        level = _opened(level, key_types)
    raise MalformedJson(_TOO_DEEP)


def _opened(level: list[Any], key_types: set[type]) -> list[Any]:
    """Return what is inside the containers of one level; add the types of their keys to `key_types`."""
    inside: list[Any] = []
    for node in level:
        if type(node) is dict:
            key_types.update(map(type, node))
            inside += node.values()
        elif type(node) is list:
            inside += node
    return inside


def _refuse_strangers(types: set[type], key_types: set[type]) -> None:
    for stranger in types - _TYPES:
        raise MalformedJson(f"a {stranger.__name__} is not a JSON value")
    for stranger in key_types - {str}:
        raise MalformedJson(f"a {stranger.__name__} is not a JSON key")


def _quick(value: object) -> bytes | None:
    """Return the canonical spelling of a value without floats, or None where this way could be wrong.

    The encoder escapes as RFC 8785 does but sorts by code point. That differs from UTF-16 order only between
    a character beyond U+FFFF (in UTF-16 a surrogate, D800-DFFF) and one of U+E000-FFFF: both must be there.
    The lead bytes of those ranges are F0-F4 and EE, EF, and in UTF-8 no other byte looks like them.
    """
    try:
        out = _encode_sorted(value)
    except UnicodeEncodeError:
        raise
    except ValueError:
        return None  # an integer past the digit limit of str()
    in_doubt = not out.isascii() and (b"\xee" in out or b"\xef" in out) and _ASTRAL.search(out)
    return None if in_doubt else out


def _spelled(value: Any) -> Any:
    """Return `value` with keys in UTF-16 order and ready-made text for what the encoder spells otherwise."""
    kind = type(value)
    if kind is dict:
        spelled = {}
        for key in sorted(value, key=_utf16):  # no comprehension: in Python 3.11 it doubles the stack
            spelled[key] = _spelled(value[key])
        return spelled
    if kind is list:
        return list(map(_spelled, value))
    if kind is float:
        return msgspec.Raw(_es6_number(value).encode())
    if kind is int and value.bit_length() > _CHUNK_BITS:
        return msgspec.Raw(_long_digits(value).encode())
    return value


def _exact(value: Any) -> Any:
    """Return `value` with ready-made text for the numbers that the encoder spells otherwise or not at all."""
    kind = type(value)
    if kind is dict:
        exact = {}
        for key, inner in value.items():
            exact[key] = _exact(inner)
        return exact
    if kind is list:
        return list(map(_exact, value))
    if kind is float:
        return msgspec.Raw(_finite(value).encode())
    if kind is int and value.bit_length() > _CHUNK_BITS:
        return msgspec.Raw(_long_digits(value).encode())
    return value


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-be")


def _es6_number(value: float) -> str:
    """Return `value` as ECMAScript writes it: the same shortest digits as in Python, differently laid out."""
    text = _finite(value)
    if value == 0:
        return "0"  # -0.0 too
    mantissa, scientific, exponent = text.partition("e")
    if not scientific:
        return text.removesuffix(".0")
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    return "-" * (value < 0) + _laid_out(whole + fraction, int(exponent) + 1)


def _finite(value: float) -> str:
    if not isfinite(value):
        raise MalformedJson(f"{value} is not a JSON number")
    return repr(value)


def _laid_out(digits: str, point: int) -> str:
    """Lay out 0.`digits` times 10 to the power of `point`, which Python writes with an exponent.

    ECMAScript does so too, but not from 1e-6 and not below 1e21. In Python exponents begin at 1e16, where a
    double has no more than 17 digits: nothing is left for a fraction.
    """
    if 16 < point <= 21:
        return digits.ljust(point, "0")
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    mantissa = digits if len(digits) == 1 else f"{digits[0]}.{digits[1:]}"
    return f"{mantissa}e{point - 1:+d}"


# ── integers past the digit limit ───────────────────────────────────────────────────────────────────────────
# int() and str() take quadratic time, which is why they are limited. Here the digits are converted in chunks,
# and neighbours are joined pair by pair. So nearly all work is in a few multiplications of large numbers,
# which are faster than quadratic: about 0.1 s for the 262,144 digits that fit into a command.

_CHUNK_DIGITS: Final = 512  # the digit limit cannot be set below 640
_CHUNK_BYTES: Final = 128
_CHUNK_BITS: Final = 8 * _CHUNK_BYTES  # 309 digits
_EXACT: Final = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[Inexact])


def _long_int(digits: str) -> int:
    """Return the integer that `digits` (ASCII, no sign) spell, however many they are."""
    head = len(digits) % _CHUNK_DIGITS
    parts = [int(digits[:head] or "0")]
    parts += [int(digits[at : at + _CHUNK_DIGITS]) for at in range(head, len(digits), _CHUNK_DIGITS)]
    base = 10**_CHUNK_DIGITS
    while len(parts) > 1:
        odd = len(parts) % 2
        parts[odd:] = [parts[at] * base + parts[at + 1] for at in range(odd, len(parts), 2)]
        if len(parts) > 1:
            base *= base
    return parts[0]


def _long_digits(value: int) -> str:
    """Return the decimal digits of `value`, however many they are.

    Joined as Decimals: their multiplication is faster than that of int, and they become text in linear time.
    """
    magnitude = abs(value)
    raw = magnitude.to_bytes(-(-magnitude.bit_length() // _CHUNK_BITS) * _CHUNK_BYTES, "big")
    starts = range(0, len(raw), _CHUNK_BYTES)
    parts = [Decimal(int.from_bytes(raw[at : at + _CHUNK_BYTES], "big")) for at in starts]
    base = Decimal(1 << _CHUNK_BITS)
    while len(parts) > 1:
        odd = len(parts) % 2
        pairs = range(odd, len(parts), 2)
        parts[odd:] = [_EXACT.add(_EXACT.multiply(parts[at], base), parts[at + 1]) for at in pairs]
        if len(parts) > 1:
            base = _EXACT.multiply(base, base)
    return "-" * (value < 0) + str(parts[0])
