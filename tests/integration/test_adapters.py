"""The pieces that talk to the broker, each alone, over restarts and deletions of what they use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.service import eventually, unique
from timer_service.errors import Ambiguous, BrokerError, NotFound, StorageFull, Unavailable, WrongRevision
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import Delivery, PullLoop
from timer_service.jetstream.follow import Follower
from timer_service.jetstream.publish import Publisher

HARD = pytest.mark.parametrize("hard", [True, False], ids=["killed", "stopped"])


async def stream(connection: Connection, name: str, **config: Any) -> None:
    body = {"name": name, "subjects": [f"{name}.>"], "storage": "file", "allow_direct": True, **config}
    await connection.api(f"STREAM.CREATE.{name}", body)


async def consumer(connection: Connection, of: str, name: str) -> None:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", "ack_wait": 1_000_000_000}
    await connection.api(f"CONSUMER.CREATE.{of}.{name}", {"stream_name": of, "config": config, "action": "create"})


async def until_stored(publisher: Publisher, subject: str, data: bytes) -> None:
    """Publish, again and again where the broker is away, until it is stored."""

    async def stored() -> bool:
        try:
            await publisher.publish(subject, data)
        except BrokerError:
            return False
        return True

    await eventually(stored, 20, every=0.01)


async def restarted(broker: Broker, hard: bool, back: Callable[[], Awaitable[Any]]) -> float:
    """Restart; returns the seconds from the broker being there until ``back`` returned."""
    await asyncio.to_thread(broker.restart, hard=hard)
    begun = time.monotonic()
    await back()
    took = time.monotonic() - begun
    assert took < 12  # measured is a tenth of a second; nats-py's own watchers take 16 s
    return took


@HARD
async def test_a_publisher_stores_again_after_a_restart(
    broker: Broker, connection: Connection, publisher: Publisher, hard: bool, record_property: Any
) -> None:
    """The first publish after the broker is back gets its ack within seconds."""
    await stream(connection, "A")
    await publisher.publish("A.x", b"1")
    took = await restarted(broker, hard, lambda: until_stored(publisher, "A.x", b"2"))
    record_property("first_ack_s", round(took, 3))
    print(f"publisher: first ack {took:.2f} s after the broker was back")


async def test_what_was_in_flight_when_the_broker_died_is_ambiguous_at_once(
    broker: Broker,
) -> None:
    """Nobody waits out a time-out for a reply that can't come."""
    connection = Connection(broker.url, name="patient", timeout_ms=60_000)
    await connection.open()
    publisher = Publisher(connection)
    await publisher.start()
    await stream(connection, "A")
    broker.pause()
    pending = [await publisher.send("A.x", b"") for _ in range(100)]
    begun = time.monotonic()
    broker.kill()
    for one in pending:
        with pytest.raises(Ambiguous):
            await one
    assert time.monotonic() - begun < 30
    assert publisher.in_flight == 0
    await publisher.stop()
    await connection.close()


async def test_a_silent_broker_is_ambiguous_after_the_time_out(broker: Broker) -> None:
    """Without a reply every kind of wait ends, and a late reply does no harm."""
    connection = Connection(broker.url, name="test", timeout_ms=2_000)
    await connection.open()
    publisher = Publisher(connection)
    await publisher.start()
    await stream(connection, "A")
    with broker.paused():
        waits = (
            publisher.publish("A.x", b"1"),
            publisher.direct_get("A", "A.x"),
            publisher.api("STREAM.INFO.A"),
            connection.api("STREAM.INFO.A"),
        )
        for result in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(result, Ambiguous)
    assert (await publisher.publish("A.x", b"2")).seq == 2
    await publisher.stop()
    await connection.close()


@pytest.mark.parametrize("within", ["task", "gather"])
async def test_refusals_have_their_own_exceptions(connection: Connection, publisher: Publisher, within: str) -> None:
    """Wrong revision, full, nobody there, not found: each tells that nothing was stored."""
    await stream(connection, "A", max_bytes=2_000, discard="new")
    first = await publisher.publish("A.x", b"1")
    expected = {"Nats-Expected-Last-Subject-Sequence": "0"}
    with pytest.raises(WrongRevision) as wrong:
        await publisher.publish("A.x", b"2", expected)
    assert wrong.value.actual == first.seq
    with pytest.raises(StorageFull):
        await publisher.publish("A.x", b"x" * 3_000)
    with pytest.raises(Unavailable):
        await publisher.publish("nobody.listens", b"")
    with pytest.raises(NotFound):
        await publisher.api("STREAM.INFO.NONE")
    with pytest.raises(Unavailable):
        await publisher.direct_get("NONE", "x")
    assert await publisher.direct_get("A", "A.none") is None
    assert await publisher.direct_get_seq("A", 99) is None
    if within == "gather":
        results = await asyncio.gather(*(publisher.publish("A.y", b"") for _ in range(5)), return_exceptions=True)
        assert all(not isinstance(result, BaseException) for result in results)


