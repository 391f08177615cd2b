"""The outbox: where a resume is kept from its arrival until its feedback is settled.

Stores are named by a URL; ``make_outbox`` makes one. ``base`` says what each of them promises.
"""

from __future__ import annotations

from collections.abc import Callable

from notify_consumer.errors import BadSetting
from notify_consumer.outbox.base import Outbox
from notify_consumer.outbox.sqlite import SqliteOutbox
from timer_service.urls import shown_url

FORMS = "sqlite:PATH, postgresql://USER@HOST/DATABASE or mongodb://USER@HOST/DATABASE"


def make_outbox(url: str, *, create: bool = True) -> Outbox:
    """The store that ``url`` names, not opened yet; without ``create`` it must be there. Raises BadSetting."""
    kind, colon, rest = url.partition(":")
    make = _KINDS.get(kind)
    if make is None or not colon or not rest.removeprefix("//"):
        raise BadSetting(f"{shown_url(url)!r} names no known store: give {FORMS}")
    try:
        return make(url, create)
    except BadSetting as error:
        raise BadSetting(f"{shown_url(url)!r}: {error}; give {FORMS}") from None


def check_outbox(url: str) -> str:
    """``url``, when it names a store that can be made. Nothing is connected. Raises BadSetting."""
    make_outbox(url)
    return url


def _sqlite(url: str, create: bool) -> Outbox:
    return SqliteOutbox(url.removeprefix("sqlite:").removeprefix("//"), create=create)


def _postgres(url: str, create: bool) -> Outbox:
    try:
        from notify_consumer.outbox.postgres import PostgresOutbox
    except ImportError as error:
        raise _missing("postgres", error) from None
    return PostgresOutbox(url, create=create)


def _mongodb(url: str, create: bool) -> Outbox:
    try:
        from notify_consumer.outbox.mongodb import MongoOutbox
    except ImportError as error:
        raise _missing("mongodb", error) from None
    return MongoOutbox(url, create=create)


def _missing(extra: str, error: ImportError) -> BadSetting:
    return BadSetting(f"its driver is not installed ({error}): pip install durable-timer[{extra}]")


_KINDS: dict[str, Callable[[str, bool], Outbox]] = {
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    "mongodb": _mongodb,
}
