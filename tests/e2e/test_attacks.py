"""What a publisher with the rights of a publisher could try: none of it changes anything.

Replies to subjects that only the service may write are in test_service_bad_input.py; here the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
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
    publish_raw,
    ref_of,
    unique,
)
from tests.support.toll import Toll
from timer_service.jetstream import topology

SETTINGS = {"reconcile_interval_ms": 1_000, "snapshot_grace_ms": 1_000}
FAR = {"delay_ms": 86_400_000}
START = "durable_timer.commands.start.v1"
ACKS_OF_COMMANDS = f"$JS.ACK.{topology.COMMANDS}."


async def _settled(desk: Desk) -> bool:
    return await desk.count(topology.COMMANDS) == 0


# -- subjects and headers ---------------------------------------------------------------------------------------

SUBJECTS = {
    "not UTF-8": b"durable_timer.commands.\xff\xfe.v1",
    "half a character": b"durable_timer.commands.start.v1\xc3",
    "vertical tab": b"durable_timer.commands.a\x0bb.v1",
    "form feed": b"durable_timer.commands.a\x0cb.v1",
    "carriage return": b"durable_timer.commands.a\rb.v1",
    "nul": b"durable_timer.commands.\x00.v1",
    "3 kB": b"durable_timer.commands." + b"x" * 3_000 + b".v1",
    "many tokens": b"durable_timer.commands." + b"x." * 200 + b"v1",
}


@pytest.mark.parametrize("headers", [b"NATS/1.0\r\n\r\n", b""], ids=["headers", "no headers"])
@pytest.mark.parametrize("case", SUBJECTS)
async def test_a_subject_of_any_bytes_is_settled(desk: Desk, service: Service, case: str, headers: bytes) -> None:
    """C21: whatever the broker stores below the command subjects is refused as malformed, and nothing is blocked."""
    before = await desk.last_seq(topology.REJECTIONS)
    url = desk.client.connected_url
    assert url is not None
    publish_raw(int(url.port or 0), SUBJECTS[case], headers, b"{}")
    assert (await desk.ask("start", timer={"name": unique()}, due=FAR))["status"] == "accepted"
    await eventually(lambda: _settled(desk))
    (record,) = await desk.rejections(after=before)
    assert (record["kind"] in ("unknown", "start"), record["code"]) == (True, "malformed")
    assert service.readyz()[0] == 200


HEADERS = {
    "message TTL": {"Nats-TTL": "1s"},
    "rollup of the subject": {"Nats-Rollup": "sub"},
    "rollup of the stream": {"Nats-Rollup": "all"},
    "schedule": {"Nats-Schedule": "@at 2001-01-01T00:00:00Z", "Nats-Schedule-Target": topology.RESUME_SUBJECT},
    "purge of a schedule": {"Nats-Schedule-Next": "purge", "Nats-Scheduler": topology.STATE_PREFIX + "x"},
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("subject", [START, topology.RESUME_SUBJECT])
async def test_headers_that_would_remove_or_plan_messages(desk: Desk, subject: str, case: str) -> None:
    """The broker refuses them on commands and resumes (or ignores them): what is queued stays until it is settled."""
    key = {"name": unique()}
    await desk.ask("start", timer=key, due=FAR)
    entry = await desk.entry(ref_of(key))
    before = [await desk.last_seq(stream) for stream in (topology.STATE_STREAM, topology.RESUMES, topology.SCHEDULES)]
    body = encoded({"timer": key, "due": FAR, "if_exists": "reject"})
    with pytest.raises((nats.js.errors.APIError, nats.errors.Error)):
        await desk.js.publish(subject, body, headers=HEADERS[case])
    await eventually(lambda: _settled(desk))
    after = [await desk.last_seq(stream) for stream in (topology.STATE_STREAM, topology.RESUMES, topology.SCHEDULES)]
    assert after == before
    assert await desk.entry(ref_of(key)) == entry


async def test_the_headers_of_our_own_writes_do_nothing_on_a_command(desk: Desk) -> None:
    """KV operation, expected sequences, a message id: a command with them is a command."""
    key = {"name": unique()}
    headers = {"KV-Operation": "PURGE", "Nats-Msg-Id": unique(), "Status": "503", "Nats-Marker-Reason": "MaxAge"}
    outcome = await desk.ask_raw(START, encoded({"timer": key, "due": FAR}), headers)
    assert (outcome["status"], outcome["phase"]) == ("accepted", "waiting")
    assert (await desk.ask("cancel", timer_ref=ref_of(key)))["status"] == "accepted"


@pytest.mark.parametrize("stale", [0, 7])
async def test_a_wake_after_the_end_changes_nothing(desk: Desk, stale: int) -> None:
    """Forged or repeated wakes for timers that have ended: a name goes on with its next generation, a lineage not."""
    name, lineage = {"name": unique()}, lineage_key()
    async with Engine(desk, complete):
        for key in (name, lineage):
            await desk.ask("start", timer=key, due={"delay_ms": 20})
        for key in (name, lineage):
            await desk.ended(ref_of(key))
            wake = {"v": 1, "timer_ref": ref_of(key), "generation": stale, "woken_at_ms": now_ms(), "revision": stale}
            await desk.js.publish(topology.wake_subject(ref_of(key)), json.dumps(wake).encode())
        await eventually(lambda: _no_wake_pending(desk))
        again = await desk.ask("start", timer=name, due=FAR)
        assert (again["status"], again["generation"], again["fence"]) == ("accepted", 1, 4)
        assert (await desk.ask("start", timer=lineage, due=FAR))["code"] == "already_terminal"


async def _no_wake_pending(desk: Desk) -> bool:
    info = await desk.js.consumer_info(topology.SCHEDULES, topology.WAKE_CONSUMER)
    return bool(info.num_pending == 0 and info.num_ack_pending == 0)


# -- what is another's ------------------------------------------------------------------------------------------


async def test_racing_starts_with_different_payloads(desk: Desk) -> None:
    """Twenty starts of one lineage at once: one is accepted, and its payload and no other is resumed."""
    key = lineage_key()
    bodies = [encoded({"timer": key, "due": {"delay_ms": 700}, "payload": f"{n}:" + "x" * 2_000}) for n in range(20)]
    asked = await asyncio.gather(*(desk.asked(START, body) for body in bodies))
    outcomes = [await one.outcome() for one in asked]
    assert Counter(outcome["code"] for outcome in outcomes) == {None: 1, "conflict": 19}
    (winner,) = [n for n, outcome in enumerate(outcomes) if outcome["code"] is None]
    async with Engine(desk, complete) as engine:
        assert (await engine.resume_of(ref_of(key)))["payload"] == f"{winner}:" + "x" * 2_000
        await desk.ended(ref_of(key))
        assert len(engine.of(ref_of(key))) == 1


async def test_a_snapshot_of_another_timer_is_never_resumed(tmp_path: Path) -> None:
    """A snapshot stream that was deleted gives out its sequences again: no resume carries another one's payload."""
    one, other = {"name": unique()}, {"name": unique()}
    with (
        Broker(tmp_path / "nats") as broker,
        Service(broker.url, tmp_path, policy_check_interval_ms=500, **SETTINGS) as service,
    ):
        await service.ready()
        async with Desk.at(broker.url) as desk, Engine(desk) as engine:
            await desk.ask("start", timer=one, due={"delay_ms": 6_000}, payload=["mine", "x" * 2_000])
            await desk.js.delete_stream(topology.SNAPSHOTS)
            await eventually(lambda: _there(desk, topology.SNAPSHOTS), 20, what="the stream to be made anew")
            await desk.ask("start", timer=other, due={"delay_ms": 20}, payload=["another's", "x" * 2_000])
            assert (await engine.resume_of(ref_of(other)))["payload"][0] == "another's"
            await eventually(lambda: service.details()["problems"] == 1, 15, what="the lost payload to be reported")
            assert engine.of(ref_of(one)) == []


