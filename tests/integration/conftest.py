"""The stage for tests with real processes, and what tests of single pieces stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.broker import Broker
from tests.support.notify_bench import Bench
from tests.support.stage import desk, service, stage
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.publish import Publisher

__all__ = ["bench", "connection", "desk", "publisher", "service", "stage"]


@pytest.fixture
async def connection(broker: Broker) -> AsyncIterator[Connection]:
    opened = Connection(broker.url, name="test")
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def publisher(connection: Connection) -> AsyncIterator[Publisher]:
    started = Publisher(connection)
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def bench(broker: Broker, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(broker.url, tmp_path)
    await made.connect()
    await made.provide_streams()
    yield made
    await made.nats.close()
