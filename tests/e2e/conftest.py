"""The stage for tests with real processes, and two quiet minutes beside all other tests."""

from __future__ import annotations

import pytest

from tests.support.stage import desk, service, stage
from tests.support.steady import Steady

__all__ = ["desk", "service", "stage", "steady"]

_STEADY = pytest.StashKey[Steady]()


def _wants_it(item: pytest.Item) -> bool:
    return "steady" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for the two minutes comes last, whatever the order of the rest."""
    items.sort(key=_wants_it)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start it with the first test, if its own is among those to run."""
    if not session.config.option.collectonly and any(map(_wants_it, session.items)):
        session.config.stash[_STEADY] = Steady()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Do not outlive the run."""
    if _STEADY in session.config.stash:
        session.config.stash[_STEADY].close()


@pytest.fixture
def steady(request: pytest.FixtureRequest) -> Steady:
    """Two minutes of a quiet service, begun with the run."""
    return request.config.stash[_STEADY]
