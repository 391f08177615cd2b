"""The outbox: where a resume is kept from its arrival until its feedback is settled.

Stores are named by a URL; ``make_outbox`` makes one. ``base`` says what each of them promises.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qsl

from notify_consumer.errors import BadSetting
from notify_consumer.outbox.base import Outbox
from notify_consumer.outbox.nats_kv import NatsOutbox
from notify_consumer.outbox.sqlite import SqliteOutbox
from timer_service.config import DEFAULT_NATS_URL
from timer_service.jetstream.topology import OUTBOX_MAX_BYTES
from timer_service.urls import shown_url

FORMS = "sqlite:PATH, nats, postgresql://USER@HOST/DATABASE or mongodb://USER@HOST/DATABASE"


def make_outbox(
    url: str,
    *,
    create: bool = True,
    nats: str = DEFAULT_NATS_URL,
    creds: str | None = None,
    timeout_ms: int = 5_000,
) -> Outbox:
    """The store that ``url`` names, not opened yet; without ``create`` it must be there. Raises BadSetting.

    What follows is for ``nats``, which lies on the broker of this process.
    """
    if url.partition("?")[0] == "nats":
        sizes = _NATS_SIZES | _nats_options(url)
        replicas, max_bytes = sizes["replicas"], sizes["max_bytes"]
        return NatsOutbox(
            nats, creds=creds, timeout_ms=timeout_ms, replicas=replicas, max_bytes=max_bytes, create=create
        )
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


def _nats_options(url: str) -> dict[str, int]:
    """How the bucket is made where it is missing, from ``nats?replicas=3&max_bytes=…``."""
    _, asked, query = url.partition("?")
    try:
        given = {name: int(value) for name, value in parse_qsl(query, strict_parsing=bool(asked))}
    except ValueError as error:
        raise BadSetting(f"{url!r}: {error}; give nats or {_NATS_FORM}") from None
    for name, value in given.items():
        least, most = _NATS_LIMITS.get(name, (1, 0))
        if not least <= value <= most:
            raise BadSetting(f"{url!r}: give nats or {_NATS_FORM}, replicas up to 5, max_bytes 1048576 or more")
    return given


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


_NATS_SIZES = {"replicas": 1, "max_bytes": OUTBOX_MAX_BYTES}
_NATS_LIMITS = {"replicas": (1, 5), "max_bytes": (2**20, 2**53)}
_NATS_FORM = "nats?replicas=NUMBER&max_bytes=NUMBER"
_KINDS: dict[str, Callable[[str, bool], Outbox]] = {
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    "mongodb": _mongodb,
}
