"""Every promise of timer_service.ports, on the adapters in memory and on those of JetStream with a real broker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.broker import Broker
from tests.support.commands import command
from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import NameKey, TimerRef, derive_timer_ref
from timer_service.domain.machine import Write, decide, elapse
from timer_service.domain.model import Absent, JsonText, Phase, Timer, Wake
from timer_service.errors import BrokerError, NotFound, UnreadableState, WrongRevision
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.provision import Provisioner
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.schedules import JetStreamSchedules
from timer_service.jetstream.stores import (
    JetStreamArchive,
    JetStreamPublicity,
    JetStreamResumes,
    JetStreamSnapshots,
    JetStreamState,
    JetStreamWakes,
)
from timer_service.jetstream.topology import Sizes
from timer_service.ports import Archive, Publicity, Resumes, Schedule, Schedules, Snapshots, StateStore, Stored, Wakes
from timer_service.testing import (
    MemoryArchive,
    MemoryPublicity,
    MemoryResumes,
    MemorySchedules,
    MemorySnapshots,
    MemoryState,
    MemoryWakes,
)
from timer_service.wire.canonical import strict_loads
from timer_service.wire.records import (
    Outcome,
    Rejection,
    Removal,
    Resume,
    decode_wake,
    encode,
    resume_of,
    terminal_record,
)

pytestmark = pytest.mark.timeout(30)


@dataclass
class Ports:
    """One adapter of each port, and how a test looks behind them."""

    state: StateStore
    archive: Archive
    snapshots: Snapshots
    resumes: Resumes
    wakes: Wakes
    publicity: Publicity
    overwrite: Callable[[TimerRef, bytes], Awaitable[int]]
    marker: Callable[[TimerRef], Awaitable[Removal]]
    take_resume: Callable[[int], Awaitable[Resume]]
    """Read the resume at a place in the stream, as a consumer that acknowledges it."""
    last_wake: Callable[[TimerRef], Awaitable[Wake]]
    last_rejection: Callable[[str], Awaitable[dict[str, Any]]]
    told: Callable[[str], Awaitable[Callable[[], Awaitable[dict[str, Any]]]]]
    """Listen on a reply subject; the result waits for what comes."""
    schedules: Schedules
    another_process: Callable[[], Resumes]
    """The same resumes, seen by a process that published none of them."""


# ── in memory ───────────────────────────────────────────────────────────────────────────────────────────────


def memory_ports() -> Ports:
    state, resumes, wakes, publicity = MemoryState(), MemoryResumes(), MemoryWakes(), MemoryPublicity()

    async def overwrite(ref: TimerRef, data: bytes) -> int:
        return state.overwrite(ref, data)

    async def marker(ref: TimerRef) -> Removal:
        found = state.marker(ref)
        assert found is not None
        return found

    async def take_resume(seq: int) -> Resume:
        resume = resumes.read()
        assert resume is not None
        return resume

    async def last_wake(ref: TimerRef) -> Wake:
        return [wake for wake in wakes.published if wake.timer_ref == ref][-1]

    async def last_rejection(kind: str) -> dict[str, Any]:
        return as_json([one for one in publicity.rejections if one.kind == kind][-1])

    async def told(reply_to: str) -> Callable[[], Awaitable[dict[str, Any]]]:
        async def wait() -> dict[str, Any]:
            return as_json([outcome for subject, outcome in publicity.outcomes if subject == reply_to][-1])

        return wait

    return Ports(
        state, MemoryArchive(), MemorySnapshots(), resumes, wakes, publicity,
        overwrite, marker, take_resume, last_wake, last_rejection, told, MemorySchedules(), lambda: resumes,
    )  # fmt: skip


def as_json(record: Any) -> dict[str, Any]:
    value = strict_loads(encode(record))
    assert isinstance(value, dict)
    return value


# ── JetStream ───────────────────────────────────────────────────────────────────────────────────────────────


class JetStreamDesk:
    """A stranger's look into the streams."""

    def __init__(self, connection: Connection, publisher: Publisher) -> None:
        self.connection = connection
        self.publisher = publisher

    async def overwrite(self, ref: TimerRef, data: bytes) -> int:
        return (await self.publisher.publish(topology.state_subject(ref), data)).seq

    async def marker(self, ref: TimerRef) -> Removal:
        message = await self.publisher.direct_get(topology.STATE_STREAM, topology.state_subject(ref))
        assert message is not None
        assert message.headers[topology.KV_OPERATION_HEADER] == "PURGE"
        assert message.headers[topology.TTL_HEADER] == "60s"
        return msgspec.json.decode(message.data, type=Removal)

    async def take_resume(self, seq: int) -> Resume:
        message = await self.publisher.direct_get_seq(topology.RESUMES, seq)
        assert message is not None
        await self.publisher.api(f"STREAM.MSG.DELETE.{topology.RESUMES}", {"seq": seq, "no_erase": True})
        return msgspec.json.decode(message.data, type=Resume)

    async def last_wake(self, ref: TimerRef) -> Wake:
        message = await self.publisher.direct_get(topology.SCHEDULES, topology.wake_subject(ref))
        assert message is not None
        return decode_wake(message.data)

    async def last_rejection(self, kind: str) -> dict[str, Any]:
        subject = topology.rejected_subject(kind)
        answer = await self.publisher.api(f"STREAM.MSG.GET.{topology.REJECTIONS}", {"last_by_subj": subject})
        value = msgspec.json.decode(msgspec.json.decode(f'"{answer["message"]["data"]}"'.encode(), type=bytes))
        assert isinstance(value, dict)
        return value

    async def told(self, reply_to: str) -> Callable[[], Awaitable[dict[str, Any]]]:
        arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def take(message: Any) -> None:
            arrived.set_result(message.data)

        listener = Connection(self.connection.url, name="listener")
        await listener.open()
        await listener.subscribe(reply_to, take)
        await listener.flush()

        async def wait() -> dict[str, Any]:
            value = strict_loads(await asyncio.wait_for(arrived, 20))
            await listener.close()
            assert isinstance(value, dict)
            return value

        return wait


