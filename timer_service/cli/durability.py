"""What the broker here survives: how many replicas there are, and how often they flush to their disks.

docs/durability.md has the table of which failure costs what.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from timer_service.errors import BrokerError, NotFound
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection, Received

PING = "$SYS.REQ.SERVER.PING.JSZ"
"""Every server answers with its JetStream configuration; only where the account may ask, see nats/accounts.conf."""
_PING_S = 0.5
_KEEPS = tuple(
    spec.name
    for spec in topology.streams(topology.Sizes())
    if spec.discard == "new" and spec.name != topology.LEASE_STREAM
)
"""The streams whose messages nobody could make again."""


class Durability(msgspec.Struct, frozen=True):
    """``flush_s``: the longest time between two flushes of any server; 0: each write is flushed; None: not told."""

    replicas: int
    flush_s: float | None
    servers: int = 0

    @property
    def text(self) -> str:
        """What that is worth."""
        if self.replicas == 1:
            survives = "1 replica: survives killed processes and brokers, not the loss of the machine or its disk"
        else:
            lost = (self.replicas - 1) // 2
            survives = f"{self.replicas} replicas: survives the loss of any {lost} of their machines"
        return f"{survives}; {_at_power_loss(self.replicas, self.flush_s)}"

    def plain(self) -> dict[str, Any]:
        return {"replicas": self.replicas, "flush_s": self.flush_s, "servers": self.servers, "text": self.text}


def _at_power_loss(replicas: int, flush_s: float | None) -> str:
    where = "without power" if replicas == 1 else "with all of them without power at once"
    if flush_s is None:
        return f"{where}, what was written since the last flush is lost: sync_interval is not visible from here; " + (
            "the server's default is 2 minutes"
        )
    if flush_s == 0:
        return f"{where}, nothing acknowledged is lost (sync_interval: always)"
    return f"{where}, up to {flush_s:g} s of acknowledged work is lost (sync_interval)"


async def durability_of(connection: Connection) -> Durability | None:
    """The level in force, None while the streams are missing. Raises BrokerError."""
    try:
        infos = [await connection.api(f"STREAM.INFO.{name}") for name in _KEEPS]
    except NotFound:
        return None
    replicas = min(info["config"].get("num_replicas", 1) for info in infos)
    flushes = await _flushes(connection)
    return Durability(replicas, max(flushes, default=None), len(flushes))


async def _flushes(connection: Connection) -> list[float]:
    """How often each server flushes, in seconds; empty where the account may not ask."""
    answers: list[bytes] = []

    async def take(message: Received) -> None:
        answers.append(message.data)

    inbox = connection.client.new_inbox()
    subscription = await connection.subscribe(inbox, take)
    try:
        await connection.publish(PING, b"", inbox)
        await asyncio.sleep(_PING_S)
        await subscription.unsubscribe()
    except BrokerError:
        return []
    return [seconds for answer in answers if (seconds := _flush_s(answer)) is not None]


def _flush_s(answer: bytes) -> float | None:
    """The answer of one server; that nobody answers has no body."""
    try:
        config = msgspec.json.decode(answer)["data"]["config"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return 0.0 if config.get("sync_always") else float(config["sync_interval"] / topology.NS)
