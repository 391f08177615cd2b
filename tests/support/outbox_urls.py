"""Outbox stores by their URL, each with a place of its own for one test, for tests that run whole consumers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.outboxes import MONGODB_URL, NATS_BYTES
from tests.support.postgres import Postgres


def _sqlite(request: pytest.FixtureRequest) -> str:
    folder: Path = request.getfixturevalue("tmp_path")
    return f"sqlite:{folder / 'outbox.db'}"


def _nats(_: pytest.FixtureRequest) -> str:
    """On the broker of the consumer: tests that share one share this store."""
    return f"nats?max_bytes={NATS_BYTES}"


def _postgres(request: pytest.FixtureRequest) -> str:
    server: Postgres = request.getfixturevalue("postgres")
    database = f"test_{secrets.token_hex(8)}"
    server.query(f'CREATE DATABASE "{database}"')
    return f"{server.url.rpartition('/')[0]}/{database}"


def _mongodb(_: pytest.FixtureRequest) -> str:
    url = os.environ.get(MONGODB_URL)
    if not url:
        pytest.skip(f"no MongoDB server: name one in {MONGODB_URL}")
    return url


_MAKERS: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "sqlite": _sqlite,
    "nats": _nats,
    "postgres": _postgres,
    "mongodb": _mongodb,
}

on_all_stores = pytest.mark.parametrize("outbox_url", ["sqlite", "nats", "postgres"], indirect=True)
"""For tests that take ``outbox_url``; without this mark they run on SQLite."""
on_two_stores = pytest.mark.parametrize("outbox_url", ["sqlite", "nats"], indirect=True)
"""The embedded one and the one without transactions."""


@pytest.fixture
def outbox_url(request: pytest.FixtureRequest) -> str:
    """Where the consumers of one test keep their rows."""
    return _MAKERS[getattr(request, "param", "sqlite")](request)