async def jetstream_ports(url: str) -> AsyncIterator[Ports]:
    connection = Connection(url, name="contract")
    await connection.open()
    publisher = Publisher(connection)
    await publisher.start()
    await Provisioner(connection, Sizes()).provision()
    desk = JetStreamDesk(connection, publisher)
    yield Ports(
        JetStreamState(publisher, replicas=1, tombstone_ttl_s=60),
        JetStreamArchive(publisher, replicas=1),
        JetStreamSnapshots(publisher),
        JetStreamResumes(publisher),
        JetStreamWakes(publisher),
        JetStreamPublicity(publisher, connection),
        desk.overwrite, desk.marker, desk.take_resume, desk.last_wake, desk.last_rejection, desk.told,
        JetStreamSchedules(connection, publisher, replicas=1),
        lambda: JetStreamResumes(publisher),
    )  # fmt: skip
    await publisher.stop()
    await connection.close()


@pytest.fixture(params=["memory", "jetstream"])
async def ports(request: pytest.FixtureRequest) -> AsyncIterator[Ports]:
    if request.param == "memory":
        yield memory_ports()
        return
    broker: Broker = request.getfixturevalue("shared_broker")
    async for made in jetstream_ports(broker.url):
        yield made


# ── timers of their own ─────────────────────────────────────────────────────────────────────────────────────


def waiting(**changes: Any) -> Timer:
    """A timer that no other test knows, due at 2,000."""
    decision = decide(None, command("start", 1_000, timer={"name": uuid.uuid4().hex}, **changes))
    assert isinstance(decision, Write)
    return decision.timer


def own_text(timer: Timer) -> bytes:
    assert not isinstance(timer.payload, Absent)
    return bytes(timer.payload)


def elapsed(timer: Timer) -> Timer:
    write = elapse(timer, Wake(timer.timer_ref, timer.generation, 2_000), 2_000)
    assert write is not None
    return write.timer


def record(timer: Timer, generation: int = 0) -> Timer:
    """A terminal record of this timer."""
    ended = replace(
        timer, phase=Phase.COMPLETED, generation=generation, ended_at_ms=3_000, failure_code=None, message=None
    )
    return terminal_record(ended)


