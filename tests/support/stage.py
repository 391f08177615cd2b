"""A broker with a service on it, shared by the tests of one module, and a desk for each test."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.broker import Broker
from tests.support.service import Desk, Service


@dataclass
class Stage:
    """What one module plays on."""

    broker: Broker
    service: Service
    folder: Path


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Broker and service of a module, which may set FLAGS and SETTINGS for the service."""
    folder = tmp_path_factory.mktemp("stage")
    flags = getattr(request.module, "FLAGS", ())
    settings = getattr(request.module, "SETTINGS", {})
    with Broker(folder / "nats") as broker, Service(broker.url, folder, *flags, **settings) as service:
        failed = request.session.testsfailed
        yield Stage(broker, service, folder)
        if request.session.testsfailed > failed:
            sys.stderr.write(f"\n--- {service.log_file.name}\n{service.log_tail()}\n")


@pytest.fixture
async def desk(stage: Stage) -> AsyncIterator[Desk]:
    """The module's broker, when its service is ready."""
    await stage.service.ready()
    async with Desk.at(stage.broker.url) as opened:
        yield opened


@pytest.fixture
def service(stage: Stage) -> Service:
    """The module's service."""
    return stage.service
