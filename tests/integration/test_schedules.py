"""Schedules on a real broker: what they become, and a stream that can't have any."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.support.service import eventually, name_ref, now_ms, unique
from timer_service.domain.model import MAX_DUE_MS
from timer_service.errors import RequestRefused
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.permissions import missing_permissions
from timer_service.jetstream.provision import UNSUPPORTED, Provisioner
from timer_service.jetstream.publish import Message, Publisher
from timer_service.jetstream.schedules import JetStreamSchedules, read_schedule
from timer_service.jetstream.topology import SCHEDULES, Sizes
from timer_service.wire.instants import format_instant
from timer_service.wire.records import decode_wake

SPEC = next(spec for spec in topology.streams(Sizes()) if spec.name == SCHEDULES)
FLAG = topology.SCHEDULES_FLAG


@pytest.fixture
def schedules(connection: Connection, publisher: Publisher) -> JetStreamSchedules:
    return JetStreamSchedules(connection, publisher, replicas=1)


async def test_a_schedule_becomes_a_wake_that_runs_out(
    connection: Connection, publisher: Publisher, schedules: JetStreamSchedules
) -> None:
    """Never early by the broker's clock; the occurrence's id and the body survive, the schedule is gone."""
    await Provisioner(connection, Sizes(), native=True).provision()
    timer_ref, due_ms = name_ref(unique()), now_ms() + 700
    await schedules.put(timer_ref, 3, due_ms, 17)

    async def look() -> Message | None:
        return await publisher.direct_get(SCHEDULES, topology.wake_subject(timer_ref))

    wake = cast(Message, await eventually(look))
    assert wake.headers["Durable-Timer-Occurrence"] == f"{timer_ref}.3"
    assert wake.headers[topology.TTL_HEADER] == f"{topology.WAKE_TTL_S}s"
    assert wake.headers["Nats-Time-Stamp"] >= format_instant(due_ms)[:-1]
    decoded = decode_wake(wake.data)
    assert (decoded.timer_ref, decoded.generation, decoded.woken_at_ms, decoded.revision) == (timer_ref, 3, None, 17)
    assert await schedules.find(timer_ref) is None


async def test_the_latest_due_time_is_within_what_the_broker_can(
    connection: Connection, publisher: Publisher, schedules: JetStreamSchedules
) -> None:
    """An instant beyond 2262 would fire at once: the year 2200, the latest that a timer takes, does not."""
    await Provisioner(connection, Sizes()).provision()
    near, far = name_ref(unique()), name_ref(unique())
    await schedules.put(far, 0, MAX_DUE_MS, 1)
    await schedules.put(near, 0, now_ms(), 1)

    async def fired() -> Message | None:
        return await publisher.direct_get(SCHEDULES, topology.wake_subject(near))

    await eventually(fired)
    assert list(await schedules.standing()) == [far]


async def test_all_that_stand_are_read_whatever_stands_there(
    connection: Connection, publisher: Publisher, schedules: JetStreamSchedules
) -> None:
    """Each with generation and time; what somebody else put there is told apart, and can be dropped."""
    await Provisioner(connection, Sizes()).provision()
    due_ms = now_ms() + 3_600_000
    refs = [name_ref(unique()) for _ in range(5)]
    await asyncio.gather(*(schedules.put(ref, number, due_ms + number, 1) for number, ref in enumerate(refs)))
    foreign = await publisher.publish(topology.schedule_subject("what.ever"), b"{")
    standing = await schedules.standing()
    wanted: dict[str, tuple[int, int]] = {ref: (number, due_ms + number) for number, ref in enumerate(refs)}
    wanted["what.ever"] = (-1, 0)
    assert {ref: (one.generation, one.at_ms) for ref, one in standing.items()} == wanted
    assert await schedules.drop(foreign.seq)
    assert set(await schedules.standing()) == set(refs)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Durable-Timer-Occurrence": "x.0", "Nats-Schedule": "@at 2026-01-01T00:00:00Z"},
        {"Durable-Timer-Occurrence": f"{name_ref('a')}.01", "Nats-Schedule": "@at 2026-01-01T00:00:00Z"},
        {"Durable-Timer-Occurrence": f"{name_ref('b')}.1", "Nats-Schedule": "@at 2026-01-01T00:00:00Z"},
        {"Durable-Timer-Occurrence": f"{name_ref('a')}.1", "Nats-Schedule": "@every 1h"},
        {"Durable-Timer-Occurrence": f"{name_ref('a')}.1", "Nats-Schedule": "@at tomorrow"},
        {"Durable-Timer-Occurrence": f"{name_ref('a')}.1", "Nats-Schedule": "@at 2026-01-01T00:00:00"},
    ],
)
def test_what_is_none_of_ours_is_told_apart(headers: dict[str, str]) -> None:
    """Another timer's id, another spelling, another kind of schedule, an instant without a zone: generation -1."""
    assert read_schedule(9, name_ref("a"), headers).generation == -1