async def _there(desk: Desk, stream: str) -> bool:
    try:
        await desk.js.stream_info(stream)
    except nats.js.errors.NotFoundError:
        return False
    return True


# -- acks that were lost ----------------------------------------------------------------------------------------


@pytest.fixture
async def tolled(tmp_path: Path) -> AsyncIterator[tuple[Desk, Service, Toll]]:
    """A service whose connection runs through a toll gate, which can swallow what it sends."""
    with Broker(tmp_path / "nats") as broker:
        async with Toll(broker.port) as toll:
            with Service(toll.url, tmp_path, **SETTINGS) as service:
                await service.ready()
                async with Desk.at(broker.url) as desk:
                    yield desk, service, toll


async def test_forty_replaces_whose_acks_were_lost(tolled: tuple[Desk, Service, Toll]) -> None:
    """All forty are delivered again when the last has long taken effect: none takes effect twice."""
    desk, service, toll = tolled
    key = {"name": unique()}
    toll.swallow(ACKS_OF_COMMANDS)
    for n in range(40):
        await desk.send("start", timer=key, due={"delay_ms": 86_400_000 + n}, payload=n, command_id=f"c-{n}")
    state = await eventually(lambda: _at_generation(desk, key, 39))
    before = service.metric("durable_timer_commands_total", "", "start", "accepted")
    assert before == 40
    await eventually(lambda: toll.swallowed >= 80, 20, what="all forty to be delivered, decided and acknowledged again")
    toll.let_pass()
    await eventually(lambda: _settled(desk), 20, what="the queue to empty")
    assert await desk.state(ref_of(key)) == state
    assert (state["generation"], state["fence"], state["payload"]) == (39, 40, 39)


async def test_a_start_delivered_again_after_a_later_cancel(tolled: tuple[Desk, Service, Toll]) -> None:
    """Its ack was lost, and then it was cancelled: the start that comes again does not bring the timer back."""
    desk, _, toll = tolled
    keys: list[dict[str, str]] = [{"name": unique()}, {"name": unique()}, lineage_key()]
    toll.swallow(ACKS_OF_COMMANDS)
    async with Engine(desk) as engine:
        for key in keys:
            await desk.send("start", timer=key, due={"delay_ms": 3_000})
        for n in range(20):  # more than the ids that a timer remembers
            await desk.send("start", timer=keys[1], due={"delay_ms": 3_000}, payload=n)
        for key in keys:
            assert (await desk.ask("cancel", timer_ref=ref_of(key)))["status"] == "accepted"
        records = [await desk.ended(ref_of(key)) for key in keys]
        await eventually(lambda: toll.swallowed >= 52, 20, what="everything to be delivered and decided again")
        toll.let_pass()
        await eventually(lambda: _settled(desk), 20, what="the queue to empty")
        for key, record in zip(keys, records, strict=True):
            assert record["status"] == "cancelled"
            assert await desk.state(ref_of(key)) is None
            assert await desk.records_of(ref_of(key)) == 1
            assert engine.of(ref_of(key)) == []
    assert name_ref(keys[0]["name"]) == ref_of(keys[0])


async def _at_generation(desk: Desk, key: dict[str, str], generation: int) -> dict[str, Any] | None:
    state = await desk.state(ref_of(key))
    return state if state is not None and state["generation"] == generation else None
