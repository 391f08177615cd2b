"""Names of test cases that are the same in every process."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def stable_id(part: object) -> str:
    """What ``ascii`` says, without memory addresses, and short."""
    return _ADDRESS.sub("", ascii(part))[:60]