def test_instants_are_exact_to_the_millisecond() -> None:
    """Rounded down they would be early, and after 2200 or before 1970 nothing is asked for."""
    for at_ms in (0, 1, 999, 1_700_000_000_001, MAX_DUE_MS):
        headers = {"Durable-Timer-Occurrence": f"{name_ref('a')}.4", "Nats-Schedule": f"@at {format_instant(at_ms)}"}
        assert read_schedule(1, name_ref("a"), headers).at_ms == at_ms
    assert format_instant(1_700_000_000_001) == "2023-11-14T22:13:20.001Z"


# -- a stream without them --------------------------------------------------------------------------------------


async def make(connection: Connection, **other: Any) -> None:
    await connection.api(f"STREAM.CREATE.{SCHEDULES}", {**SPEC.config(1), FLAG: False, **other})


async def test_provision_turns_schedules_on_and_keeps_what_is_stored(
    connection: Connection, schedules: JetStreamSchedules
) -> None:
    """A stream of an earlier version: the native driver is not ready before, the heap does not mind."""
    await make(connection)
    await connection.request(topology.wake_subject("kept"), b"{}")
    native = Provisioner(connection, Sizes(), native=True)
    await native.create_missing()
    (finding,) = await native.check()
    assert (finding.code, finding.resource) == (UNSUPPORTED, SCHEDULES)
    assert "allow_msg_schedules is False; it must be True" in finding.message
    assert await Provisioner(connection, Sizes()).check() == []
    with pytest.raises(RequestRefused):
        await schedules.put(name_ref("a"), 0, now_ms() + 60_000, 1)
    assert await native.provision() == [f"widened stream {SCHEDULES}: {FLAG}"]
    assert await native.check() == []
    assert await native.provision() == []
    await schedules.put(name_ref("a"), 0, now_ms() + 60_000, 1)
    assert (await connection.api(f"STREAM.INFO.{SCHEDULES}"))["state"]["messages"] == 2


async def test_a_stream_that_can_not_have_them_is_named_and_left_alone(connection: Connection) -> None:
    """The server refuses them beside discard new: everything else is provisioned, and the cause is told."""
    await make(connection, discard="new")
    native = Provisioner(connection, Sizes(), native=True)
    done = await native.provision()
    (line,) = [line for line in done if SCHEDULES in line]
    assert line.startswith(f"left stream {SCHEDULES} without {FLAG}")
    assert "discard new" in line
    assert [finding.code for finding in await native.check()] == [UNSUPPORTED]
    assert await Provisioner(connection, Sizes()).check() == []


class _Ignorant:
    """A connection to a server that has never heard of schedules: it drops the field, as older ones do."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.server_version = "2.11.9"

    async def api(self, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if body is not None and FLAG in body:
            body = {field: value for field, value in body.items() if field != FLAG}
        return await self._connection.api(name, body)


async def test_a_server_without_schedules_is_named(connection: Connection) -> None:
    """C39: version and stream both say so; provisioning does not fail, and says what it could not do."""
    ignorant = cast(Connection, _Ignorant(connection))
    native = Provisioner(ignorant, Sizes(), native=True)
    wanted = [f"left stream {SCHEDULES} without {FLAG}: the server does not know schedules"]
    assert wanted == [line for line in await native.provision() if "left" in line]
    found = {finding.code: finding.resource for finding in await native.check()}
    assert found == {"server_too_old": "nats-server", UNSUPPORTED: SCHEDULES}


async def test_permissions_for_schedules_are_asked_for_by_the_native_driver_alone(connection: Connection) -> None:
    """On an open account nothing is missing, with either."""
    await Provisioner(connection, Sizes()).provision()
    assert await missing_permissions(connection, native=True) == []
    assert await missing_permissions(connection) == []
    assert (await connection.api(f"STREAM.INFO.{SCHEDULES}"))["state"]["messages"] == 0
