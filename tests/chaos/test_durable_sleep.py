"""A durable sleep on a real service, with whoever sleeps and whoever keeps the time killed, cut off or late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.cli import Running
from tests.support.service import Desk, Service, eventually, name_ref, now_ms, unique
from tests.support.stage import Stage
from timer_service import sleeping
from timer_service.client import TimerClient
from timer_service.errors import CommandRejected, SleepInterrupted
from timer_service.jetstream import topology

FLAGS = ("--test-clock",)
HOUR_MS = 3_600_000
APPLICATION = """
import asyncio, sys
from timer_service.client import TimerClient

async def main(url, key, duration_ms):
    async with await TimerClient.connect(url) as timers:
        print("asleep", flush=True)
        await timers.sleep(key, int(duration_ms))
        print("awake", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def application(url: str, key: str, duration_ms: int) -> Running:
    """A program that sleeps, says that it is awake, and ends."""
    return Running("-c", APPLICATION, url, key, str(duration_ms), program=sys.executable)


@pytest.fixture
async def timers(desk: Desk, stage: Stage) -> AsyncIterator[TimerClient]:
    async with await TimerClient.connect(stage.broker.url) as client:
        yield client


def ref(key: str) -> str:
    return name_ref(key, "sleep")


async def waiting(desk: Desk, key: str) -> dict[str, Any]:
    """Wait until the timer of a sleep is there; returns its state."""
    return dict(await eventually(lambda: desk.state(ref(key)), 20, what=f"the timer of {key}"))


def shift(service: Service, by_ms: int) -> None:
    code, answer = service.http("/debug/clock", b'{"offset_ms": %d}' % by_ms)
    assert code == 200, json.loads(answer)


async def completed_once(desk: Desk, key: str) -> dict[str, Any]:
    """The one record of a sleep that is over."""
    record = await desk.ended(ref(key), 20)
    assert (record["status"], record["generation"], await desk.records_of(ref(key))) == ("completed", 0, 1)
    return record


# -- killed ---------------------------------------------------------------------------------------------------


async def test_application_and_service_killed_in_the_middle(stage: Stage, desk: Desk, service: Service) -> None:
    """Both are killed while it waits; started anew, it is over at the time that the first call gave, and once."""
    key = unique()
    with application(stage.broker.url, key, 4_000) as first:
        due_at_ms = (await waiting(desk, key))["due_at_ms"]
        first.process.kill()
        service.kill()
        assert "awake" not in first.output
    offset_ms = due_at_ms - now_ms()  # the test clock of the killed service, which other tests have shifted
    service.start()
    await service.ready()
    if offset_ms > 10_000:
        shift(service, offset_ms)
    with application(stage.broker.url, key, HOUR_MS) as second:
        assert await asyncio.to_thread(second.wait) == 0
        assert "awake" in second.output
    record = await completed_once(desk, key)
    assert record["due_at_ms"] == due_at_ms
    assert record["timeline"][0]["elapsed_at_ms"] >= due_at_ms


async def test_over_while_nobody_slept(stage: Stage, desk: Desk, service: Service, timers: TimerClient) -> None:
    """The application is killed and its time passes: the next call returns at once, and so does any later one."""
    key = unique()
    with application(stage.broker.url, key, HOUR_MS) as first:
        await waiting(desk, key)
        first.process.kill()
    shift(service, HOUR_MS)
    async with asyncio.timeout(20):
        await timers.sleep(key, HOUR_MS)
        await completed_once(desk, key)
        await timers.sleep(key, HOUR_MS)
    await completed_once(desk, key)


async def test_the_service_comes_later(broker: Broker, tmp_path: Path) -> None:
    """Called before there is a service: the start waits in its stream, and the sleep goes on when it is served."""
    with Service(broker.url, tmp_path) as service:
        await service.ready()
        service.kill()
        async with await TimerClient.connect(broker.url, timeout_ms=200) as timers, Desk.at(broker.url) as desk:
            asleep = asyncio.create_task(timers.sleep("k", 500))
            await eventually(lambda: _queued(desk))
            service.start()
            async with asyncio.timeout(30):
                await asleep
            await completed_once(desk, "k")


async def _queued(desk: Desk) -> bool:
    return await desk.count(topology.COMMANDS) > 0


async def test_it_goes_on_after_a_broker_outage(broker: Broker, tmp_path: Path) -> None:
    """The broker is killed in the middle, also over the due time; another sleep begins while it is away."""
    with Service(broker.url, tmp_path) as service:
        await service.ready()
        async with await TimerClient.connect(broker.url) as timers:
            first = asyncio.create_task(timers.sleep("first", 3_000))
            async with Desk.at(broker.url) as desk:
                await waiting(desk, "first")
            broker.kill()
            second = asyncio.create_task(timers.sleep("second", 700))
            await asyncio.sleep(3)  # past the due time
            assert not first.done()
            broker.start()
            async with asyncio.timeout(40):
                await asyncio.gather(first, second)
            async with Desk.at(broker.url) as desk:
                await completed_once(desk, "first")
                await completed_once(desk, "second")


# -- side by side ---------------------------------------------------------------------------------------------


async def test_two_sleep_on_one_key(stage: Stage, desk: Desk, service: Service, timers: TimerClient) -> None:
    """Both return; whoever came first gave the duration; nothing is refused, and there is one record."""
    key, refused = unique(), await desk.last_seq(topology.REJECTIONS)
    async with await TimerClient.connect(stage.broker.url) as others:
        first = asyncio.create_task(timers.sleep(key, HOUR_MS))
        due_at_ms = (await waiting(desk, key))["due_at_ms"]
        second = asyncio.create_task(others.sleep({"namespace": "sleep", "name": key}, 1))
        third = asyncio.create_task(others.sleep(key, 48 * HOUR_MS))
        await others.get({"namespace": "sleep", "name": key})
        shift(service, HOUR_MS)
        async with asyncio.timeout(20):
            await asyncio.gather(first, second, third)
    assert (await completed_once(desk, key))["due_at_ms"] == due_at_ms
    assert await desk.last_seq(topology.REJECTIONS) == refused


async def test_two_begin_at_once_with_different_durations(
    stage: Stage, desk: Desk, service: Service, timers: TimerClient
) -> None:
    """Of two starts that cross one takes effect, and both wait for it."""
    key = unique()
    async with await TimerClient.connect(stage.broker.url) as others:
        asleep = [asyncio.create_task(client.sleep(key, HOUR_MS + n)) for n, client in enumerate((timers, others))]
        await waiting(desk, key)
        shift(service, HOUR_MS + 1)
        async with asyncio.timeout(20):
            await asyncio.gather(*asleep)
    await completed_once(desk, key)


async def test_without_a_notify_consumer_no_resume_stays_behind(broker: Broker, tmp_path: Path) -> None:
    """Nobody reads the stream: the next scan drops what was slept out, and keeps what still waits for an answer."""
    with Service(broker.url, tmp_path, reconcile_interval_ms=1_000) as service:
        await service.ready()
        async with await TimerClient.connect(broker.url) as timers, Desk.at(broker.url) as desk:
            await timers.start({"name": "unanswered"}, delay_ms=1)
            await asyncio.gather(*(timers.sleep(f"nap {n}", 100) for n in range(20)))
            for n in range(20):
                await completed_once(desk, f"nap {n}")
            await eventually(lambda: _only_the_unanswered(desk), 20, what="the stream to be swept")
            assert service.metric("durable_timer_repairs_total", "resume_dropped") == 20
            state = await desk.state(name_ref("unanswered"))
            assert state is not None
            assert state["phase"] == "elapsed"


async def _only_the_unanswered(desk: Desk) -> bool:
    return await desk.count(topology.RESUMES) == 1


# -- heard or not ---------------------------------------------------------------------------------------------


async def test_the_end_is_heard(
    desk: Desk, service: Service, timers: TimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a single look in between it wakes by the broker's word, also when the service's clock is shifted."""
    monkeypatch.setattr(sleeping, "FIRST_LOOK_S", 3_600.0)
    monkeypatch.setattr(sleeping, "MAX_LOOK_S", 3_600.0)
    key = unique()
    asleep = asyncio.create_task(timers.sleep(key, HOUR_MS))
    await waiting(desk, key)
    shift(service, HOUR_MS)
    async with asyncio.timeout(20):
        await asleep


async def test_an_end_that_goes_unheard_is_seen(desk: Desk, monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """Where the state's subject may not be heard, a look at the due time finds it."""

    @contextlib.asynccontextmanager
    async def deaf(*_: Any) -> AsyncIterator[None]:
        yield

    async with await TimerClient.connect(stage.broker.url) as timers:
        monkeypatch.setattr(timers, "watching", deaf)
        async with asyncio.timeout(20):
            await timers.sleep(unique(), 1_500)


# -- otherwise ------------------------------------------------------------------------------------------------


async def test_giving_up_leaves_the_timer(desk: Desk, service: Service, timers: TimerClient) -> None:
    """Who cancels the task that waits does not cancel the wait."""
    key = unique()
    asleep = asyncio.create_task(timers.sleep(key, HOUR_MS))
    await waiting(desk, key)
    asleep.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asleep
    assert (await waiting(desk, key))["phase"] == "waiting"
    shift(service, HOUR_MS)
    async with asyncio.timeout(20):
        await timers.sleep(key, HOUR_MS)


async def test_a_cancelled_timer_wakes_with_an_error(desk: Desk, timers: TimerClient) -> None:
    """At once, with the reason; calling again says it again, and starts nothing."""
    key = unique()
    asleep = asyncio.create_task(timers.sleep(key, HOUR_MS))
    await waiting(desk, key)
    await timers.cancel({"namespace": "sleep", "name": key}, reason="not needed")
    for call in (asleep, timers.sleep(key, HOUR_MS)):
        async with asyncio.timeout(20):
            with pytest.raises(SleepInterrupted, match="cancelled: not needed"):
                await call
    assert await desk.state(ref(key)) is None


async def test_a_key_of_another_timer_is_refused(desk: Desk, timers: TimerClient) -> None:
    """Also when that timer takes the place of a sleep that is running."""
    key = {"name": unique()}
    asleep = asyncio.create_task(timers.sleep(key, HOUR_MS))
    await eventually(lambda: desk.state(name_ref(key["name"])))
    await timers.start(key, delay_ms=HOUR_MS, payload="mine")
    async with asyncio.timeout(20):
        with pytest.raises(SleepInterrupted, match="replaced"):
            await asleep
    other = {"name": unique()}
    await timers.start(other, delay_ms=HOUR_MS)
    async with asyncio.timeout(20):
        with pytest.raises(CommandRejected, match="conflict"):
            await timers.sleep(other, HOUR_MS)
