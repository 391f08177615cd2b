"""What every outbox store promises to several processes: frozen, killed, with a wrong clock, all at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from notify_consumer.outbox.base import Claim, Outbox, State
from tests.support.notify import new_row, until
from tests.support.outbox_process import OutboxProcess
from tests.support.outboxes import SHARED, STORES, Store

LONG_MS = 600_000
LEASE_MS = 300
ROW = new_row()
WRITES = ("store_outcome", "finish", "back_off", "kill", "release")


@pytest.fixture(params=SHARED)
def store(request: pytest.FixtureRequest) -> Store:
    """A place that several processes share."""
    return STORES[request.param](request)


@pytest.fixture
async def outbox(store: Store) -> AsyncIterator[Outbox]:
    made = store.make()
    await made.open()
    yield made
    await made.close()


async def taken(outbox: Outbox, owner: str) -> Claim:
    """A claim of the one row, as soon as it can be had."""

    async def attempt() -> list[Claim]:
        return await outbox.claim(owner, {"x": 1}, LONG_MS)

    claims: list[Claim] = await until(attempt, "the row")
    return claims[0]


async def test_an_owner_frozen_past_its_lease_is_refused(store: Store, outbox: Outbox) -> None:
    """SIGSTOP, the lease runs out, another owner takes the row, SIGCONT: no write of the first one comes through."""
    await outbox.insert([ROW])
    async with OutboxProcess(store) as frozen:
        assert await frozen.ask("claim", "frozen", "x", 1, LEASE_MS) == [ROW.resume_id]
        frozen.signal(signal.SIGSTOP)
        await taken(outbox, "quick")
        before = await outbox.get(ROW.resume_id)
        frozen.tell("write", "store_outcome", ROW.resume_id)  # it lies there when the process wakes up
        frozen.signal(signal.SIGCONT)
        assert await frozen.answer() == "LeaseLost"
        assert [await frozen.ask("write", write, ROW.resume_id) for write in WRITES] == ["LeaseLost"] * len(WRITES)
        assert await frozen.ask("renew", LONG_MS) == [ROW.resume_id]
        assert await frozen.ask("claim", "frozen", "x", 1, LEASE_MS) == []
    assert await outbox.get(ROW.resume_id) == before
    assert before is not None
    assert (before.owner, before.attempts) == ("quick", 2)


async def test_an_owner_frozen_for_a_while_goes_on(store: Store, outbox: Outbox) -> None:
    """Frozen past its lease while nobody took the row: everything it then writes is good."""
    other = new_row("other", lane="y")
    await outbox.insert([ROW, other])
    async with OutboxProcess(store) as frozen:
        assert await frozen.ask("claim", "frozen", "x", 1, LEASE_MS)
        frozen.signal(signal.SIGSTOP)

        async def ran_out() -> bool:
            return "x" in (await outbox.survey(1)).lanes

        await until(ran_out, "the lease has run out")
        frozen.signal(signal.SIGCONT)
        assert await frozen.ask("renew", LONG_MS) == []
        assert await outbox.claim("quick", {"x": 1}, LONG_MS) == []
        assert await frozen.ask("write", "store_outcome", ROW.resume_id) is None
    row = await outbox.get(ROW.resume_id)
    assert row is not None
    assert (row.state, row.attempts) == (State.ANSWERED, 1)


async def test_a_process_whose_clock_is_ahead_takes_nothing_early(store: Store, outbox: Outbox) -> None:
    """C33: 60 s ahead it sees leases of 30 s as they are, and its own end when they should."""
    await outbox.insert([ROW])
    (claim,) = await outbox.claim("right", {"x": 1}, 30_000)
    async with OutboxProcess(store, clock_ahead_s=60) as ahead:
        assert await ahead.ask("claim", "ahead", "x", 1, LEASE_MS) == []
        assert 0 < await ahead.ask("next_in_ms") <= 30_000
        assert await outbox.renew([claim], 30_000) == set()
        await outbox.back_off(claim, 0, "again")
        assert await until(lambda: ahead.ask("claim", "ahead", "x", 1, LEASE_MS), "a claim") == [ROW.resume_id]
        await taken(outbox, "right")  # within the deadline of 20 s: its lease did not begin in a minute
        assert await ahead.ask("write", "store_outcome", ROW.resume_id) == "LeaseLost"


async def test_claims_of_a_killed_process_return_at_their_expiry(store: Store, outbox: Outbox) -> None:
    """C32: SIGKILL while holding claims; one that starts under the same name gets them when they run out, not before.

    Nor does it keep them: what it renews are its own claims.
    """
    await outbox.insert([ROW, new_row("other", lane="y")])
    async with OutboxProcess(store) as first:
        assert await first.ask("claim", "host", "x", 1, LONG_MS) == [ROW.resume_id]
        assert await first.ask("claim", "host", "y", 1, LEASE_MS)
        first.signal(signal.SIGKILL)
    async with OutboxProcess(store) as again:
        assert await until(lambda: again.ask("claim", "host", "y", 1, LONG_MS), "the one that ran out")
        assert await again.ask("claim", "host", "x", 1, LONG_MS) == []
        assert await again.ask("renew", LONG_MS) == []
    row = await outbox.get(ROW.resume_id)
    assert row is not None
    assert (row.state, row.owner, row.attempts) == (State.CLAIMED, "host", 1)


async def test_many_claimers_in_two_processes_share_nothing(store: Store, outbox: Outbox) -> None:
    """Eight claimers in two processes get all of 300 rows between them, and none twice."""
    rows = [new_row(f"r{at}") for at in range(300)]
    await outbox.insert(rows)
    async with OutboxProcess(store) as one, OutboxProcess(store) as two:
        one.tell("contend", "one", "x", 5, 4)
        two.tell("contend", "two", "x", 5, 4)
        answers = [*await asyncio.gather(one.answer(), two.answer())]
        # What the one looked for while the other had it locked is not missed, only left to the other.
        answers.append(await one.ask("contend", "one", "x", 5, 1))
    ids = [resume_id for answer in answers for resume_id in answer]
    assert len(ids) == len(set(ids))
    assert set(ids) == {row.resume_id for row in rows}