# ── state ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_where_nothing_was_stored_there_is_nothing(ports: Ports):
    """An unknown timer has no value and revision 0."""
    assert await ports.state.get(waiting().timer_ref) == Stored(None, 0)


async def test_a_state_comes_back_as_it_was_stored(ports: Ports):
    """What was put over nothing stands with its revision, field for field; payloads keep their own text."""
    timer = waiting(payload={"b": 1.0, "a": 10**30, "é": "\U0001f600"}, max_retries=None)
    revision = await ports.state.put(timer, 0)
    assert revision > 0
    assert await ports.state.get(timer.timer_ref) == Stored(timer, revision)
    stored = (await ports.state.get(timer.timer_ref)).timer
    assert stored is not None
    assert own_text(stored) == own_text(timer)


async def test_a_state_is_replaced_over_its_revision(ports: Ports):
    """Each write has a greater revision, and the newest stands."""
    timer = waiting()
    first = await ports.state.put(timer, 0)
    second = await ports.state.put(elapsed(timer), first)
    assert second > first
    assert await ports.state.get(timer.timer_ref) == Stored(elapsed(timer), second)


@pytest.mark.parametrize("write", ["put", "remove"])
async def test_a_wrong_revision_changes_nothing(ports: Ports, write: str):
    """An older, a future and no revision are refused, and the refusal tells what stands."""
    timer = waiting()
    first = await ports.state.put(timer, 0)
    second = await ports.state.put(timer, first)
    for wrong in (0, first, second + 1):
        with pytest.raises(WrongRevision) as caught:
            await getattr(ports.state, write)(elapsed(timer), wrong)
        assert caught.value.actual == second
        assert await ports.state.get(timer.timer_ref) == Stored(timer, second)


async def test_nothing_is_written_over_what_is_not_there(ports: Ports):
    """A revision other than 0 is refused where nothing stands, and nothing stands thereafter."""
    timer = waiting()
    for write in (ports.state.put, ports.state.remove):
        with pytest.raises(WrongRevision):
            await write(timer, 7)
    assert await ports.state.get(timer.timer_ref) == Stored(None, 0)


async def test_of_concurrent_writes_one_wins(ports: Ports):
    """Whether over nothing or over a revision: exactly one is stored, the others change nothing."""
    timer, revision = waiting(), 0
    for _ in range(3):
        rivals = [replace(timer, fence=fence) for fence in range(1, 21)]
        results = await asyncio.gather(*(ports.state.put(rival, revision) for rival in rivals), return_exceptions=True)
        won = [number for number, result in enumerate(results) if isinstance(result, int)]
        assert len(won) == 1
        assert all(isinstance(result, WrongRevision) for result in results if not isinstance(result, int))
        stored = await ports.state.get(timer.timer_ref)
        assert stored == Stored(rivals[won[0]], results[won[0]])  # type: ignore[arg-type]
        revision = stored.revision


async def test_a_removal_leaves_a_marker(ports: Ports):
    """There is no value any more, but a revision, and the marker tells generation and fence."""
    timer = replace(waiting(), generation=4, fence=9)
    first = await ports.state.put(timer, 0)
    removed = await ports.state.remove(timer, first)
    assert removed > first
    assert await ports.state.get(timer.timer_ref) == Stored(None, removed)
    assert await ports.marker(timer.timer_ref) == Removal(v=1, generation=4, fence=9)


async def test_a_marker_refuses_a_create(ports: Ports):
    """Whoever expects nothing is told that something was there; whoever knows the marker may write over it."""
    timer = waiting()
    removed = await ports.state.remove(timer, await ports.state.put(timer, 0))
    with pytest.raises(WrongRevision) as caught:
        await ports.state.put(timer, 0)
    assert caught.value.actual == removed
    assert await ports.state.get(timer.timer_ref) == Stored(None, removed)
    again = await ports.state.put(timer, removed)
    assert await ports.state.get(timer.timer_ref) == Stored(timer, again)


