"""Fixtures for all tests, and the markers that follow from the folders."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from tests.support.broker import Broker
from tests.support.postgres import Postgres, need_postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent
_LAYERS = frozenset({"unit", "property", "contract", "integration", "chaos", "e2e"})


def pytest_configure() -> None:
    """A shell that starts the suite in the background makes it, and all its children, deaf to SIGINT: undo that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the folder directly under tests/ in which it lies."""
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        layer = item.path.relative_to(_HERE).parts[0]
        if layer in _LAYERS:
            item.add_marker(layer)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """A command that runs within a test sets up logging for its own output, which is closed before the next test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A running broker for one test alone, which may kill and freeze it."""
    with Broker(tmp_path / "nats") as running:
        yield running


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for the whole run: for tests that use streams of their own and leave the server alone."""
    with Broker(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server for the whole run: for tests that use a schema of their own and leave the server alone."""
    with Postgres(need_postgres()) as running:
        yield running
