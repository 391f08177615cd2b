"""The adapters of ``timer_service.ports`` on JetStream."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

from msgspec.structs import replace

from timer_service.domain.identity import TimerRef
from timer_service.domain.model import JsonText, Timer, Wake
from timer_service.errors import BrokerError, NotFound, StorageFull, UnreadableState
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.publish import Message, Publisher
from timer_service.ports import Stored
from timer_service.wire.records import (
    Outcome,
    Rejection,
    Removal,
    Resume,
    UnreadableRecord,
    decode_timer,
    encode,
    encode_wake,
)

_EMPTY = Stored(None, 0)
_STANDING_S = 10.0
_STANDING_BATCH = 256


class LastMessages:
    """Reads the newest message on a subject, from the leader where a replica could answer with an older one."""

    def __init__(self, publisher: Publisher, stream: str, replicas: int) -> None:
        self._publisher = publisher
        self._stream = stream
        self._direct = replicas == 1

    async def last(self, subject: str) -> Message | None:
        if self._direct:
            return await self._publisher.direct_get(self._stream, subject)
        try:
            answer = await self._publisher.api(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": subject})
        except NotFound:
            return None
        return _from_api(answer["message"])


def _from_api(message: dict[str, object]) -> Message:
    headers = base64.b64decode(str(message.get("hdrs", ""))).decode("utf-8", "replace")
    pairs = (line.split(":", 1) for line in headers.split("\r\n")[1:] if ":" in line)
    return Message(
        str(message["subject"]),
        int(str(message["seq"])),
        {name.strip(): value.strip() for name, value in pairs} | {topology.STORED_HEADER: str(message["time"])},
        base64.b64decode(str(message.get("data", ""))),
    )


class JetStreamState:
    """The state bucket: compare-and-set on one literal subject per timer.

    The bucket keeps one message a key, so a revision is a stream sequence. A removal leaves a purge marker that
    runs out by itself; until then it refuses a create that expects nothing there, which guards races.
    """

    def __init__(self, publisher: Publisher, *, replicas: int, tombstone_ttl_s: int) -> None:
        self._publisher = publisher
        self._reader = LastMessages(publisher, topology.STATE_STREAM, replicas)
        self._ttl = f"{tombstone_ttl_s}s"
        self.on_written: Callable[[int], None] = lambda _: None
        """Called with the sequence of each acknowledged write, before the writer goes on."""

    async def get(self, timer_ref: TimerRef) -> Stored:
        message = await self._reader.last(topology.state_subject(timer_ref))
        if message is None:
            return _EMPTY
        if topology.KV_OPERATION_HEADER in message.headers:
            return Stored(None, message.seq)
        return Stored(_decode(message, timer_ref), message.seq)

    async def put(self, timer: Timer, expected: int) -> int:
        ack = await self._publisher.publish(
            topology.state_subject(timer.timer_ref),
            encode(timer),
            {topology.EXPECTED_HEADER: str(expected)},
        )
        self.on_written(ack.seq)
        return ack.seq

    async def remove(self, timer: Timer, expected: int) -> int:
        """A bucket of several replicas refuses even markers when it is full: then the entry goes without one."""
        subject = topology.state_subject(timer.timer_ref)
        try:
            return await self._mark_removed(subject, timer, expected)
        except StorageFull:
            body = {"filter": subject, "seq": expected + 1}  # what is newer than expected stays
            await self._publisher.api(f"STREAM.PURGE.{topology.STATE_STREAM}", body)
            return expected

    async def _mark_removed(self, subject: str, timer: Timer, expected: int) -> int:
        ack = await self._publisher.publish(
            subject,
            encode(Removal(v=1, generation=timer.generation, fence=timer.fence)),
            {
                topology.KV_OPERATION_HEADER: "PURGE",
                topology.TTL_HEADER: self._ttl,
                topology.EXPECTED_HEADER: str(expected),
            },
        )
        self.on_written(ack.seq)
        return ack.seq


def _decode(message: Message, timer_ref: TimerRef) -> Timer:
    try:
        return decode_timer(message.data, timer_ref)
    except UnreadableRecord as error:
        raise UnreadableState(timer_ref, str(error)) from None


class JetStreamArchive:
    """Terminal records, one stream subject per timer."""

    def __init__(self, publisher: Publisher, *, replicas: int) -> None:
        self._publisher = publisher
        self._reader = LastMessages(publisher, topology.TERMINALS, replicas)

    async def last(self, timer_ref: TimerRef) -> Stored:
        message = await self._reader.last(topology.terminal_subject(timer_ref))
        return _EMPTY if message is None else Stored(_decode(message, timer_ref), message.seq)

    async def append(self, record: Timer, expected: int) -> int:
        subject = topology.terminal_subject(record.timer_ref)
        ack = await self._publisher.publish(subject, encode(record), {topology.EXPECTED_HEADER: str(expected)})
        return ack.seq


class JetStreamSnapshots:
    """Large payloads, append-only, referred to by sequence."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def add(self, timer_ref: TimerRef, generation: int, payload: JsonText) -> int:
        ack = await self._publisher.publish(topology.snapshot_subject(timer_ref, generation), bytes(payload))
        return ack.seq

    async def get(self, seq: int) -> JsonText:
        message = await self._publisher.direct_get_seq(topology.SNAPSHOTS, seq)
        if message is None:
            raise NotFound(f"snapshot {seq} is not there")
        return JsonText(message.data)

    async def delete(self, seq: int) -> None:
        await delete_message(self._publisher, topology.SNAPSHOTS, seq)


