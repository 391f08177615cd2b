"""What an operator meets: draining, the test clock, deleted resources, two replicas."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.service import (
    Desk,
    Engine,
    Service,
    complete,
    encoded,
    eventually,
    lineage_key,
    name_ref,
    now_ms,
    ref_of,
    unique,
)
from timer_service.jetstream import topology

FLAGS = ("--test-clock",)
SETTINGS = {"policy_check_interval_ms": 500}
DAY_MS = 86_400_000


# -- the end of a process -------------------------------------------------------------------------------------


async def test_a_stop_under_load_loses_and_doubles_nothing(broker: Broker, tmp_path: Path) -> None:
    """SIGTERM: readiness goes first, exit 0 within the grace; the next process does the rest, each command once."""
    with Service(broker.url, tmp_path, drain_grace_ms=3_000) as service:
        await service.ready()
        async with Desk.at(broker.url) as desk, Engine(desk, complete) as engine:
            names = [unique() for _ in range(2_500)]
            for n, name in enumerate(names):
                body = {"timer": {"name": name}, "due": {"delay_ms": 1 + n % 700}, "payload": "x" * (n % 7 * 300)}
                await desk.client.publish("durable_timer.commands.start.v1", encoded(body))
            await desk.client.flush()
            await eventually(lambda: len(engine.received) > 200)
            begun_ms = now_ms()
            service.terminate()
            seen = []
            while service.running:
                seen.append(service.readyz()[0])
                await asyncio.sleep(0.005)
            assert service.wait() == 0
            assert now_ms() - begun_ms < 20_000
            assert 200 not in seen[1:]
            assert service.events("service.draining")
            assert not service.events("work.failed"), service.log_tail()
            assert await desk.count(topology.COMMANDS) > 0, "it was no load"
            service.start()
            for name in names[::7]:
                await desk.ended(name_ref(name), 30)
            await eventually(lambda: _drained(desk, len(names)), 30)
            assert max(Counter(one.resume_id for one in engine.received).values()) == 1
            assert {one.resume["timer_ref"] for one in engine.received} == {name_ref(name) for name in names}
            assert await desk.last_seq(topology.TERMINALS) == len(names)
            assert await desk.count(topology.REJECTIONS) == 0


async def _drained(desk: Desk, records: int) -> bool:
    return await desk.count(topology.TERMINALS) == records and await desk.count(topology.COMMANDS) == 0


async def test_waiting_cancels_are_handed_back_at_a_stop(broker: Broker, tmp_path: Path) -> None:
    """A cancel that waits for its start does not hold up the end, and the next process settles it."""
    with Service(broker.url, tmp_path) as service:
        await service.ready()
        async with Desk.at(broker.url) as desk:
            key = lineage_key()
            body = encoded({"timer_ref": ref_of(key), "generation": 0, "wait_ms": 10_000})
            asked = await desk.asked("durable_timer.commands.cancel.v1", body)
            await eventually(lambda: _delivered(desk))
            begun_ms = now_ms()
            assert service.stop() == 0
            assert not service.events("broker.lost"), "it left, and lost nothing"
            assert now_ms() - begun_ms < 9_000  # the cancel waits for 10
            assert await desk.count(topology.COMMANDS) == 1
            service.start()
            await desk.ask("start", timer=key, due={"delay_ms": DAY_MS})
            assert (await asked.outcome())["phase"] == "cancelled"


async def _delivered(desk: Desk) -> bool:
    info = await desk.js.consumer_info(topology.COMMANDS, topology.COMMAND_CONSUMER)
    return bool(info.num_ack_pending)


async def test_a_second_signal_ends_at_once(broker: Broker, tmp_path: Path) -> None:
    """Who can't wait for the grace sends the signal again."""
    with Service(broker.url, tmp_path, drain_grace_ms=60_000) as service:
        await service.ready()
        broker.pause()  # so that the drain can't end by itself
        async with asyncio.timeout(20):
            service.terminate()
            await eventually(lambda: service.events("service.draining"))
            service.terminate()
            code = await asyncio.to_thread(service.wait)
        broker.resume()
        assert code in (0, -signal.SIGTERM)


async def test_a_stop_while_the_broker_is_away_still_ends(broker: Broker, tmp_path: Path) -> None:
    """SIGTERM without a broker: exit 0, and soon."""
    with Service(broker.url, tmp_path, drain_grace_ms=2_000) as service:
        await service.ready()
        broker.kill()
        await service.not_ready()
        assert service.stop() == 0


# -- the test clock -------------------------------------------------------------------------------------------


def shift(service: Service, body: bytes) -> tuple[int, dict[str, Any]]:
    code, answer = service.http("/debug/clock", body)
    return code, json.loads(answer)


