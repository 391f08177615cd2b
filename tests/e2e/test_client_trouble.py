"""A client that is closed, cut off, cancelled or used wrongly: it raises errors of its own, and harms nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.service import Desk, Service, eventually, name_ref, unique
from tests.support.stage import Stage
from timer_service import sleeping
from timer_service.client import TimerClient
from timer_service.errors import Ambiguous, BrokerError, CommandRejected, NotStored, OutcomeUnknown, Unavailable
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection

HOUR_MS = 3_600_000


@pytest.fixture
async def timers(desk: Desk, stage: Stage) -> AsyncIterator[TimerClient]:
    async with await TimerClient.connect(stage.broker.url) as client:
        yield client


# -- the connection -------------------------------------------------------------------------------------------


async def test_a_flush_that_is_given_up_leaves_the_connection_able_to_hear(shared_broker: Broker) -> None:
    """Cancelled in mid-flight; its late pong must end nothing."""
    connection = Connection(shared_broker.url, name="flush", timeout_ms=20_000)
    await connection.open()
    try:
        flush = asyncio.create_task(connection.flush())
        await asyncio.sleep(0)
        flush.cancel()
        await asyncio.wait({flush})
        assert flush.cancelled()
        await connection.flush()
        await _heard(connection)
    finally:
        await connection.close()


async def test_a_flush_that_took_too_long_leaves_the_connection_able_to_hear(broker: Broker) -> None:
    """The broker freezes past the time-out, and answers all the same when it goes on."""
    connection = Connection(broker.url, name="flush", timeout_ms=300)
    await connection.open()
    try:
        with broker.paused(), pytest.raises(Ambiguous):
            await connection.flush()
        connection.timeout_s = 20.0
        await connection.flush()
        await _heard(connection)
    finally:
        await connection.close()


async def _heard(connection: Connection) -> None:
    """It reads on, and did not have to come back for that."""
    returned: list[None] = []
    connection.on_returned(lambda: returned.append(None))
    assert await connection.request("$JS.API.INFO")
    assert not returned


async def test_a_sleep_cancelled_at_once_harms_no_other_call(timers: TimerClient) -> None:
    """Wherever it was interrupted, the same client goes on, and on the same connection."""
    returned: list[None] = []
    timers._connection.on_returned(lambda: returned.append(None))
    for turns in range(12):
        asleep = asyncio.create_task(timers.sleep(unique(), HOUR_MS))
        for _ in range(turns):
            await asyncio.sleep(0)
        asleep.cancel()
        await asyncio.wait({asleep})
        async with asyncio.timeout(20):
            await timers.start({"name": unique()}, delay_ms=HOUR_MS)
    assert not returned


# -- closed ---------------------------------------------------------------------------------------------------


async def test_closing_ends_calls_under_way_with_errors(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never with a cancellation, which nobody asked for: not in a task group, where it would pass for an end."""
    monkeypatch.setattr(sleeping, "FIRST_LOOK_S", 3_600.0)  # what wakes a sleeper is the close alone
    monkeypatch.setattr(sleeping, "MAX_LOOK_S", 3_600.0)
    with Service(broker.url, tmp_path) as service:
        await service.ready()
        timers = await TimerClient.connect(broker.url)
        async with Desk.at(broker.url) as desk:
            asleep = asyncio.create_task(timers.sleep("k", HOUR_MS))
            await eventually(lambda: desk.state(name_ref("k", "sleep")))
            service.kill()
            answered = asyncio.create_task(timers.start({"name": "pending"}, delay_ms=HOUR_MS, command_id="mine"))
            await eventually(lambda: _stored(desk))
            flying = asyncio.create_task(timers.start({"name": "flying"}, delay_ms=HOUR_MS, command_id="also mine"))
            await asyncio.sleep(0)
            await timers.close()
            async with asyncio.timeout(20):
                ends: Any = await asyncio.gather(answered, flying, asleep, return_exceptions=True)
    assert [type(end) for end in ends] == [OutcomeUnknown, NotStored, Unavailable]
    assert (ends[0].command_id, ends[1].command_id) == ("mine", "also mine")


async def _stored(desk: Desk) -> bool:
    return await desk.count(topology.COMMANDS) > 0


async def test_a_closed_client_refuses_with_errors_of_ours(stage: Stage, desk: Desk) -> None:
    """Every method; closing again does nothing."""
    timers = await TimerClient.connect(stage.broker.url)
    await timers.close()
    await timers.close()
    key = {"name": unique()}
    with pytest.raises(NotStored):
        await timers.start(key, delay_ms=HOUR_MS)
    with pytest.raises(NotStored):
        await timers.start(key, delay_ms=HOUR_MS, wait=False)
    with pytest.raises(NotStored):
        await timers.delete(key)
    with pytest.raises(BrokerError):
        await timers.get(key)
    with pytest.raises(Unavailable):
        await timers.sleep(key, 1)
    assert timers.closed


# -- used wrongly ---------------------------------------------------------------------------------------------


async def test_without_an_outcome_a_hopeless_command_is_refused_before_it_is_sent(
    desk: Desk, timers: TimerClient
) -> None:
    """As the service would have refused it, had anybody listened; nothing reaches the stream."""
    key = {"name": unique()}
    before = await desk.last_seq(topology.COMMANDS)
    with pytest.raises(CommandRejected) as late:
        await timers.start(key, wait=False)
    assert (late.value.code, late.value.outcome.status) == ("invalid_due", "rejected")
    with pytest.raises(CommandRejected, match="malformed"):
        await timers.complete(key, True, 1, wait=False)
    with pytest.raises(CommandRejected, match="too_large"):
        await timers.start(key, delay_ms=1, payload="x" * 300_000, wait=False)
    with pytest.raises(CommandRejected, match="malformed"):
        await timers.fail(key, 0, 1, "Not A Code", wait=False)
    assert await desk.last_seq(topology.COMMANDS) == before


async def test_odd_arguments(timers: TimerClient, desk: Desk) -> None:
    """What names no timer or kind is a ValueError or TypeError that says so; an empty command_id is not replaced."""
    returned: list[None] = []
    timers._connection.on_returned(lambda: returned.append(None))
    a_list: Any = ["name"]
    a_name: Any = "order-42"
    a_kind: Any = "no kind"
    with pytest.raises(ValueError, match=r"timer\.name: is empty"):
        await timers.get({"name": ""})
    with pytest.raises(ValueError, match="not a timer_ref"):
        await timers.delete(a_name)
    with pytest.raises(TypeError, match="not a key object"):
        await timers.start(a_name, delay_ms=1)
    with pytest.raises(TypeError, match="not a key object"):
        await timers.sleep(a_list, 1)
    with pytest.raises(ValueError, match="not a kind"):
        await timers.send(a_kind, {})
    with pytest.raises(CommandRejected, match="command_id"):
        await timers.start({"name": unique()}, delay_ms=1, command_id="")
    with pytest.raises(OutcomeUnknown):
        await timers.cancel({"name": unique()}, wait_ms=10_000, timeout_ms=0)  # its outcome takes ten seconds
    assert not returned