async def test_timers_do_not_touch_one_another(ports: Ports):
    """Writes and removals of one timer leave the revision of another as it is."""
    one, other = waiting(), waiting()
    revision = await ports.state.put(one, 0)
    await ports.state.remove(other, await ports.state.put(other, 0))
    assert await ports.state.get(one.timer_ref) == Stored(one, revision)
    await ports.state.put(one, revision)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b'{"v":2}', b'{"v":1}', b"\xff\xfe"], ids=ascii)
async def test_an_unreadable_state_is_reported_and_left(ports: Ports, data: bytes):
    """Reading what is corrupt, or of a newer version, says so with the timer's name, each time."""
    ref = waiting().timer_ref
    await ports.overwrite(ref, data)
    for _ in range(2):
        with pytest.raises(UnreadableState) as caught:
            await ports.state.get(ref)
        assert caught.value.timer_ref == ref


async def test_a_foreign_state_is_unreadable(ports: Ports):
    """A value that names another timer is not handed out as this one, nor one that is whole but of a newer version."""
    timer = waiting()
    for foreign in (waiting(), replace(timer, v=2), replace(timer, timeline=())):
        await ports.overwrite(timer.timer_ref, encode(foreign))
        with pytest.raises(UnreadableState):
            await ports.state.get(timer.timer_ref)


# ── archive ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_archive_knows_nothing_of_the_unknown(ports: Ports):
    """No record, sequence 0."""
    assert await ports.archive.last(waiting().timer_ref) == Stored(None, 0)


async def test_the_newest_record_is_the_last(ports: Ports):
    """Records follow one another, each appended after the one before."""
    timer = waiting()
    first = await ports.archive.append(record(timer), 0)
    assert await ports.archive.last(timer.timer_ref) == Stored(record(timer), first)
    second = await ports.archive.append(record(timer, 1), first)
    assert second > first
    assert await ports.archive.last(timer.timer_ref) == Stored(record(timer, 1), second)


async def test_a_record_is_appended_once(ports: Ports):
    """Whoever expects an older last sequence, or none, is refused and told the present one."""
    timer = waiting()
    first = await ports.archive.append(record(timer), 0)
    second = await ports.archive.append(record(timer, 1), first)
    for wrong in (0, first, second + 1):
        with pytest.raises(WrongRevision) as caught:
            await ports.archive.append(record(timer, 2), wrong)
        assert caught.value.actual == second
    assert await ports.archive.last(timer.timer_ref) == Stored(record(timer, 1), second)


async def test_of_concurrent_records_one_wins(ports: Ports):
    """Twenty replicas that finish the same end store it once."""
    timer = waiting()
    results = await asyncio.gather(*(ports.archive.append(record(timer), 0) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, WrongRevision) for result in results) == 19


async def test_archives_of_two_timers_are_apart(ports: Ports):
    """The fence is per timer."""
    one, other = waiting(), waiting()
    await ports.archive.append(record(one), 0)
    await ports.archive.append(record(other), 0)
    assert (await ports.archive.last(one.timer_ref)).timer == record(one)


# ── snapshots ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text", [b"null", b'{ "a": [1.0, 1e2] }', b'"' + b"x" * 100_000 + b'"'], ids=["null", "object", "large"]
)
async def test_a_payload_comes_back_as_it_is(ports: Ports, text: bytes):
    """Byte for byte."""
    seq = await ports.snapshots.add(waiting().timer_ref, 0, JsonText(text))
    assert bytes(await ports.snapshots.get(seq)) == text


async def test_no_two_snapshots_share_a_place(ports: Ports):
    """Also of the same timer, generation and payload: two racing starts never share one."""
    ref = waiting().timer_ref
    seqs = await asyncio.gather(*(ports.snapshots.add(ref, 0, JsonText(b'"same"')) for _ in range(10)))
    assert len(set(seqs)) == 10
    await ports.snapshots.delete(seqs[0])
    assert bytes(await ports.snapshots.get(seqs[1])) == b'"same"'


