"""Cases of the field (cases.md) that need processes, brokers and outages; each test is named after its case."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.cpu import rests
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
from timer_service.jetstream import topology

SETTINGS = {"reconcile_interval_ms": 1_000, "policy_check_interval_ms": 1_000}
AWAY_S = 10.0
FAR = {"delay_ms": 86_400_000}
START = "durable_timer.commands.start.v1"


@pytest.fixture
async def desk(stage: Stage) -> AsyncIterator[Desk]:
    """The module's broker, whatever the test before left."""
    stage.broker.start()
    await stage.service.ready()
    async with Desk.at(stage.broker.url) as opened:
        yield opened


@pytest.fixture
async def other(stage: Stage, desk: Desk, tmp_path: Path) -> AsyncIterator[Service]:
    """A second replica beside the module's."""
    with Service(stage.broker.url, tmp_path, **SETTINGS) as running:
        yield await running.ready()


async def test_c09_the_broker_is_away_for_long(stage: Stage, desk: Desk, service: Service) -> None:
    """C09: alive and not ready all the while, consuming within seconds of its return; overdue timers fire once."""
    names = [unique() for _ in range(20)]
    for name in names:
        await desk.ask("start", timer={"name": name}, due={"delay_ms": 3_000})
    stage.broker.stop()
    end = time.monotonic() + AWAY_S
    await service.not_ready()
    while time.monotonic() < end:
        code, body = service.readyz()
        assert (code, [reason["code"] for reason in body["reasons"]]) == (503, ["broker_unreachable"])
        assert service.http("/healthz")[0] == 200
        await asyncio.sleep(0.5)
    stage.broker.start()
    back = time.monotonic()
    async with Engine(desk, complete) as engine:
        assert (await desk.ask("start", timer={"name": unique()}, due=FAR))["status"] == "accepted"
        assert time.monotonic() - back < 15
        for name in names:
            assert (await desk.ended(name_ref(name), 30))["status"] == "completed"
            assert len(engine.of(name_ref(name))) == 1
    await service.ready()


async def test_c10_twenty_restarts_with_a_command_after_each(
    stage: Stage, desk: Desk, service: Service, record_property: Any
) -> None:
    """C10: killed and stopped in turns, some with messages on their way: each command is handled soon after."""
    waits = []
    async with Engine(desk, complete) as engine:
        for n in range(20):
            if n % 3 == 0:  # messages on their way while it goes
                for _ in range(50):
                    await desk.client.publish(START, encoded({"timer": {"name": unique()}, "due": FAR}))
            stage.broker.restart(hard=n % 2 == 0)
            back, name = time.monotonic(), unique()
            outcome = await _answered(desk, {"command_id": "c", "timer": {"name": name}, "due": {"delay_ms": 20}})
            waits.append(time.monotonic() - back)
            assert outcome["status"] in ("accepted", "duplicate")
            record = await desk.ended(name_ref(name), 30)
            assert (record["status"], record["generation"]) == ("completed", 0)
            assert len({received.data for received in engine.of(name_ref(name))}) == 1
    record_property("slowest_s", round(max(waits), 2))
    print(f"command after a restart: slowest of 20 {max(waits):.2f} s")
    assert max(waits) < 15  # nats-py's own watchers stay silent for 16 s
    await service.ready()


async def _answered(desk: Desk, body: dict[str, Any]) -> dict[str, Any]:
    """Repeat a command until its outcome comes, as a client does: outcomes are told once, over core NATS."""

    async def look() -> dict[str, Any] | None:
        try:
            return await desk.ask("start", within=1, **body)
        except AssertionError:
            return None

    return dict(await eventually(look, 20, what="an outcome"))