@HARD
async def test_a_pull_loop_delivers_again_after_a_restart(
    broker: Broker, connection: Connection, publisher: Publisher, hard: bool, record_property: Any
) -> None:
    """What was not settled and what comes new arrive within seconds of the broker's return."""
    await stream(connection, "A")
    await consumer(connection, "A", "C")
    seen: list[bytes] = []
    held: list[Delivery] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.data)
        if delivery.data == b"hold" and not held:
            held.append(delivery)
            return
        task = asyncio.get_running_loop().create_task(delivery.ack())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    tasks: set[asyncio.Task[None]] = set()
    loop = PullLoop(connection, "A", "C", handle)
    await loop.start()
    await publisher.publish("A.x", b"hold")
    await eventually(lambda: held)

    async def arrives() -> None:
        await until_stored(publisher, "A.x", b"new")
        await eventually(lambda: b"new" in seen)

    took = await restarted(broker, hard, arrives)
    record_property("first_message_s", round(took, 3))
    print(f"pull loop: first message {took:.2f} s after the broker was back")
    await eventually(lambda: seen.count(b"hold") == 2, what="the unsettled one to come again")
    await eventually(lambda: loop.healthy)
    await loop.stop_pulling()


async def test_a_pull_loop_survives_the_deletion_of_its_consumer(connection: Connection, publisher: Publisher) -> None:
    """It is unhealthy while the consumer is missing, and delivers once it is there again."""
    await stream(connection, "A")
    await consumer(connection, "A", "C")
    seen: list[bytes] = []
    loop = PullLoop(connection, "A", "C", lambda delivery: seen.append(delivery.data))
    await loop.start()
    await eventually(lambda: loop.healthy)
    await connection.api("CONSUMER.DELETE.A.C")
    await eventually(lambda: not loop.healthy)
    await consumer(connection, "A", "C")
    await publisher.publish("A.x", b"1")
    await eventually(lambda: b"1" in seen)
    await eventually(lambda: loop.healthy)
    await loop.stop_pulling()


