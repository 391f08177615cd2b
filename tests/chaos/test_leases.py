"""Who drives, and who works under a name, when processes are killed, stopped and frozen, or the leases are gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import StreamConfig

from tests.support.broker import Broker
from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, unique
from timer_service.jetstream import topology

DAY_MS = 86_400_000


class Play:
    """A broker with services on it, and a desk."""

    def __init__(self, broker: Broker, desk: Desk, folder: Path) -> None:
        self.broker, self.desk, self._folder = broker, desk, folder
        self.services: list[Service] = []

    async def service(self, *flags: str, ready: bool = True, **settings: Any) -> Service:
        """One more process, each with a folder of its own: names may repeat."""
        folder = self._folder / f"service-{len(self.services)}"
        service = Service(self.broker.url, folder, *flags, **settings)
        self.services.append(service)
        service.start()
        return await service.ready() if ready else service

    async def pair(self, *flags: str, **settings: Any) -> tuple[Service, Service]:
        """A driver, and a standby that knows it."""
        driver = await self.service(*flags, **settings)
        await is_driver(driver)
        standby = await self.service(*flags, **settings)
        assert standby.details()["role"] == "standby"
        return driver, standby

    async def start(self, name: str, delay_ms: int) -> None:
        outcome = await self.desk.ask("start", timer={"name": name}, due={"delay_ms": delay_ms})
        assert outcome["status"] == "accepted"

    async def lease(self) -> dict[str, Any]:
        message = await self.desk.last(topology.LEASE_STREAM, topology.lease_subject(topology.DRIVER_LEASE))
        assert message is not None
        return dict(json.loads(message.data or b""))


@pytest.fixture
async def play(broker: Broker, tmp_path: Path) -> AsyncIterator[Play]:
    async with Desk.at(broker.url) as desk:
        made = Play(broker, desk, tmp_path)
        try:
            yield made
        finally:
            for service in made.services:
                service.close()


async def is_driver(service: Service) -> None:
    await eventually(lambda: service.details()["role"] == "driver", 20, what=f"{service.instance} to drive")


async def once(play: Play, engine: Engine, names: list[str]) -> None:
    """Each of these timers fires, once."""
    for name in names:
        assert (await play.desk.ended(name_ref(name), 20))["status"] == "completed"
    for name in names:
        assert await play.desk.records_of(name_ref(name)) == 1
        assert len({one.data for one in engine.of(name_ref(name))}) == 1


# -- driving --------------------------------------------------------------------------------------------------


async def test_the_standby_drives_when_the_driver_is_killed(play: Play) -> None:
    """What becomes due is fired by the other one; the epoch grows; the killed one comes back as standby."""
    driver, standby = await play.pair()
    assert (driver.metric("durable_timer_driver"), standby.metric("durable_timer_driver")) == (1, 0)
    names = [unique() for _ in range(10)]
    async with Engine(play.desk, complete) as engine:
        for number, name in enumerate(names):
            await play.start(name, 700 + 50 * number)
        begun = time.monotonic()
        driver.kill()
        await eventually(lambda: standby.events("lease.taken")[1:], 10, what="the standby to take over", every=0.005)
        print(f"take-over {time.monotonic() - begun:.2f} s after SIGKILL")
        await once(play, engine, names)
    assert standby.metric("durable_timer_driver") == 1
    lease = await play.lease()
    assert (lease["instance"], lease["epoch"]) == (standby.instance, 2)
    driver.start()
    await driver.ready()
    assert (driver.details()["role"], standby.details()["role"]) == ("standby", "driver")


async def test_the_standby_drives_at_once_when_the_driver_stops(play: Play) -> None:
    """SIGTERM: work and messages are handed back first, leases are given up last."""
    driver, standby = await play.pair()
    name = unique()
    async with Engine(play.desk, complete) as engine:
        await play.start(name, 800)
        assert driver.stop() == 0
        begun = time.monotonic()
        await eventually(lambda: standby.details()["role"] == "driver", 20, every=0.005)
        print(f"take-over {time.monotonic() - begun:.2f} s after the end")
        await once(play, engine, [name])
    lines = [(line["event"], line.get("lease")) for line in driver.events()]
    drained = lines.index(("service.stopped", None))
    given_up = [lease for event, lease in lines[drained:] if event == "lease.given_up"]
    assert given_up == [topology.DRIVER_LEASE, topology.name_lease(topology.TIMER_SERVICE, driver.instance)]


async def test_a_frozen_driver_is_replaced_and_comes_back_as_standby(play: Play) -> None:
    """SIGSTOP over due times, SIGCONT later: one drives in the end, and each timer has fired once."""
    driver, standby = await play.pair()
    names = [unique() for _ in range(20)]
    async with Engine(play.desk, complete) as engine:
        for number, name in enumerate(names):
            await play.start(name, 1_000 + 200 * number)
        driver.pause()
        begun = time.monotonic()
        await is_driver(standby)
        print(f"take-over {time.monotonic() - begun:.2f} s after SIGSTOP")
        driver.resume()
        await eventually(lambda: driver.events("lease.lost"), 20, what="the frozen one to notice")
        assert driver.details()["role"] == "standby"
        await once(play, engine, names)
    await driver.ready()
    assert standby.details()["role"] == "driver"


async def test_c12_five_hundred_timers_and_one_of_two_replicas_dies(play: Play) -> None:
    """C12: the driver is killed a second before they are due, and is back a second after: all fire once."""
    driver, _ = await play.pair()
    names = [unique() for _ in range(500)]
    due_ms = int(time.time() * 1000) + 4_000
    async with Engine(play.desk, complete) as engine:
        await play.desk.send_many("start", [{"timer": {"name": name}, "due": {"at_ms": due_ms}} for name in names])
        await asyncio.sleep(max(0.0, due_ms / 1000 - 1 - time.time()))
        driver.kill()
        await asyncio.sleep(max(0.0, due_ms / 1000 + 1 - time.time()))
        driver.start()
        await eventually(lambda: {name_ref(name) for name in names} <= set(engine._by_ref), 30, what="all resumes")
        print(f"the last one came {time.time() - due_ms / 1000:.2f} s after the due time")
        await once(play, engine, names)


async def test_a_shift_of_the_test_clock_expires_no_lease(play: Play) -> None:
    """Leases run by monotonic clocks: 25 days on the test clock, and the driver is the same."""
    driver, standby = await play.pair("--test-clock")
    before = await play.lease()
    for service in (driver, standby):
        assert service.http("/debug/clock", b'{"offset_ms": %d}' % (25 * DAY_MS))[0] == 200
    await eventually(partial(_renewed, play, before, 4), 20, what="some renewals")
    assert (driver.details()["role"], standby.details()["role"]) == ("driver", "standby")
    assert (driver.events("lease.lost"), standby.events("lease.lost")) == ([], [])


async def _renewed(play: Play, before: dict[str, Any], times: int) -> bool:
    lease = await play.lease()
    assert lease["process"] == before["process"]
    return bool(lease["beat"] >= before["beat"] + times)


# -- names ----------------------------------------------------------------------------------------------------


async def test_a_second_process_of_a_name_stands_by(play: Play) -> None:
    """It says `duplicate_instance`, does nothing, and takes over by itself, whether the first stops or dies."""
    first = await play.service(instance="twin")
    await is_driver(first)
    second = await play.service(instance="twin", ready=False)
    reasons = await eventually(partial(_reasons, second, "duplicate_instance"), 20)
    assert (reasons["resource"], "'twin'" in reasons["message"]) == ("twin", True)
    assert second.details()["role"] == "standby"
    await play.start(name := unique(), 50)
    async with Engine(play.desk, complete) as engine:
        await once(play, engine, [name])
        assert _handled(second) == 0
        begun = time.monotonic()
        first.kill()
        await second.ready()
        print(f"the second of the name was ready {time.monotonic() - begun:.2f} s after SIGKILL")
        await is_driver(second)
        await play.start(name := unique(), 50)
        await once(play, engine, [name])
    assert [event["code"] for event in second.events("instance.duplicate")] == ["duplicate_instance"]
    first.start()
    await eventually(partial(_reasons, first, "duplicate_instance"), 20)
    assert second.stop() == 0
    await first.ready()


def _handled(service: Service) -> float:
    """How many starts and answers this process has accepted."""
    return sum(service.metric("durable_timer_commands_total", "", kind, "accepted") for kind in ("start", "complete"))


def _reasons(service: Service, code: str) -> dict[str, str] | None:
    return next((reason for reason in service.readyz()[1].get("reasons", []) if reason["code"] == code), None)


async def test_a_process_that_loses_its_name_stands_by(play: Play) -> None:
    """Frozen until another has its name: then it stops pulling, says so, and has the name again later."""
    first = await play.service(instance="twin")
    await is_driver(first)
    second = await play.service(instance="twin", ready=False)
    await eventually(partial(_reasons, second, "duplicate_instance"), 20)
    first.pause()
    await second.ready()
    first.resume()
    await eventually(partial(_reasons, first, "duplicate_instance"), 20)
    await is_driver(second)
    handled = _handled(first)
    async with Engine(play.desk, complete) as engine:
        await play.start(name := unique(), 50)
        await once(play, engine, [name])
        assert _handled(first) == handled
        assert second.stop() == 0
        await first.ready()
        await is_driver(first)
        await play.start(name := unique(), 50)
        await once(play, engine, [name])
    assert _handled(first) == handled + 2, "it pulls again"


async def test_a_process_that_restarts_has_its_name_at_once(play: Play) -> None:
    """Killed or stopped: the next one under the name is never called a duplicate, and drives once it is ready."""
    service = await play.service()
    for end in (service.kill, service.stop):
        await is_driver(service)
        end()
        begun = time.monotonic()
        service.start()
        await service.ready()
        ready = service.events("service.ready")[0]
        assert ready["role"] == "driver", "it was ready before it knew who drives"
        await is_driver(service)
        print(f"ready and driving {time.monotonic() - begun:.2f} s after {end.__name__}")
        assert service.events("instance.duplicate") == []


# -- when leases can't be written -----------------------------------------------------------------------------


async def test_a_deleted_bucket_is_told_and_stops_no_timer(play: Play) -> None:
    """Without the bucket, and without leave to make it: not ready, says why, drives on; ready when it is back."""
    setup = await play.service()
    assert setup.stop() == 0
    driver, standby = await play.pair("--no-provision", policy_check_interval_ms=200)
    config = (await play.desk.js.stream_info(topology.LEASE_STREAM)).config
    await play.desk.js.delete_stream(topology.LEASE_STREAM)
    for service in (driver, standby):
        reason = await eventually(partial(_reasons, service, "missing"), 20)
        assert reason["resource"] == topology.LEASE_STREAM
    names = [unique() for _ in range(4)]
    async with Engine(play.desk, complete) as engine:
        for number, name in enumerate(names):
            await play.start(name, 50 + 1_000 * number)  # for longer than a lease lasts
        await once(play, engine, names)
        assert (driver.details()["role"], standby.details()["role"]) == ("driver", "standby")
        await play.desk.js.add_stream(config)
        for service in (driver, standby):
            await service.ready()
        await eventually(partial(_lease_of, play, driver), 20, what="the driver's record")
        await play.start(name := unique(), 50)
        await once(play, engine, [name])
    late = await play.service("--no-provision")
    assert late.details()["role"] == "standby"


async def _lease_of(play: Play, service: Service) -> bool:
    message = await play.desk.last(topology.LEASE_STREAM, topology.lease_subject(topology.DRIVER_LEASE))
    return message is not None and json.loads(message.data or b"")["instance"] == service.instance


async def test_without_room_for_leases_somebody_drives(play: Play) -> None:
    """Every write of a lease is refused as full: the driver goes on; when it dies, the standby takes its place."""
    driver, standby = await play.pair()
    config = (await play.desk.js.stream_info(topology.LEASE_STREAM)).config
    await _limit(play, config, 64)
    names = [unique() for _ in range(4)]
    async with Engine(play.desk, complete) as engine:
        for number, name in enumerate(names):
            await play.start(name, 50 + 1_000 * number)
        await once(play, engine, names)
        reason = await eventually(partial(_reasons, driver, "lease_unavailable"), 20)
        assert "maximum bytes exceeded" in reason["message"]
        assert (driver.details()["role"], standby.details()["role"]) == ("driver", "standby")
        driver.kill()
        await is_driver(standby)
        again = await play.service(instance=driver.instance, ready=False)
        await play.start(name := unique(), 50)
        await once(play, engine, [name])
        await _limit(play, config, topology.LEASES_MAX_BYTES)
        await again.ready()
        await standby.ready()
        await eventually(partial(_lease_of_one, play, standby, again), 20, what="one driver, and its record")


async def _lease_of_one(play: Play, *services: Service) -> bool:
    driving = [service for service in services if service.details()["role"] == "driver"]
    return len(driving) == 1 and await _lease_of(play, driving[0])


async def _limit(play: Play, config: StreamConfig, max_bytes: int) -> None:
    config.max_bytes = max_bytes
    await play.desk.js.update_stream(config)
