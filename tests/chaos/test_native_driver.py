"""C39, and a whole life, with ``--driver native``: the broker waits, real processes do the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.cli import Cli
from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, now_ms, unique
from tests.support.stage import Stage
from timer_service.jetstream import topology
from timer_service.jetstream.topology import SCHEDULES, Sizes
from timer_service.wire.instants import format_instant

pytestmark = pytest.mark.timeout(120)

FLAGS = ("--driver", "native")
SETTINGS = {"policy_check_interval_ms": 500, "request_timeout_ms": 2_000}
HOUR_MS = 3_600_000
DECADE_MS = 10 * 365 * 24 * HOUR_MS


@pytest.fixture
async def desk(stage: Stage) -> AsyncIterator[Desk]:
    """The module's broker and service, whatever the test before left."""
    stage.broker.start()
    if not stage.service.running:
        stage.service.start()
    await stage.service.ready()
    async with Desk.at(stage.broker.url) as opened:
        yield opened


async def started(desk: Desk, name: str, delay_ms: int, **body: Any) -> str:
    outcome = await desk.ask("start", timer={"name": name}, due={"delay_ms": delay_ms}, **body)
    assert outcome["status"] == "accepted", outcome
    return name_ref(name)


async def schedules(desk: Desk) -> set[str]:
    """The timers for which a schedule stands at the broker."""
    subjects = await desk.subjects(SCHEDULES, topology.SCHEDULE_FILTER)
    return {subject.removeprefix(topology.SCHEDULE_PREFIX) for subject in subjects}


async def scheduled(desk: Desk, *refs: str, there: bool = True) -> None:
    async def look() -> bool:
        standing = await schedules(desk)
        return all((ref in standing) is there for ref in refs)

    await eventually(look, what=f"{len(refs)} schedules {'there' if there else 'gone'}")


async def ended_once(desk: Desk, engine: Engine, timer_ref: str, *, generations: int = 1) -> dict[str, Any]:
    """Wait for the end; every generation that was to fire did so once, and none early."""
    record = await desk.ended(timer_ref, 40)
    received = engine.of(timer_ref)
    assert len({one.resume_id for one in received}) == len(received) == generations
    for one in received:
        assert one.stored_at_ms >= one.due_at_ms
    return record


# -- a life -----------------------------------------------------------------------------------------------------