async def test_a_deleted_snapshot_is_gone(ports: Ports):
    """Deleting it again, or what never was, does nothing."""
    seq = await ports.snapshots.add(waiting().timer_ref, 0, JsonText(b"1"))
    for _ in range(2):
        await ports.snapshots.delete(seq)
        with pytest.raises(NotFound):
            await ports.snapshots.get(seq)
    await ports.snapshots.delete(seq + 1_000)
    with pytest.raises(NotFound):
        await ports.snapshots.get(seq + 1_000)


# ── resumes ─────────────────────────────────────────────────────────────────────────────────────────────────


def resume(**changes: Any) -> Resume:
    timer = elapsed(waiting(**changes))
    return resume_of(timer, JsonText(own_text(timer)))


async def test_a_resume_is_delivered_as_it_is(ports: Ports):
    """Every field, and the payload in its own text."""
    sent = resume(payload={"b": 1.0, "a": 10**30})
    seq = await ports.resumes.publish(sent, 0)
    assert await ports.take_resume(seq) == sent


async def test_the_same_attempt_is_stored_once(ports: Ports):
    """Inside the duplicate window the place is told again; another attempt, or another resume, is stored anew."""
    one, other = resume(), resume()
    first = await ports.resumes.publish(one, 0)
    assert await ports.resumes.publish(one, 0) == first
    second = await ports.resumes.publish(one, 1)
    assert second > first
    assert await ports.resumes.publish(one, 1) == second
    assert await ports.resumes.publish(other, 0) > second
    for seq in (first, second, second + 1):
        await ports.take_resume(seq)


async def test_the_same_attempt_is_swallowed_after_it_was_read(ports: Ports):
    """An ack that repeats an old place does not mean that the message is still there."""
    sent = resume()
    seq = await ports.resumes.publish(sent, 0)
    await ports.take_resume(seq)
    assert await ports.resumes.publish(sent, 0) == seq
    assert await ports.resumes.stands(sent.resume_id, seq) is False
    again = await ports.resumes.publish(sent, 1)
    assert await ports.resumes.stands(sent.resume_id, again) is True
    await ports.take_resume(again)


@pytest.mark.parametrize("known", [True, False], ids=["own", "of another process"])
async def test_a_resume_stands_until_it_is_read(ports: Ports, known: bool):
    """Where its place is known, and where the stream has to be searched; others do not count."""
    other, sent = resume(), resume()
    seqs = [await ports.resumes.publish(one, 0) for one in (other, sent)]

    async def stands(one: Resume, seq: int) -> bool:
        return await (
            ports.resumes.stands(one.resume_id, seq) if known else ports.another_process().stands(one.resume_id, None)
        )

    assert await stands(other, seqs[0])
    assert await stands(sent, seqs[1])
    await ports.take_resume(seqs[0])
    assert not await stands(other, seqs[0])
    assert await stands(sent, seqs[1])
    await ports.take_resume(seqs[1])
    assert not await stands(sent, seqs[1])


async def test_another_resume_in_that_place_is_not_it(ports: Ports):
    """What stands at a place must be this resume."""
    one, other = resume(), resume()
    seq = await ports.resumes.publish(one, 0)
    assert not await ports.resumes.stands(other.resume_id, seq)
    await ports.take_resume(seq)


async def test_any_attempt_counts_as_standing(ports: Ports):
    """A repetition that stands unread is found by another process, too; its own place is what counts to the first."""
    sent = resume()
    first = await ports.resumes.publish(sent, 0)
    await ports.take_resume(first)
    second = await ports.resumes.publish(sent, 1)
    assert not await ports.resumes.stands(sent.resume_id, first)
    assert await ports.another_process().stands(sent.resume_id, None)
    await ports.take_resume(second)


async def test_what_stands_unread_can_be_looked_at_and_dropped(ports: Ports):
    """Each resume with its place; dropping one leaves the others, and dropping it again does nothing."""
    one, other = resume(), resume()
    seqs = {each.resume_id: await ports.resumes.publish(each, 0) for each in (one, other)}
    assert (await ports.another_process().unread()).items() >= seqs.items()
    for _ in range(2):
        await ports.resumes.drop(seqs[one.resume_id])
    unread = await ports.resumes.unread()
    assert one.resume_id not in unread
    assert unread[other.resume_id] == seqs[other.resume_id]
    await ports.take_resume(seqs[other.resume_id])
    assert not (await ports.resumes.unread()).keys() & seqs.keys()


