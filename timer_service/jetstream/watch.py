"""Looking at the broker from time to time: how full, which stream, whose clock; and sweeping snapshots."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from timer_service.clock import Clock
from timer_service.domain.identity import TimerRef
from timer_service.errors import BrokerError
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import Delivery
from timer_service.jetstream.follow import Follower
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.stores import JetStreamSnapshots
from timer_service.ports import Fill, StreamState

_WATCHED = (topology.STATE_STREAM, topology.SNAPSHOTS, topology.TERMINALS, topology.RESUMES)
ACCOUNT = "account"
MAX_SKEW_MS = 250
_SWEEP_BATCH = 64
_SWEEP_PATIENCE_S = 60


class Watch:
    """Reads stream infos; each reading costs one request a stream."""

    def __init__(self, publisher: Publisher, clock: Clock) -> None:
        self._publisher = publisher
        self._clock = clock
        self.skew_ms: float | None = None
        """Our clock minus the broker's at the last reading, None before the first."""

    async def state_stream(self) -> StreamState:
        """The state stream as it is now. Raises BrokerError."""
        info = await self._info(topology.STATE_STREAM)
        state = info["state"]
        return StreamState(str(info["created"]), state["last_seq"], state.get("num_subjects", 0))

    async def fills(self) -> tuple[dict[str, Fill], Fill]:
        """How full what starts use is, and the command stream. Raises BrokerError."""
        infos = {name: await self._info(name) for name in _WATCHED}
        fills = {name: _fill(info) for name, info in infos.items()}
        fills[ACCOUNT] = await self._account()
        return fills, _fill(await self._info(topology.COMMANDS))

    async def _account(self) -> Fill:
        """File storage of the account, all streams together; without a limit of its own it is never full."""
        info = await self._publisher.api("INFO")
        return Fill(info.get("storage", 0), info.get("limits", {}).get("max_storage", -1))

    async def _info(self, stream: str) -> dict[str, Any]:
        before_ms = self._clock.now_ms()
        info = await self._publisher.api(f"STREAM.INFO.{stream}")
        after_ms = self._clock.now_ms()
        if "ts" in info:
            self._note_skew(before_ms, after_ms, str(info["ts"]))
        return info

    def _note_skew(self, before_ms: int, after_ms: int, broker_time: str) -> None:
        """The broker read its clock somewhere between: only what lies outside is skew for sure."""
        broker_ms = stamp_ms(broker_time)
        if broker_ms < before_ms:
            self.skew_ms = before_ms - broker_ms
        elif broker_ms > after_ms + 1:
            self.skew_ms = after_ms - broker_ms
        else:
            self.skew_ms = 0.0


def stamp_ms(stamp: str) -> float:
    """Milliseconds since the epoch of an instant as the broker writes it, with nanoseconds."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() * 1000 + float(f"0.{fraction or 0}") * 1000


def _fill(info: dict[str, Any]) -> Fill:
    return Fill(info["state"]["bytes"], info["config"].get("max_bytes", -1))


class SnapshotSweeper:
    """Finds snapshots that nothing refers to, and deletes them in batches."""

    def __init__(
        self, connection: Connection, publisher: Publisher, snapshots: JetStreamSnapshots, clock: Clock
    ) -> None:
        self._connection = connection
        self._publisher = publisher
        self._snapshots = snapshots
        self._clock = clock

    async def sweep(self, referred: set[int], spared: set[TimerRef], grace_ms: int) -> int:
        """See ``runtime.reconciler.Sweeper``. The age counts by the broker's clock, which no test shifts."""
        before_ms = self._clock.now_ms() - grace_ms
        unreferred: list[int] = []

        def look(delivery: Delivery) -> None:
            if delivery.stored_at_ms >= before_ms or delivery.seq in referred:
                return
            if topology.snapshot_owner(delivery.subject) not in spared:
                unreferred.append(delivery.seq)

        await read_all(self._connection, self._publisher, topology.SNAPSHOTS, f"{topology.SNAPSHOT_PREFIX}>", look)
        for first in range(0, len(unreferred), _SWEEP_BATCH):
            batch = unreferred[first : first + _SWEEP_BATCH]
            await asyncio.gather(*(self._snapshots.delete(seq) for seq in batch))
        return len(unreferred)


async def read_all(
    connection: Connection, publisher: Publisher, stream: str, subjects: str, look: Any, *, every: bool = True
) -> None:
    """Call ``look`` for each message that stands in ``stream`` now. Raises BrokerError."""
    done = asyncio.Event()
    follower = Follower(connection, publisher, stream, subjects, look, done.set, every=every, bodies=False)
    try:
        await follower.start()
        async with asyncio.timeout(_SWEEP_PATIENCE_S):
            await done.wait()
    except TimeoutError:
        raise BrokerError(f"{stream} could not be read to its end") from None
    finally:
        await follower.stop()
