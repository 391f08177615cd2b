"""Leases on a real nats-server: what is heard, what is read, and what stays behind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.notify import until
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.lease import Lease
from timer_service.jetstream.provision import Provisioner
from timer_service.jetstream.publish import Publisher
from timer_service.logs import get_logger


class Contestant:
    """A lease with a connection of its own; counts what it reads."""

    def __init__(self, url: str, instance: str, key: str) -> None:
        self.connection = Connection(url, name=instance)
        self.publisher = Publisher(self.connection)
        self.reads = 0
        self._api = self.publisher.api
        self.publisher.api = self._count  # type: ignore[method-assign]
        self.lease = Lease(self.connection, self.publisher, key, instance, get_logger())

    async def _count(self, name: str, body: object = None) -> dict[str, Any]:
        self.reads += 1
        return await self._api(name, body)

    async def open(self) -> None:
        await self.connection.open()
        await self.publisher.start()
        await Provisioner(self.connection, topology.Sizes()).create_missing()

    async def close(self) -> None:
        await self.lease.give_up()
        await self.publisher.stop()
        await self.connection.close()

    async def stored(self, key: str) -> dict[str, Any]:
        message = await self.publisher.direct_get(topology.LEASE_STREAM, topology.lease_subject(key))
        assert message is not None
        return {**json.loads(message.data), "ttl": message.headers.get("Nats-TTL")}


@pytest.fixture
async def pair(broker: Broker) -> AsyncIterator[tuple[Contestant, Contestant]]:
    async with AsyncExitStack() as stack:
        made = []
        for instance in ("a", "b"):
            contestant = Contestant(broker.url, instance, topology.DRIVER_LEASE)
            await contestant.open()
            stack.push_async_callback(contestant.close)
            made.append(contestant)
        yield made[0], made[1]


async def test_a_standby_hears_and_does_not_read(pair: tuple[Contestant, Contestant]) -> None:
    """One read at the start, one before the take-over: renewals and the end are heard."""
    first, second = pair
    await first.lease.start()
    await until(lambda: first.lease.held)
    await second.lease.start()
    await until(lambda: second.lease.rival)

    async def renewed() -> bool:
        return bool((await first.stored(topology.DRIVER_LEASE))["beat"] > 7)

    await until(renewed)
    assert second.reads < 3, "one who hears nothing reads every other second"
    before = second.reads
    await first.lease.give_up()
    await until(lambda: second.lease.held)
    assert second.reads - before <= 2, "the second one where the first was ahead of the store"
    assert (await second.stored(topology.DRIVER_LEASE))["epoch"] == 2
    assert (await second.stored(topology.DRIVER_LEASE))["ttl"] is None


async def test_a_lease_may_be_started_again(pair: tuple[Contestant, Contestant]) -> None:
    """After it was given up it contends anew, with a newer epoch; giving up twice does nothing."""
    first, _ = pair
    for epoch in (1, 2, 3):
        await first.lease.start()
        await until(lambda: first.lease.held)
        assert (await first.stored(topology.DRIVER_LEASE))["epoch"] == epoch
        await first.lease.give_up()
        await first.lease.give_up()
        assert not first.lease.mine


async def test_names_are_forgotten_after_a_while(broker: Broker) -> None:
    """The bucket has room for the living: what stands for a name has a time to live."""
    key = topology.name_lease(topology.TIMER_SERVICE, "pod-4711")
    contestant = Contestant(broker.url, "pod-4711", key)
    await contestant.open()
    await contestant.lease.start()
    await until(lambda: contestant.lease.held)
    assert (await contestant.stored(key))["ttl"] == f"{topology.NAME_TTL_S}s"
    await contestant.close()