# ── wakes and publicity ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_wake_says_which_occurrence_and_by_which_state(ports: Ports):
    """Reference, generation, when it was published, and the revision that was armed."""
    ref = derive_timer_ref(NameKey(uuid.uuid4().hex))
    await ports.wakes.publish(ref, 3, 1_700_000_000_000, 42)
    assert await ports.last_wake(ref) == Wake(ref, 3, 1_700_000_000_000, 42)


async def test_the_newest_schedule_takes_the_place_of_the_one_before(ports: Ports):
    """One a timer: found with its generation and time, dropped by its place, and never instead of a later one."""
    ref, due_ms = derive_timer_ref(NameKey(uuid.uuid4().hex)), 4_000_000_000_000
    assert await ports.schedules.find(ref) is None
    first = await ports.schedules.put(ref, 0, due_ms, 42)
    second = await ports.schedules.put(ref, 1, due_ms + 1, 43)
    assert not await ports.schedules.drop(first)
    assert await ports.schedules.find(ref) == Schedule(second, 1, due_ms + 1)
    assert (await ports.schedules.standing())[ref] == Schedule(second, 1, due_ms + 1)
    stream = await ports.schedules.look()
    assert stream.last_seq >= second > first
    assert await ports.schedules.drop(second)
    assert not await ports.schedules.drop(second)
    assert await ports.schedules.find(ref) is None
    assert ref not in await ports.schedules.standing()


async def test_an_outcome_reaches_its_publisher(ports: Ports):
    """All fields are there, null where there is nothing to say."""
    reply_to = f"_INBOX.{uuid.uuid4().hex}"
    wait = await ports.told(reply_to)
    await ports.publicity.outcome(reply_to, Outcome("c", Status.ACCEPTED, None, None, "r", 1, 2, "waiting", 3))
    assert await wait() == {
        "command_id": "c",
        "status": "accepted",
        "code": None,
        "message": None,
        "timer_ref": "r",
        "generation": 1,
        "fence": 2,
        "phase": "waiting",
        "due_at_ms": 3,
    }


@pytest.mark.parametrize("kind", ["start", "unknown"])
async def test_a_rejection_is_recorded(ports: Ports, kind: str):
    """Under its kind, before the call returns."""
    refused = Rejection(1, kind, Code.MALFORMED, "why", None, uuid.uuid4().hex, 5, '{"é', False)
    await ports.publicity.reject(refused)
    assert await ports.last_rejection(kind) == as_json(refused)


# ── trouble ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_broker_that_is_away_is_a_broker_error(broker: Broker):
    """Whatever is asked of the adapters then, nothing but BrokerError comes out, and it comes in time."""
    outcome = Outcome("c", Status.ACCEPTED, None, None, None, None, None, None, None)
    async for made in jetstream_ports(broker.url):
        broker.kill()
        timer, sent = waiting(), resume()
        calls: list[Awaitable[Any]] = [
            made.state.get(timer.timer_ref),
            made.state.put(timer, 0),
            made.state.remove(timer, 1),
            made.archive.last(timer.timer_ref),
            made.archive.append(record(timer), 0),
            made.snapshots.add(timer.timer_ref, 0, JsonText(b"1")),
            made.snapshots.get(1),
            made.snapshots.delete(1),
            made.resumes.publish(sent, 0),
            made.resumes.stands(sent.resume_id, 1),
            made.resumes.stands(sent.resume_id, None),
            made.wakes.publish(timer.timer_ref, 0, 1, 1),
            made.publicity.reject(Rejection(1, "start", Code.MALFORMED, "", None, None, 1, "", False)),
        ]
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
        assert all(isinstance(result, BrokerError) for result in results), results
        await made.publicity.outcome("_INBOX.x", outcome)  # best effort: never an error
    await made.publicity.outcome("_INBOX.x", outcome)  # nor where the connection is closed for good
