"""Message schedules: the broker keeps a wake until its time, and publishes it then.

A schedule is a message on a timer's own subject; the newest replaces the one before, and the broker takes it away when
it fires. Its body is the wake's, its id (a header that survives the firing) is the occurrence's.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from timer_service.domain.identity import TimerRef, occurrence_id, parse_occurrence_id
from timer_service.domain.model import Wake
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import Delivery
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.stores import LastMessages, delete_message
from timer_service.jetstream.watch import read_all
from timer_service.ports import Fill, Schedule, ScheduleStream
from timer_service.wire.instants import format_instant
from timer_service.wire.records import encode_wake

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_AT = "@at "
_TTL = f"{topology.WAKE_TTL_S}s"
_PREFIX_LENGTH = len(topology.SCHEDULE_PREFIX)


class JetStreamSchedules:
    """``timer_service.ports.Schedules`` on the stream of schedules and wakes."""

    def __init__(self, connection: Connection, publisher: Publisher, *, replicas: int) -> None:
        self._connection = connection
        self._publisher = publisher
        self._reader = LastMessages(publisher, topology.SCHEDULES, replicas)

    async def put(self, timer_ref: TimerRef, generation: int, at_ms: int, revision: int) -> int:
        """No ``Nats-Msg-Id``: what was deleted by hand must be taken again within the duplicate window."""
        ack = await self._publisher.publish(
            topology.schedule_subject(timer_ref),
            encode_wake(Wake(timer_ref, generation, None, revision)),
            {
                topology.SCHEDULE_HEADER: _AT + format_instant(at_ms),
                topology.SCHEDULE_TARGET_HEADER: topology.wake_subject(timer_ref),
                topology.SCHEDULE_TTL_HEADER: _TTL,
                topology.OCCURRENCE_HEADER: occurrence_id(timer_ref, generation),
            },
        )
        return ack.seq

    async def find(self, timer_ref: TimerRef) -> Schedule | None:
        message = await self._reader.last(topology.schedule_subject(timer_ref))
        return None if message is None else read_schedule(message.seq, timer_ref, message.headers)

    async def drop(self, seq: int) -> bool:
        return await delete_message(self._publisher, topology.SCHEDULES, seq)

    async def standing(self) -> dict[str, Schedule]:
        found: dict[str, Schedule] = {}

        def look(delivery: Delivery) -> None:
            timer_ref = delivery.subject[_PREFIX_LENGTH:]
            found[timer_ref] = read_schedule(delivery.seq, timer_ref, delivery.headers or {})

        await read_all(self._connection, self._publisher, topology.SCHEDULES, topology.SCHEDULE_FILTER, look)
        return found

    async def look(self) -> ScheduleStream:
        info = await self._publisher.api(f"STREAM.INFO.{topology.SCHEDULES}")
        fill = Fill(info["state"]["bytes"], info["config"].get("max_bytes", -1))
        return ScheduleStream(str(info["created"]), info["state"]["last_seq"], fill)


def read_schedule(seq: int, timer_ref: str, headers: Mapping[str, str]) -> Schedule:
    """What a message on a schedule's subject says; generation -1 when it is not the timer's or can't be read."""
    try:
        owner, generation = parse_occurrence_id(headers.get(topology.OCCURRENCE_HEADER, ""))
        at_ms = _epoch_ms(headers.get(topology.SCHEDULE_HEADER, ""))
    except ValueError:
        return Schedule(seq, -1, 0)
    return Schedule(seq, generation if owner == timer_ref else -1, at_ms)


def _epoch_ms(schedule: str) -> int:
    """Raises ValueError for what is no instant as we write it."""
    if not (schedule.startswith(_AT) and schedule.endswith("Z")):
        raise ValueError("not a single instant")
    return (datetime.fromisoformat(schedule[len(_AT) :]) - _EPOCH) // _MS
