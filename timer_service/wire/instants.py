"""RFC 3339 date-times to epoch milliseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_RFC3339 = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})[Tt](\d{2}):(\d{2}):(\d{2})(?:\.(\d+))?(?:[Zz]|([+-])(\d{2}):(\d{2}))",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_instant_ms(text: str) -> int:
    """Epoch milliseconds of an RFC 3339 date-time with offset; finer fractions round up.

    Raises ValueError with a reason. Second 60 is refused: no clock here has leap seconds.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError("not an RFC 3339 date-time with an offset (such as 2030-01-31T12:00:00Z)")
    fraction, sign, offset_hours, offset_minutes = match.group(7, 8, 9, 10)
    year, month, day, hour, minute, second = (int(part) for part in match.group(1, 2, 3, 4, 5, 6))
    instant = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    seconds = (instant - _EPOCH) // timedelta(seconds=1)
    return (seconds - _offset_seconds(sign, offset_hours, offset_minutes)) * 1000 + _millis_up(fraction)


def _offset_seconds(sign: str | None, hours: str, minutes: str) -> int:
    if sign is None:
        return 0
    if int(hours) > 23 or int(minutes) > 59:
        raise ValueError("the offset is out of range")
    seconds = int(hours) * 3600 + int(minutes) * 60
    return -seconds if sign == "-" else seconds


def _millis_up(fraction: str | None) -> int:
    if not fraction:
        return 0
    return int(fraction[:3].ljust(3, "0")) + (1 if fraction[3:].strip("0") else 0)


def format_instant(at_ms: int) -> str:
    """The instant as RFC 3339 in UTC with milliseconds."""
    return (_EPOCH + timedelta(milliseconds=at_ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