async def delete_message(publisher: Publisher, stream: str, seq: int) -> bool:
    """Remove one message; False when it is not there any more. Raises BrokerError."""
    try:
        await publisher.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
    except BrokerError as error:
        if not _names_no_message(error):
            raise
        return False
    return True


def _names_no_message(error: BrokerError) -> bool:
    """The broker answers a delete of what is not there with one of these."""
    return isinstance(error, NotFound) or getattr(error, "err_code", 0) in (10043, 10057)


class JetStreamResumes:
    """The resume stream. A message stands there until the notify consumer has acknowledged it."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._standing: dict[str, int] = {}
        self._read_at = -_STANDING_S
        self._reading: asyncio.Task[dict[str, int]] | None = None

    async def publish(self, resume: Resume, attempt: int) -> int:
        msg_id = f"{resume.resume_id}.r{attempt}" if attempt else resume.resume_id
        ack = await self._publisher.publish(topology.RESUME_SUBJECT, encode(resume), {topology.MSG_ID_HEADER: msg_id})
        return ack.seq

    async def stands(self, resume_id: str, seq: int | None) -> bool:
        if seq is None:
            seq = (await self._all_standing()).get(resume_id)
            if seq is None:
                return False
        message = await self._publisher.direct_get_seq(topology.RESUMES, seq)
        return message is not None and _resume_id(message) == resume_id

    async def unread(self) -> dict[str, int]:
        return await self._read_standing()

    async def drop(self, seq: int) -> None:
        await delete_message(self._publisher, topology.RESUMES, seq)

    async def _all_standing(self) -> dict[str, int]:
        """What stands in the stream, by resume id: read once for all who ask within a few seconds.

        Only asked for resumes that this process did not publish itself, as after a restart.
        """
        loop = asyncio.get_running_loop()
        if loop.time() - self._read_at > _STANDING_S:
            if self._reading is None or self._reading.done():
                self._reading = loop.create_task(self._read_standing(), name="resumes.standing")
            self._standing = await asyncio.shield(self._reading)
            self._read_at = loop.time()
        return self._standing

    async def _read_standing(self) -> dict[str, int]:
        state = (await self._publisher.api(f"STREAM.INFO.{topology.RESUMES}"))["state"]
        first, last, count = state["first_seq"], state["last_seq"], state["messages"]
        if count == 0:
            return {}
        if last - first < 4 * count + _STANDING_BATCH:
            return await self._read_range(first, last)
        return await self._walk(first, last)

    async def _read_range(self, first: int, last: int) -> dict[str, int]:
        """Few gaps: ask for every sequence, many at a time."""
        standing: dict[str, int] = {}
        for start in range(first, last + 1, _STANDING_BATCH):
            seqs = range(start, min(start + _STANDING_BATCH, last + 1))
            pending = [await self._publisher.ask_seq(topology.RESUMES, seq) for seq in seqs]
            for answer in pending:
                message = await answer
                if message is not None:
                    standing[_resume_id(message)] = message.seq
        return standing

    async def _walk(self, first: int, last: int) -> dict[str, int]:
        """Mostly gaps: from one message to the next."""
        standing: dict[str, int] = {}
        seq = first
        while seq <= last:
            body = {"seq": seq, "next_by_subj": topology.RESUME_SUBJECT}
            try:
                answer = await self._publisher.api(f"STREAM.MSG.GET.{topology.RESUMES}", body)
            except NotFound:
                break
            message = _from_api(answer["message"])
            standing[_resume_id(message)] = message.seq
            seq = message.seq + 1
        return standing


def _resume_id(message: Message) -> str:
    msg_id = message.headers.get(topology.MSG_ID_HEADER, "")
    return ".".join(msg_id.split(".")[:2])


class JetStreamWakes:
    """The wake subjects; a wake is disposable and runs out by itself."""

    _TTL = f"{topology.WAKE_TTL_S}s"

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def publish(self, timer_ref: TimerRef, generation: int, woken_at_ms: int, revision: int) -> None:
        wake = Wake(timer_ref, generation, woken_at_ms, revision)
        await self._publisher.publish(
            topology.wake_subject(timer_ref), encode_wake(wake), {topology.TTL_HEADER: self._TTL}
        )


class JetStreamPublicity:
    """Outcomes over core NATS, rejections into their stream."""

    def __init__(self, publisher: Publisher, connection: Connection) -> None:
        self._publisher = publisher
        self._connection = connection

    async def outcome(self, reply_to: str, outcome: Outcome) -> None:
        try:
            await self._connection.publish(reply_to, encode(outcome))
        except BrokerError:
            return  # best effort: the publisher can repeat its command and is told then

    async def reject(self, rejection: Rejection) -> None:
        """What the broker does not take whole is cut further: as JSON a text can be six times as long as it was."""
        data = encode(rejection)
        while len(data) > self._connection.max_payload and rejection.body:
            shorter = rejection.body[: len(rejection.body) // 2]
            rejection = replace(rejection, body=shorter, body_truncated=True)
            data = encode(rejection)
        await self._publisher.publish(topology.rejected_subject(rejection.kind), data)
