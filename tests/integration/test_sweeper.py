"""Sweeping payloads that nothing refers to: never one that is young, referred to, or of an unreadable state."""

from __future__ import annotations

from tests.support.broker import Broker
from timer_service.clock import ManualClock, SystemClock
from timer_service.domain.identity import TimerRef
from timer_service.domain.model import JsonText
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.provision import Provisioner
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.stores import JetStreamSnapshots
from timer_service.jetstream.watch import SnapshotSweeper

GRACE_MS = 60_000


async def test_only_old_orphans_go(broker: Broker) -> None:
    """A payload whose state is still being written has its grace; what is referred to, or spared, stays for good."""
    connection = Connection(broker.url, name="test")
    await connection.open()
    publisher = Publisher(connection)
    await publisher.start()
    try:
        await Provisioner(connection, topology.Sizes()).provision()
        snapshots = JetStreamSnapshots(publisher)
        refs = [TimerRef(letter * 26) for letter in "abc"]
        orphan, used, unreadable = [await snapshots.add(ref, 0, JsonText(b'"x"')) for ref in refs]
        now_ms = SystemClock().now_ms()
        for later_ms, swept in ((0, 0), (GRACE_MS - 5_000, 0), (GRACE_MS + 5_000, 1), (10 * GRACE_MS, 0)):
            clock = ManualClock(now_ms + later_ms)
            sweeper = SnapshotSweeper(connection, publisher, snapshots, clock)
            assert await sweeper.sweep({used}, {refs[2]}, GRACE_MS) == swept
        kept = (await connection.api(f"STREAM.INFO.{topology.SNAPSHOTS}"))["state"]
        assert kept["messages"] == 2
        assert [bytes(await snapshots.get(seq)) for seq in (used, unreadable)] == [b'"x"', b'"x"']
        assert orphan not in (used, unreadable)
    finally:
        await publisher.stop()
        await connection.close()
