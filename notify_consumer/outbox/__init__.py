"""The outbox: where a resume is kept from its arrival until its feedback is settled.

Stores are named by a URL; ``make_outbox`` makes one. ``base`` says what each of them promises.
"""

from __future__ import annotations

from notify_consumer.errors import BadSetting
from notify_consumer.outbox.base import Outbox
from notify_consumer.outbox.sqlite import SqliteOutbox

_SQLITE = "sqlite:"


def make_outbox(url: str, *, create: bool = True) -> Outbox:
    """The store that ``url`` names, not opened yet; without ``create`` it must be there. Raises BadSetting."""
    check_outbox(url)
    return SqliteOutbox(url.removeprefix(_SQLITE).removeprefix("//"), create=create)


def check_outbox(url: str) -> str:
    """``url``, when it names a store of a known kind. Raises BadSetting."""
    if not url.startswith(_SQLITE) or not url.removeprefix(_SQLITE).removeprefix("//"):
        raise BadSetting(f"{url!r} names no known store: give sqlite:PATH")
    return url
