"""The outbox stores that the contract suite runs on, each on a place of its own for one test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from notify_consumer.outbox.base import Outbox
from notify_consumer.outbox.nats_kv import NatsOutbox
from notify_consumer.outbox.sqlite import SqliteOutbox
from notify_consumer.testing import MemoryOutbox
from tests.support.broker import Broker
from tests.support.postgres import Postgres

MONGODB_URL = "NOTIFY_CONSUMER_TEST_MONGODB_URL"
NATS_BYTES = 32 * 2**20


class Store(msgspec.Struct, frozen=True):
    """``make`` makes outboxes on one and the same place; ``source``, run in another process, makes ``outbox`` on it."""

    make: Callable[[], Outbox]
    source: str | None = None
    """None where the place is in this process's memory."""


def _memory(_: pytest.FixtureRequest) -> Store:
    shared = MemoryOutbox()
    return Store(lambda: shared)


def _sqlite(request: pytest.FixtureRequest) -> Store:
    folder: Path = request.getfixturevalue("tmp_path")
    path = str(folder / "folder" / "outbox.db")
    source = f"from notify_consumer.outbox.sqlite import SqliteOutbox\noutbox = SqliteOutbox({path!r})"
    return Store(lambda: SqliteOutbox(path), source)


def _postgres(request: pytest.FixtureRequest) -> Store:
    server: Postgres = request.getfixturevalue("postgres")
    from notify_consumer.outbox.postgres import PostgresOutbox

    url, schema = server.url, f"test {secrets.token_hex(8)}"
    arguments = f"{url!r}, schema={schema!r}"
    source = f"from notify_consumer.outbox.postgres import PostgresOutbox\noutbox = PostgresOutbox({arguments})"
    return Store(lambda: PostgresOutbox(url, schema=schema), source)


def _mongodb_model(_: pytest.FixtureRequest) -> Store:
    from notify_consumer.outbox.mongodb import MongoOutbox
    from tests.support.mongo_model import MongoModel

    server = MongoModel()

    def make() -> MongoOutbox:
        outbox = MongoOutbox("mongodb://model")
        outbox._client = server.client()
        return outbox

    return Store(make)


def _mongodb(request: pytest.FixtureRequest) -> Store:
    url = os.environ.get(MONGODB_URL)
    if not url:
        pytest.skip(f"no MongoDB server: name one in {MONGODB_URL}")
    from notify_consumer.outbox.mongodb import MongoOutbox

    collection = f"test_{secrets.token_hex(8)}"
    arguments = f"{url!r}, collection={collection!r}"
    source = f"from notify_consumer.outbox.mongodb import MongoOutbox\noutbox = MongoOutbox({arguments})"

    def drop() -> None:
        from pymongo import MongoClient

        with MongoClient[dict[str, object]](url) as client:
            for each in (collection, f"{collection}_schema"):
                client.get_default_database("notify_consumer").drop_collection(each)

    request.addfinalizer(drop)
    return Store(lambda: MongoOutbox(url, collection=collection), source)


def _nats(request: pytest.FixtureRequest) -> Store:
    server: Broker = request.getfixturevalue("shared_broker")
    bucket = f"TEST_{secrets.token_hex(8)}"
    arguments = f"{server.url!r}, bucket={bucket!r}, max_bytes={NATS_BYTES}"
    source = f"from notify_consumer.outbox.nats_kv import NatsOutbox\noutbox = NatsOutbox({arguments})"
    return Store(lambda: NatsOutbox(server.url, bucket=bucket, max_bytes=NATS_BYTES), source)


STORES: dict[str, Callable[[pytest.FixtureRequest], Store]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgres": _postgres,
    "mongodb": _mongodb,
    "mongodb-model": _mongodb_model,
    "nats": _nats,
}
SHARED = [name for name in STORES if name not in ("memory", "mongodb-model")]
"""Stores that several processes can use."""
