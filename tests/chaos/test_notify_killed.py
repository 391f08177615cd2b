"""Notify consumer processes, frozen and stopped as an operator would do it; see also test_notify_replicas.py."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from notify_consumer.outbox.base import State
from tests.support.broker import Broker
from tests.support.notify import until
from tests.support.notify_crew import Crew


@pytest.fixture
async def crew(broker: Broker, tmp_path: Path) -> AsyncIterator[Crew]:
    async with Crew.at(broker.url, tmp_path) as made:
        await made.provide_streams()
        yield made


async def test_a_frozen_process_that_comes_back_changes_nothing(crew: Crew) -> None:
    """SIGSTOP past the lease; another takes over; the frozen one goes on and is refused, its handler ended."""
    first = await crew.consumer("first")
    await crew.publish("a-1")
    await crew.notes("begin a-1 first")
    first.signal(signal.SIGSTOP)
    await crew.consumer("second", lease_ms=60_000)
    await crew.notes("begin a-1 second")
    first.signal(signal.SIGCONT)
    await until(first.lost, "the first one notices")
    crew.open_gate()
    row = await crew.reaches(State.DONE, "a-1")
    assert row.attempts == 2
    assert crew.journal() == ["begin a-1 first", "begin a-1 second", "end a-1 second"]
    assert len(crew.commands) == 1


@pytest.mark.parametrize("name", ["thread-1", "stubborn-1"])
async def test_what_cannot_be_stopped_does_not_hold_up_the_exit(crew: Crew, name: str) -> None:
    """A thread that hangs, and a handler that ignores its cancellation: exit 0 after the grace all the same."""
    first = await crew.consumer("first", drain_grace_ms=100, lease_ms=600_000)
    await crew.publish(name)
    await crew.notes(f"begin {name} first")
    first.signal(signal.SIGTERM)
    assert await first.ends() == 0
    row = await crew.row(name)
    assert row is not None
    assert row.state is State.CLAIMED


async def test_a_second_signal_ends_at_once(crew: Crew) -> None:
    """The first signal drains; the second kills, whatever runs."""
    first = await crew.consumer("first", drain_grace_ms=600_000)
    await crew.publish("a-1")
    await crew.notes("begin a-1 first")
    first.signal(signal.SIGTERM)
    await until(lambda: first.logged("service.draining"))
    first.signal(signal.SIGTERM)
    assert await first.ends() == -signal.SIGTERM


async def test_an_idle_process_stops_cleanly(crew: Crew) -> None:
    """SIGINT without work: exit 0, and nothing on the log above a warning."""
    first = await crew.consumer("first")
    first.signal(signal.SIGINT)
    assert await first.ends() == 0
    assert first.logged("service.stopped")
    assert not [line for event in ("work.failed",) for line in first.logged(event)]
