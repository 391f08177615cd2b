"""Cases C25, C31, C32 and C33: several notify consumers on one outbox, as processes.

A gate that the test opens stands for the two seconds of a hand-off: what must not happen meanwhile has as long as the
test needs to look for it, several leases at least.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from notify_consumer.outbox.base import Row, State
from tests.support.broker import Broker
from tests.support.notify import until
from tests.support.notify_crew import Crew
from tests.support.outbox_urls import on_all_stores, on_two_stores, outbox_url
from timer_service.jetstream.topology import RESUME_CONSUMER, RESUMES

__all__ = ["outbox_url"]

SHARE = 16  # of 32 slots, for one flow
LEASE_MS = 3_000  # a busy machine must not stop a process for as long


@pytest.fixture
async def crew(broker: Broker, tmp_path: Path, outbox_url: str) -> AsyncIterator[Crew]:
    async with Crew.at(broker.url, tmp_path, outbox_url) as made:
        await made.provide_streams()
        yield made


async def leases_pass(crew: Crew, name: str, count: int = 2) -> None:
    """Wait until the lease of ``name`` has been prolonged by ``count`` times its length."""

    async def until_ms() -> int:
        row = await crew.row(name)
        assert row is not None
        assert row.claimable_at_ms is not None
        return row.claimable_at_ms

    first = await until_ms()

    async def prolonged() -> bool:
        return await until_ms() - first > count * LEASE_MS

    await until(prolonged, f"{count} leases of {name}")


@on_two_stores
async def test_c25_two_hundred_slow_hand_offs_on_two_replicas(crew: Crew) -> None:
    """200 resumes, two processes: all acknowledged while handlers run, none handed off twice, leases or not."""
    await crew.consumer("first", lease_ms=LEASE_MS)
    await crew.consumer("second", lease_ms=LEASE_MS)
    names = [f"slow-{n}" for n in range(200)]
    await crew.publish(*names)
    await until(lambda: len(crew.begun()) == 2 * SHARE, "both take their share")
    await crew.all_read()
    info = await crew.api(f"CONSUMER.INFO.{RESUMES}.{RESUME_CONSUMER}")
    assert (info["num_ack_pending"], info["num_redelivered"]) == (0, 0)
    await leases_pass(crew, crew.begun()[0])
    assert len(crew.begun()) == 2 * SHARE
    crew.open_gate()
    await crew.all_reach(State.DONE, len(names))
    assert Counter(crew.begun()) == Counter(names)
    assert {row.attempts for row in await crew.rows()} == {1}
    assert len(crew.commands) == len(names)


async def test_c31_a_stop_during_hand_offs_of_twice_the_lease(crew: Crew) -> None:
    """SIGTERM: not ready at once, leases kept, nothing begun any more; the other does the rest; nothing twice."""
    first = await crew.consumer("first", drain_grace_ms=60_000, lease_ms=LEASE_MS)
    names = [f"slow-{n}" for n in range(40)]
    await crew.publish(*names)
    await until(lambda: len(crew.begun("first")) == SHARE, "the first takes its share")
    await crew.all_read()
    await crew.consumer("second", lease_ms=600_000)
    first.signal(signal.SIGTERM)
    await until(lambda: first.logged("service.draining"))
    assert not await asyncio.to_thread(first.ready)
    await crew.publish("slow-late")
    crew.open_gate("second")
    await crew.all_reach(State.DONE, 41 - SHARE)
    await leases_pass(crew, crew.begun("first")[0])
    assert {pid_of(row) for row in await crew.rows() if row.state is State.CLAIMED} == {first.process.pid}
    assert first.process.returncode is None
    assert not await asyncio.to_thread(first.ready)  # still answered: HTTP goes last
    crew.open_gate("first")
    assert await first.ends() == 0
    assert len(crew.begun("first")) == SHARE
    assert Counter(crew.begun()) == Counter([*names, "slow-late"])
    assert {(row.state, row.attempts) for row in await crew.rows()} == {(State.DONE, 1)}
    assert len(crew.commands) == 41


async def test_c31_what_is_over_at_the_deadline_is_not_waited_for(crew: Crew) -> None:
    """Hand-offs that outlast the grace: exit 0 by then, and the other process has them without waiting for leases."""
    first = await crew.consumer("first", drain_grace_ms=2 * LEASE_MS, lease_ms=600_000)
    names = [f"slow-{n}" for n in range(SHARE)]
    await crew.publish(*names)
    await until(lambda: len(crew.begun("first")) == SHARE)
    second = await crew.consumer("second", lease_ms=600_000)
    first.signal(signal.SIGTERM)
    assert await first.ends() == 0
    await until(lambda: sorted(crew.begun("second")) == sorted(names))
    assert second.process.returncode is None
    crew.open_gate()
    await crew.all_reach(State.DONE, SHARE)


async def test_c32_claims_of_a_killed_process_end_by_themselves(crew: Crew) -> None:
    """SIGKILL with claims held; a process of the same name renews its own leases and not those, and gets them after."""
    first = await crew.consumer("first", instance="host", lease_ms=5_000)
    await crew.publish("old-1", "old-2")
    await until(lambda: len(crew.begun("first")) == 2)
    await first.killed()
    held = [await crew.row(name) for name in ("old-1", "old-2")]
    assert {pid_of(row) for row in held} == {first.process.pid}
    await crew.consumer("second", instance="host", lease_ms=LEASE_MS)
    await crew.publish("new-1")
    await crew.notes("begin new-1 second")
    await leases_pass(crew, "new-1", 1)
    if "old-1" not in crew.begun("second"):  # unless 5 s are over already
        assert await crew.row("old-1") == held[0]
    await until(lambda: sorted(crew.begun("second")) == ["new-1", "old-1", "old-2"], "the claims are recovered")
    crew.open_gate()
    await crew.all_reach(State.DONE, 3)
    assert {row.attempts for row in await crew.rows()} == {1, 2}
    assert len(crew.commands) == 3


@on_all_stores
async def test_c33_replicas_whose_clocks_are_wrong(crew: Crew) -> None:
    """Python's clocks a minute ahead and behind, twice the lease: leases go by the store's clock, none is stolen."""
    first = await crew.consumer("first", lease_ms=30_000)
    await crew.publish("slow-1")
    await crew.notes("begin slow-1 first")
    await crew.consumer("ahead", lease_ms=30_000, env={"AHEAD_MS": "60000"})
    await crew.consumer("behind", lease_ms=30_000, env={"AHEAD_MS": "-60000"})
    await crew.publish(*(f"other-{n}" for n in range(3 * SHARE - 1)))
    await until(lambda: len(crew.begun()) == 3 * SHARE, "all three work")
    assert pid_of(await crew.row("slow-1")) == first.process.pid
    crew.open_gate()
    await crew.all_reach(State.DONE, 3 * SHARE)
    assert {row.attempts for row in await crew.rows()} == {1}
    assert len(set(crew.begun())) == len(crew.begun()) == 3 * SHARE


def pid_of(row: Row | None) -> int:
    """The process that a row is leased to."""
    assert row is not None
    return int((row.owner or "//").split("/")[1])