async def test_a_life_from_start_to_record(desk: Desk) -> None:
    """Start, resume, retry, resume, complete, record; the timeline tells who woke it when, as with the heap."""

    def answer(resume: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return ("complete", {}) if resume["generation"] else ("retry", {"due": {"delay_ms": 1_200}})

    async with Engine(desk, answer) as engine:
        timer_ref = await started(desk, unique(), 3_000, max_retries=1, payload={"order": 42})
        await scheduled(desk, timer_ref)
        found = await desk.last(SCHEDULES, topology.schedule_subject(timer_ref))
        assert found is not None
        assert (found.headers or {})["Durable-Timer-Occurrence"] == f"{timer_ref}.0", "the schedule's id"
        record = await ended_once(desk, engine, timer_ref, generations=2)
        assert record["status"] == "completed"
        assert [one["answer"] for one in record["timeline"]] == ["retry", "complete"]
        for one in record["timeline"]:
            assert one["due_at_ms"] - 250 <= one["woken_at_ms"] <= one["elapsed_at_ms"]
            assert one["lateness_ms"] >= 0
        await scheduled(desk, timer_ref, there=False)
        assert await desk.entry(timer_ref) is not None, "the marker"


async def test_what_is_due_at_once_is_not_left_to_the_broker(desk: Desk) -> None:
    """Due within a second, now, or long ago: no schedule, once each."""
    async with Engine(desk, complete) as engine:
        refs = [await started(desk, unique(), delay_ms) for delay_ms in (1, 200, 900)]
        outcome = await desk.ask("start", timer={"name": (name := unique())}, due={"at_ms": now_ms() - HOUR_MS})
        assert outcome["status"] == "accepted", outcome
        for timer_ref in (*refs, name_ref(name)):
            await ended_once(desk, engine, timer_ref)


# -- C39 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [True, False], ids=["killed", "stopped"])
async def test_c39_the_broker_is_down_across_the_due_times(stage: Stage, desk: Desk, hard: bool) -> None:
    """Before, in and after the outage: each fires once; a schedule that outlives it fires by itself."""
    async with Engine(desk, complete) as engine:
        refs = [await started(desk, unique(), 1_200 + 100 * number) for number in range(40)]
        await scheduled(desk, refs[-1])
        stage.broker.kill() if hard else stage.broker.stop()
        await stage.service.not_ready()
        await asyncio.sleep(2.5)  # an outage: due times pass
        stage.broker.start()
        for timer_ref in refs:
            await ended_once(desk, engine, timer_ref)
        await stage.service.ready()
        await scheduled(desk, *refs, there=False)


async def test_c39_the_service_is_down_across_the_due_times(stage: Stage, desk: Desk) -> None:
    """The broker's wakes wait for the next process; each fires once."""
    async with Engine(desk, complete) as engine:
        refs = [await started(desk, unique(), 2_500 + 20 * number) for number in range(40)]
        await scheduled(desk, refs[-1])
        stage.service.kill()
        await scheduled(desk, *refs, there=False)  # fired, with nobody there
        stage.service.start()
        for timer_ref in refs:
            await ended_once(desk, engine, timer_ref)


async def test_c39_a_schedule_deleted_by_hand_still_fires_once(desk: Desk) -> None:
    """The service looks itself, a second after the due time."""
    async with Engine(desk, complete) as engine:
        name, neighbour = unique(), unique()
        timer_ref, other = await started(desk, name, 4_000), await started(desk, neighbour, 4_000)
        await scheduled(desk, timer_ref, other)
        await desk.js.purge_stream(SCHEDULES, subject=topology.schedule_subject(timer_ref))
        record = await ended_once(desk, engine, timer_ref)
        assert record["timeline"][0]["lateness_ms"] >= 900, "the broker had nothing to fire"
        await ended_once(desk, engine, other)


async def test_c39_replaced_twice_only_the_last_fires(desk: Desk) -> None:
    """One resume, of the last generation, and no earlier than its due time."""
    async with Engine(desk, complete) as engine:
        name = unique()
        await started(desk, name, 4_000)
        await started(desk, name, HOUR_MS, if_exists="replace")
        timer_ref = await started(desk, name, 4_500, if_exists="replace")
        record = await ended_once(desk, engine, timer_ref)
        assert [one.resume["generation"] for one in engine.of(timer_ref)] == [2]
        assert [one["answer"] for one in record["timeline"]] == ["replace", "replace", "complete"]


async def test_c39_a_stream_that_is_lost_is_filled_again(stage: Stage, desk: Desk) -> None:
    """All schedules and the stream itself are gone: both come back by themselves, counted, and each fires once."""
    async with Engine(desk, complete) as engine:
        soon = [await started(desk, unique(), 5_000 + 50 * number) for number in range(10)]
        late = [await started(desk, unique(), HOUR_MS) for _ in range(10)]
        await scheduled(desk, *soon, *late)
        before = stage.service.metric("durable_timer_repairs_total", "schedule_missing")
        await desk.js.delete_stream(SCHEDULES)
        for timer_ref in soon:
            await ended_once(desk, engine, timer_ref)
        await scheduled(desk, *late)
        repaired = stage.service.metric("durable_timer_repairs_total", "schedule_missing") - before
        assert repaired >= len(late)
        for timer_ref in late:
            await desk.ask("cancel", timer_ref=timer_ref)
        await scheduled(desk, *late, there=False)


async def test_c39_two_replicas_and_one_is_killed(stage: Stage, desk: Desk, tmp_path: Path) -> None:
    """Neither owns a schedule: all fire once, whichever wrote them, some while one of them is being killed."""
    with Service(stage.broker.url, tmp_path, *FLAGS, **SETTINGS) as other:
        await other.ready()
        async with Engine(desk, complete) as engine:
            names = [unique() for _ in range(150)]
            await desk.send_many(
                "start", [{"timer": {"name": name}, "due": {"delay_ms": 300 + 20 * n}} for n, name in enumerate(names)]
            )
            await eventually(lambda: len(engine.received) >= 30)
            other.kill()
            for name in names:
                await ended_once(desk, engine, name_ref(name))


async def test_c39_a_stream_without_schedules_keeps_it_not_ready(broker: Broker, tmp_path: Path) -> None:
    """As on a server that has none: alive, not ready, and what to do; doctor says the same; the heap works there."""
    spec = next(spec for spec in topology.streams(Sizes()) if spec.name == SCHEDULES)
    config = spec.config(1) | {topology.SCHEDULES_FLAG: False, "discard": "new"}
    async with Desk.at(broker.url) as desk:
        await desk.client.request(f"$JS.API.STREAM.CREATE.{SCHEDULES}", json.dumps(config).encode())
        with Service(broker.url, tmp_path, *FLAGS, **SETTINGS) as service:
            reasons = await eventually(partial(_unsupported, service))
            assert reasons[0]["resource"] == SCHEDULES
            assert "durable-timer provision" in reasons[0]["message"]
            assert service.http("/healthz")[0] == 200
            checks = Cli(broker.url).json("doctor", *FLAGS, code=1)["checks"]
            (wrong,) = [check for check in checks if not check["ok"]]
            assert (wrong["code"], wrong["message"]) == ("schedules_unsupported", reasons[0]["message"])
            assert Cli(broker.url).json("doctor")["ok"] is True, "not with the heap"
            with Service(broker.url, tmp_path) as heap:
                await heap.ready()
            async with Engine(desk, complete) as engine:
                timer_ref = await started(desk, unique(), 1_500)
                await ended_once(desk, engine, timer_ref)  # though not ready, it does what it can
            await desk.js.delete_stream(SCHEDULES)
            await service.ready(30)


async def _unsupported(service: Service) -> list[dict[str, str]]:
    _, body = service.readyz()
    return [reason for reason in body.get("reasons", ()) if reason["code"] == "schedules_unsupported"]


# -- ends -------------------------------------------------------------------------------------------------------


async def test_a_cancel_takes_the_schedule_away(stage: Stage, desk: Desk) -> None:
    """Also by a process that did not put it: a cancelled decade does not stay at the broker."""
    refs = [await started(desk, unique(), DECADE_MS) for _ in range(6)]
    await scheduled(desk, *refs)
    for timer_ref in refs[:3]:
        await desk.ask("cancel", timer_ref=timer_ref)
    stage.service.kill()
    stage.service.start()
    await stage.service.ready()
    for timer_ref in refs[3:]:
        await desk.ask("cancel", timer_ref=timer_ref)
    await scheduled(desk, *refs, there=False)


async def test_a_shifted_clock_fires_at_once_and_leaves_no_schedule(broker: Broker, tmp_path: Path) -> None:
    """--test-clock: the broker knows nothing of the shift; what is armed after it is scheduled by real time."""
    with Service(broker.url, tmp_path, *FLAGS, "--test-clock", **SETTINGS) as service:
        await service.ready()
        async with Desk.at(broker.url) as desk, Engine(desk, complete) as engine:
            far = await started(desk, unique(), DECADE_MS)
            await scheduled(desk, far)
            service.http("/debug/clock", json.dumps({"offset_ms": DECADE_MS}).encode())
            await desk.ended(far)
            await scheduled(desk, far, there=False)
            soon = await started(desk, unique(), 4_000)
            await scheduled(desk, soon)
            found = await desk.last(SCHEDULES, topology.schedule_subject(soon))
            assert found is not None
            assert (found.headers or {})["Nats-Schedule"] < f"@at {format_instant(now_ms() + HOUR_MS)}", (
                "in the broker's time"
            )
            record = await desk.ended(soon)
            assert record["timeline"][0]["woken_at_ms"] > now_ms() + DECADE_MS - HOUR_MS, "told by the shifted clock"
            assert len(engine.received) == 2