async def test_a_shift_fires_what_it_makes_due_at_once(desk: Desk, service: Service) -> None:
    """C26, C35: the due ones each once and at once, the others keep waiting; due times count with the offset."""
    soon, later = unique(), unique()
    async with Engine(desk, complete) as engine:
        await desk.ask("start", timer={"name": soon}, due={"delay_ms": 25 * DAY_MS})
        await desk.ask("start", timer={"name": later}, due={"delay_ms": 400 * DAY_MS})
        before = json.loads(service.http("/debug/clock")[1])["offset_ms"]
        begun_ms = now_ms()
        code, answer = shift(service, b'{"offset_ms": %d}' % (25 * DAY_MS))
        assert (code, answer) == (200, {"offset_ms": before + 25 * DAY_MS})
        await engine.resume_of(name_ref(soon))
        assert now_ms() - begun_ms < 10_000
        assert (await desk.ended(name_ref(soon)))["timeline"][0]["lateness_ms"] >= 0
        fresh = unique()
        outcome = await desk.ask("start", timer={"name": fresh}, due={"delay_ms": 500})
        assert -10_000 <= outcome["due_at_ms"] - now_ms() - before - 25 * DAY_MS <= 500
        await engine.resume_of(name_ref(fresh))
        assert engine.of(name_ref(later)) == []
        assert len(engine.of(name_ref(soon))) == 1
        state = await desk.state(name_ref(later))
        assert state is not None
        assert state["phase"] == "waiting"


async def test_concurrent_shifts_add_up(desk: Desk, service: Service) -> None:
    """None of them is lost."""
    before = json.loads(service.http("/debug/clock")[1])["offset_ms"]
    await asyncio.gather(*(asyncio.to_thread(shift, service, b'{"offset_ms": 10}') for _ in range(20)))
    assert json.loads(service.http("/debug/clock")[1])["offset_ms"] == before + 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b"null", b"{}", b'{"offset_ms": -1}', b'{"offset_ms": 1.5}', b'{"offset_ms": "5"}',
        b'{"offset_ms": true}', b'{"offset_ms": null}', b'{"offset_ms": 1, "more": 1}', b'{"offset_ms": 1e3}',
        b'{"offset_ms": 99999999999999999999}', b'{"offset_ms": 1, "offset_ms": 2}', b"\xff", b" " * 2_000,
    ],
)  # fmt: skip
async def test_a_shift_that_makes_no_sense_is_refused(desk: Desk, service: Service, body: bytes) -> None:
    """400, and time stands where it stood."""
    before = service.http("/debug/clock")
    code, answer = shift(service, body)
    assert code == 400
    assert "error" in answer
    assert service.http("/debug/clock") == before


async def test_without_the_flag_there_is_no_such_page(broker: Broker, tmp_path: Path) -> None:
    """Nobody shifts the time of a service that runs in earnest."""
    with Service(broker.url, tmp_path) as service:
        await service.ready()
        assert service.http("/debug/clock")[0] == 404
        assert service.http("/debug/clock", b'{"offset_ms": 1}')[0] == 404


# -- resources deleted by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "resource",
    [
        topology.COMMANDS, topology.SCHEDULES, topology.RESUMES, topology.REJECTIONS, topology.SNAPSHOTS,
        topology.TERMINALS, topology.STATE_STREAM, topology.LEASE_STREAM,
        f"{topology.COMMANDS} {topology.COMMAND_CONSUMER}", f"{topology.SCHEDULES} {topology.WAKE_CONSUMER}",
        f"{topology.RESUMES} {topology.RESUME_CONSUMER}",
    ],
)  # fmt: skip
async def test_what_was_deleted_by_hand_is_there_again(desk: Desk, service: Service, resource: str) -> None:
    """Stream or consumer: it is noticed, made anew, and the whole ring works again."""
    stream, _, consumer = resource.partition(" ")
    kept, far = unique(), unique()
    soon_ms = 10_000 if stream == topology.STATE_STREAM else 1_500  # where it must not fire before it is deleted
    await desk.ask("start", timer={"name": kept}, due={"delay_ms": soon_ms})
    await desk.ask("start", timer={"name": far}, due={"delay_ms": DAY_MS})
    if consumer:
        await desk.js.delete_consumer(stream, consumer)
    else:
        await desk.js.delete_stream(stream)
    await eventually(lambda: _exists(desk, stream, consumer), 30, what=f"{resource} to be there again")
    await service.ready()
    async with Engine(desk, complete) as engine:
        name = unique()
        await desk.ask("start", timer={"name": name}, due={"delay_ms": 100}, payload="x" * 2_000)
        assert (await desk.ended(name_ref(name)))["status"] == "completed"
        assert len(engine.of(name_ref(name))) == 1
        refused = await desk.ask("complete", timer_ref=name_ref("nobody"), generation=0, fence=1)
        assert refused["code"] == "unknown_timer"
        if stream == topology.STATE_STREAM:  # what was in it is gone for good, and nothing pretends otherwise
            await eventually(lambda: service.details()["armed"] == 0)
            assert engine.of(name_ref(kept)) == []
        else:
            assert (await desk.ended(name_ref(kept)))["status"] == "completed"
            assert (await desk.ask("cancel", timer_ref=name_ref(far)))["phase"] == "cancelled"


async def _exists(desk: Desk, stream: str, consumer: str) -> bool:
    try:
        await (desk.js.consumer_info(stream, consumer) if consumer else desk.js.stream_info(stream))
    except Exception:
        return False
    return True


async def test_a_dangerous_policy_is_named_and_its_mending_noticed(desk: Desk, service: Service) -> None:
    """Drift keeps the service not ready, with resource, field, what is and what must be."""
    config = (await desk.js.stream_info(topology.RESUMES)).config
    config.max_age, config.duplicate_window = 60, 60
    await desk.js.update_stream(config)
    (reason,) = await service.not_ready()
    assert (reason["code"], reason["resource"]) == ("bad_policy", topology.RESUMES)
    assert "max_age is '60 s'" in reason["message"]
    config.max_age = 0
    await desk.js.update_stream(config)
    await service.ready()