@pytest.mark.parametrize("kind", ["name, replace", "name, reject", "lineage"])
async def test_c19_fifty_racing_starts_after_an_end(desk: Desk, service: Service, other: Service, kind: str) -> None:
    """C19: through two replicas: one accepted where the key may start again, none where not, no generation twice."""
    key = lineage_key() if kind == "lineage" else {"name": unique()}
    async with Engine(desk, complete) as engine:
        await desk.ask("start", timer=key, due={"delay_ms": 20})
        await desk.ended(ref_of(key))
        if_exists = "replace" if kind == "name, replace" else "reject"
        bodies = [encoded({"timer": key, "due": FAR, "payload": n, "if_exists": if_exists}) for n in range(50)]
        asked = await asyncio.gather(*(desk.asked(START, body) for body in bodies))
        outcomes = [await one.outcome() for one in asked]
        codes = Counter((outcome["status"], outcome["code"]) for outcome in outcomes)
        state = await desk.state(ref_of(key))
        if kind == "lineage":
            assert codes == {("rejected", "already_terminal"): 50}
            assert state is None
            return
        assert state is not None
        if kind == "name, reject":
            assert codes == {("accepted", None): 1, ("rejected", "conflict"): 49}
            assert (state["generation"], state["fence"]) == (1, 4)
        else:
            began = [outcome["generation"] for outcome in outcomes if outcome["code"] is None]
            assert set(codes) <= {("accepted", None), ("accepted", "superseded")}
            assert sorted(began) == list(range(1, len(began) + 1)), "a generation was used twice, or none at all"
            assert (state["generation"], state["fence"]) == (len(began), 3 + len(began))
            assert state["payload"] == 49, "the last one stored stands"
        assert len(engine.of(ref_of(key))) == 1
    assert (await desk.ask("cancel", timer_ref=ref_of(key)))["status"] == "accepted"


# -- C22, C23: others are not held up ---------------------------------------------------------------------------


async def test_c22_poison_is_settled_and_the_processor_rests(desk: Desk, service: Service) -> None:
    """C22: 10,000 broken ones of every kind: settled and recorded, and then the service idles as before."""
    poison = [b"", b"{", b"null", b"[1]", b"\xff" * 40, b'{"v":1}', b'{"v":99,"command_id":"c"}', encoded({})]
    kinds = ("start", "retry", "complete", "fail", "cancel", "nonsense")
    before = await desk.last_seq(topology.REJECTIONS)
    for n in range(10_000):
        await desk.client.publish(f"durable_timer.commands.{kinds[n % 6]}.v1", poison[n % len(poison)])
    assert (await desk.ask("start", timer={"name": unique()}, due=FAR))["status"] == "accepted"

    async def settled() -> bool:
        return await desk.count(topology.COMMANDS) == 0 and await desk.last_seq(topology.REJECTIONS) >= before + 10_000

    await eventually(settled, 30, what="all poison settled", every=0.2)
    assert await desk.last_seq(topology.REJECTIONS) == before + 10_000
    info = await desk.js.consumer_info(topology.COMMANDS, topology.COMMAND_CONSUMER)
    assert info.num_redelivered == 0
    await rests(service.pid, 0.1, over_s=1.0, looks=20)


async def test_c23_cancels_that_wait_hold_up_nobody(desk: Desk, service: Service) -> None:
    """C23: 6,000 cancels of unknown timers wait for their starts; ten healthy commands are handled meanwhile."""
    waiting = [{"timer_ref": name_ref(unique()), "wait_ms": 8_000} for _ in range(6_000)]
    await desk.send_many("cancel", waiting)
    await _ten_at_once(desk, service)

    async def settled() -> bool:
        return await desk.count(topology.COMMANDS) == 0

    await eventually(settled, 40, what="every cancel to be settled", every=0.2)


async def test_c23_starts_that_are_held_hold_up_nobody(tmp_path: Path) -> None:
    """C23: 3,000 starts wait for room, more than the window; feedback and cancels are handled meanwhile."""
    small = {**SETTINGS, "state_max_bytes": 400_000, "commands_max_bytes": 64 * 2**20}
    with Broker(tmp_path / "nats") as broker, Service(broker.url, tmp_path, **small) as service:
        await service.ready()
        async with Desk.at(broker.url) as desk:
            live = [unique() for _ in range(10)]
            for name in live:
                await desk.ask("start", timer={"name": name}, due=FAR)
            await desk.send_many("start", [{"timer": {"name": unique()}, "due": FAR} for _ in range(3_000)])
            await eventually(lambda: service.readyz()[1]["details"]["admission"] == "closed")
            for name in live:
                assert (
                    await desk.ask(
                        "cancel",
                        timer_ref=name_ref(name),
                    )
                )["status"] == "accepted"


async def _ten_at_once(desk: Desk, service: Service) -> None:
    begun = time.monotonic()
    for _ in range(10):
        outcome = await desk.ask("start", timer={"name": unique()}, due=FAR)
        assert outcome["status"] == "accepted"
    took_s = time.monotonic() - begun
    print(f"ten healthy commands took {took_s:.2f} s")
    assert took_s < 15  # a redelivery takes longer than that
