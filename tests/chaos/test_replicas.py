"""Two replicas on one broker: they share the work, race, and one may die."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.service import (
    Desk,
    Engine,
    Service,
    complete,
    encoded,
    eventually,
    lineage_key,
    name_ref,
    ref_of,
    unique,
)
from tests.support.stage import Stage

SETTINGS = {"reconcile_interval_ms": 1_000, "snapshot_grace_ms": 1_000}
DAY_MS = 86_400_000


@pytest.fixture
async def other(stage: Stage, desk: Desk, tmp_path: Path) -> AsyncIterator[Service]:
    """A second replica beside the module's."""
    with Service(stage.broker.url, tmp_path, **SETTINGS) as running:
        yield await running.ready()


async def test_racing_starts_with_different_payloads(desk: Desk, other: Service) -> None:
    """Through two replicas: one wins, the others conflict, and only the winner's payload is kept and resumed."""
    keys, winners = [lineage_key() for _ in range(20)], {}
    async with Engine(desk) as engine:
        for key in keys:
            bodies = [
                encoded({"timer": key, "due": {"delay_ms": 6_000}, "payload": [n, "x" * 2_000]}) for n in range(8)
            ]
            asked = await asyncio.gather(*(desk.asked("durable_timer.commands.start.v1", body) for body in bodies))
            outcomes = [await one.outcome() for one in asked]
            (winners[ref_of(key)],) = [n for n, outcome in enumerate(outcomes) if outcome["status"] == "accepted"]
            assert {outcome["code"] for outcome in outcomes} == {None, "conflict"}
            assert {(outcome["generation"], outcome["fence"]) for outcome in outcomes} == {(0, 1)}
        lost = sum([await desk.snapshots_of(ref) - 1 for ref in winners])
        print(f"{lost} payloads of losers were stored")
        assert lost <= len(keys), "only the first loser of the other replica may store its payload"
        for ref, winner in winners.items():
            resume = await engine.resume_of(ref)
            assert resume["payload"] == [winner, "x" * 2_000]
            await eventually(partial(_one_snapshot, desk, ref), 30, what="the losers' payloads to be swept")
            await engine.reply(resume, "complete")
        for ref in winners:
            await desk.ended(ref)
            assert len(engine.of(ref)) == 1


async def _one_snapshot(desk: Desk, timer_ref: str) -> bool:
    return await desk.snapshots_of(timer_ref) == 1


async def test_a_replica_that_dies_takes_nothing_with_it(desk: Desk, other: Service) -> None:
    """C12: two replicas, one killed in the middle and back later: every timer fires once."""
    names = [unique() for _ in range(300)]
    async with Engine(desk, complete) as engine:
        await desk.send_many(
            "start", [{"timer": {"name": name}, "due": {"delay_ms": 200 + 8 * n}} for n, name in enumerate(names)]
        )
        await eventually(lambda: len(engine.received) > 30)
        other.kill()
        await eventually(lambda: len(engine.received) > 150)
        other.start()
        for name in names:
            assert (await desk.ended(name_ref(name), 30))["status"] == "completed"
            assert await desk.records_of(name_ref(name)) == 1
        for name in names:
            assert len({one.data for one in engine.of(name_ref(name))}) == 1


async def test_racing_starts_of_a_name_that_has_ended(desk: Desk, other: Service) -> None:
    """C19: fifty racing starts after an end, through two replicas: no generation is used twice."""
    key = {"name": unique()}
    async with Engine(desk, complete):
        await desk.ask("start", timer=key, due={"delay_ms": 20})
        await desk.ended(ref_of(key))
    bodies = [encoded({"timer": key, "due": {"delay_ms": DAY_MS}, "if_exists": "reject", "payload": n})
              for n in range(50)]  # fmt: skip
    asked = await asyncio.gather(*(desk.asked("durable_timer.commands.start.v1", body) for body in bodies))
    outcomes = [await one.outcome() for one in asked]
    assert Counter(outcome["status"] for outcome in outcomes) == {"accepted": 1, "rejected": 49}
    assert {outcome["generation"] for outcome in outcomes} == {1}
    state = await desk.state(ref_of(key))
    assert state is not None
    assert (state["generation"], state["fence"]) == (1, 4)
    assert (await desk.ask("cancel", timer_ref=ref_of(key)))["status"] == "accepted"
