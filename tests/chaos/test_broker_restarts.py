"""The broker goes away and comes back, cleanly or by SIGKILL: the service goes on by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import nats
import pytest

from tests.support.service import Desk, Engine, Service, complete, encoded, eventually, name_ref, now_ms, unique
from tests.support.stage import Stage
from timer_service.jetstream import topology

SETTINGS = {"reconcile_interval_ms": 1_000, "policy_check_interval_ms": 1_000}
HARD = pytest.mark.parametrize("hard", [True, False], ids=["killed", "stopped"])


@pytest.fixture
async def desk(stage: Stage) -> AsyncIterator[Desk]:
    """The module's broker, whatever the test before left."""
    stage.broker.start()
    await stage.service.ready()
    async with Desk.at(stage.broker.url) as opened:
        yield opened


@pytest.fixture
async def engine(desk: Desk) -> AsyncIterator[Engine]:
    async with Engine(desk, complete) as running:
        yield running


@HARD
async def test_timers_and_commands_live_through_a_broker_restart(
    stage: Stage, desk: Desk, service: Service, engine: Engine, hard: bool, record_property: Any
) -> None:
    """Overdue ones fire once, commands in flight are carried out, a command afterwards is answered in seconds."""
    names = [unique() for _ in range(120)]
    bodies: list[dict[str, Any]] = [
        {"timer": {"name": name}, "due": {"delay_ms": 200 + 25 * n}, "payload": "x" * (1_500 if n % 5 == 0 else 5)}
        for n, name in enumerate(names)
    ]
    await desk.send_many("start", bodies)
    late = [unique() for _ in range(200)]
    for name in late:  # on their way when the broker goes
        await desk.client.publish("durable_timer.commands.start.v1", encoded(_soon(name)))
    await desk.client.flush()
    await eventually(lambda: len(engine.received) >= 5)
    stage.broker.kill() if hard else stage.broker.stop()
    assert (await service.not_ready())[0]["code"] == "broker_unreachable"
    assert service.http("/healthz")[0] == 200
    await asyncio.sleep(1.0)  # an outage: due times pass
    stage.broker.start()
    back = time.monotonic()
    outcome = await desk.ask("start", timer={"name": unique()}, due={"delay_ms": 3_600_000}, within=20)
    answered_s = time.monotonic() - back
    await service.ready(20)
    ready_s = time.monotonic() - back
    record_property("answered_s", round(answered_s, 2))
    record_property("ready_s", round(ready_s, 2))
    print(f"after a {'hard' if hard else 'clean'} restart: answered after {answered_s:.2f} s, ready {ready_s:.2f} s")
    assert outcome["status"] == "accepted"
    assert answered_s < 15  # nats-py's own watchers stay silent for 16 s
    for name in names:
        await _ends_once(desk, engine, name)
    for name in late:  # a command that the broker never stored was never promised
        if await desk.record(name_ref(name)) or await desk.state(name_ref(name)):
            await _ends_once(desk, engine, name)
    assert all(received.stored_at_ms >= received.due_at_ms for received in engine.received)
    await eventually(lambda: _settled(desk))


def _soon(name: str) -> dict[str, Any]:
    return {"timer": {"name": name}, "due": {"delay_ms": 500}}


async def _ends_once(desk: Desk, engine: Engine, name: str) -> None:
    """One record. An answer of the engine that was lost with the broker heals when the resume comes again."""
    timer_ref = name_ref(name)
    for received in engine.of(timer_ref):
        if await desk.record(timer_ref) is None:
            await engine.give(received.resume, "complete")
    record = await desk.ended(timer_ref, 30)
    assert (record["status"], record["generation"]) == ("completed", 0)
    assert await desk.records_of(timer_ref) == 1
    assert len({received.data for received in engine.of(timer_ref)}) == 1


async def _settled(desk: Desk) -> bool:
    return await desk.count(topology.COMMANDS) == 0


async def test_six_restarts_with_a_command_after_each(
    stage: Stage, desk: Desk, service: Service, engine: Engine, record_property: Any
) -> None:
    """C10: restarts in a row, also in the middle of scans: each command is handled soon after."""
    waits = []
    for n in range(6):
        name = unique()
        stage.broker.restart(hard=n % 2 == 0)
        back = time.monotonic()
        await eventually(partial(_asked, desk, name), 20)
        waits.append(time.monotonic() - back)
        assert (await desk.ended(name_ref(name)))["status"] == "completed"
        assert len({received.data for received in engine.of(name_ref(name))}) == 1
    record_property("slowest_s", round(max(waits), 2))
    print(f"command after a restart: slowest {max(waits):.2f} s")
    assert max(waits) < 15
    await service.ready()


async def _asked(desk: Desk, name: str) -> bool:
    try:
        outcome = await desk.ask("start", timer={"name": name}, due={"delay_ms": 50}, within=5, command_id="the-same")
    except (nats.errors.Error, AssertionError):
        return False
    return outcome["status"] in ("accepted", "duplicate")


async def test_a_frozen_broker_is_survived(stage: Stage, desk: Desk, service: Service, engine: Engine) -> None:
    """SIGSTOP of the broker across due times: what was in flight is settled once when it goes on."""
    names = [unique() for _ in range(30)]
    await desk.send_many("start", [{"timer": {"name": name}, "due": {"delay_ms": 300 + 50 * n}} for n, name in
                                   enumerate(names)])  # fmt: skip
    await eventually(lambda: engine.received)
    with stage.broker.paused():
        frozen_ms = now_ms()
        await eventually(lambda: now_ms() > frozen_ms + 3_000)
    for name in names:
        await _ends_once(desk, engine, name)
    await service.ready()


async def test_the_service_waits_for_a_broker_that_is_not_there_yet(stage: Stage, desk: Desk) -> None:
    """C40: started without a broker it lives, says why it is not ready, and serves when the broker comes."""
    stage.broker.stop()
    with Service(stage.broker.url, stage.folder) as other:
        (reason,) = await other.not_ready()
        assert (reason["code"], reason["resource"]) == ("broker_unreachable", stage.broker.url)
        assert other.http("/healthz")[0] == 200
        stage.broker.start()
        await other.ready()
        assert other.stop() == 0