async def test_a_pull_request_that_is_lost_is_made_again(
    connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stands, and nothing is heard: it is unhealthy then, asks anew, and delivers."""
    await stream(connection, "A")
    await consumer(connection, "A", "C")
    await publisher.publish("A.x", b"1")
    publish, lost = connection.publish, list[bool]()

    async def losing(subject: str, data: bytes, reply: str = "") -> None:
        if lost:
            await publish(subject, data, reply)
        lost.append(loop.healthy)

    monkeypatch.setattr(connection, "publish", losing)
    seen: list[bytes] = []
    loop = PullLoop(connection, "A", "C", lambda delivery: seen.append(delivery.data), window=20, batch=20)
    await loop.start()
    await eventually(lambda: seen)
    assert lost[:2] == [True, False]
    await eventually(lambda: loop.healthy)
    await loop.stop_pulling()


async def test_a_pull_loop_bounds_what_is_unsettled(connection: Connection, publisher: Publisher) -> None:
    """Never more than the window in hand, whatever waits; settling lets the rest come."""
    await stream(connection, "A")
    await consumer(connection, "A", "C")
    for _ in range(100):
        await publisher.publish("A.x", b"")
    held: list[Delivery] = []
    loop = PullLoop(connection, "A", "C", held.append, window=20, batch=10)
    await loop.start()
    await eventually(lambda: len(held) == 20)
    done: set[int] = set()
    while len(done) < 100:
        await eventually(lambda: held)
        assert loop.unsettled <= 20
        delivery = held.pop(0)
        done.add(delivery.seq)
        await delivery.ack()
    await eventually(lambda: loop.unsettled == 0)
    await loop.stop_pulling()


@HARD
async def test_a_follower_misses_nothing_over_a_restart(
    broker: Broker, connection: Connection, publisher: Publisher, hard: bool, record_property: Any
) -> None:
    """Every change arrives once and in order; the first after the restart within seconds."""
    await stream(connection, "A")
    for n in range(5):
        await publisher.publish(f"A.{n}", b"old")
    seen: list[int] = []
    caught_up: list[int] = []
    follower = Follower(
        connection, publisher, "A", "A.>", lambda change: seen.append(change.seq), lambda: caught_up.append(len(seen))
    )
    await follower.start()
    await eventually(lambda: caught_up)
    assert caught_up == [5]

    async def arrives() -> None:
        name = unique()
        await until_stored(publisher, f"A.{name}", b"new")
        await eventually(lambda: len(seen) >= 6)

    took = await restarted(broker, hard, arrives)
    record_property("first_change_s", round(took, 3))
    print(f"follower: first change {took:.2f} s after the broker was back")
    await publisher.publish("A.last", b"")
    last = (await publisher.api("STREAM.INFO.A"))["state"]["last_seq"]
    await eventually(lambda: seen[-1] == last)
    assert seen == list(range(1, last + 1))
    assert caught_up == [5]
    await follower.stop()


async def test_a_follower_survives_the_deletion_of_its_consumer(connection: Connection, publisher: Publisher) -> None:
    """Its consumer is its own business: deleted by hand it makes another one, without a gap."""
    await stream(connection, "A")
    seen: list[int] = []
    follower = Follower(connection, publisher, "A", "A.>", lambda change: seen.append(change.seq), lambda: None)
    await follower.start()
    await publisher.publish("A.1", b"")
    await eventually(lambda: seen == [1])
    (name,) = (await connection.api("CONSUMER.NAMES.A"))["consumers"]
    await connection.api(f"CONSUMER.DELETE.A.{name}")
    await publisher.publish("A.2", b"")
    await publisher.publish("A.3", b"")
    await eventually(lambda: seen == [1, 2, 3])
    await follower.stop()


async def test_a_follower_notices_a_message_that_never_came(connection: Connection, publisher: Publisher) -> None:
    """A gap in what it is told makes it read again from there: nothing is missed, nothing comes out of order."""
    await stream(connection, "A")
    seen: list[int] = []
    follower = Follower(connection, publisher, "A", "A.>", lambda change: seen.append(change.seq), lambda: None)
    await follower.start()
    loop = follower._loop
    assert loop is not None
    deliver = loop._handle
    lost: list[Delivery] = []

    def lossy(delivery: Delivery) -> None:
        if delivery.seq == 3 and not lost:
            lost.append(delivery)
        else:
            deliver(delivery)

    loop._handle = lossy
    for n in range(6):
        await publisher.publish(f"A.{n}", b"")
    await eventually(lambda: len(seen) == 6)
    assert lost
    assert seen == [1, 2, 3, 4, 5, 6]
    await follower.stop()


async def test_a_follower_reads_only_the_last_of_each_subject_that_stands(
    connection: Connection, publisher: Publisher
) -> None:
    """What was overwritten is skipped; with ``every`` all is read; after ``after_seq`` only what is newer."""
    await stream(connection, "A")
    for subject in ("A.1", "A.2", "A.1", "A.3"):
        await publisher.publish(subject, b"body")
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [2, 3, 4]),
        ({"every": True}, [1, 2, 3, 4]),
        ({"after_seq": 3}, [4]),
    ]
    for options, expected in cases:
        seen: list[Delivery] = []
        done = asyncio.Event()
        follower = Follower(connection, publisher, "A", "A.>", seen.append, done.set, **options)
        await follower.start()
        await asyncio.wait_for(done.wait(), 20)
        assert [change.seq for change in seen] == expected
        await follower.stop()


async def test_a_long_read_leaves_room_for_others(connection: Connection, publisher: Publisher) -> None:
    """A request in the middle of a scan does not wait for its end."""
    await stream(connection, "A")
    for _ in range(20):
        await asyncio.gather(*(publisher.publish(f"A.{n}", b"x" * 300) for n in range(500)))
    seen: list[int] = []
    follower = Follower(
        connection, publisher, "A", "A.>", lambda change: seen.append(change.seq), lambda: None, every=True
    )
    await follower.start()
    await eventually(lambda: seen, every=0)
    before = len(seen)
    await publisher.api("STREAM.INFO.A")
    assert len(seen) - before < 2_000
    await eventually(lambda: len(seen) == 10_000)
    await follower.stop()
