"""What the NATS outbox promises beyond the contract of all stores: the bucket, its clock, lost replies, and room."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from notify_consumer.errors import LeaseLost, OutboxUnavailable
from notify_consumer.outbox import nats_bucket, nats_feed
from notify_consumer.outbox.base import FEEDBACK_LANE, Claim, Feedback, NewRow, State
from notify_consumer.outbox.nats_kv import NatsOutbox
from notify_consumer.outbox.nats_record import HEADER
from tests.support.broker import Broker
from tests.support.notify import new_row, until
from timer_service.errors import Ambiguous, StorageFull, Unavailable
from timer_service.jetstream import topology

LONG_MS = 60_000
SHORT_MS = 30
COMPLETE = Feedback("complete", {"v": 1})
Make = Callable[..., NatsOutbox]


@pytest.fixture
def make(shared_broker: Broker) -> Make:
    """Makes outboxes on one bucket."""
    bucket = f"TEST_{secrets.token_hex(8)}"

    def made(**options: Any) -> NatsOutbox:
        given: dict[str, Any] = {"bucket": bucket, "max_bytes": 2**25, "timeout_ms": 2_000}
        return NatsOutbox(shared_broker.url, **(given | options))

    return made


@pytest.fixture
async def outbox(make: Make) -> AsyncIterator[NatsOutbox]:
    made = make()
    await made.open()
    yield made
    await made.close()


async def taken(outbox: NatsOutbox, lane: str = "x", lease_ms: int = LONG_MS, owner: str = "me") -> Claim:
    claims = await until(lambda: outbox.claim(owner, {lane: 1}, lease_ms), f"a claim in {lane}")
    first: Claim = claims[0]
    return first


async def api(outbox: NatsOutbox, name: str, body: object = None) -> dict[str, Any]:
    return await outbox.bucket.connection.api(f"{name}.{outbox.bucket.stream}", body)


async def config(outbox: NatsOutbox) -> dict[str, Any]:
    return dict((await api(outbox, "STREAM.INFO"))["config"])


async def state_of(outbox: NatsOutbox, row: NewRow) -> State | None:
    found = await outbox.get(row.resume_id)
    return None if found is None else found.state


# -- the bucket -----------------------------------------------------------------------------------------------


async def test_the_bucket_is_made_to_keep_rows(outbox: NatsOutbox) -> None:
    """On disk, one message a key, refusing when full, without age; of the size and replicas asked for."""
    have = await config(outbox)
    want = {"storage": "file", "discard": "new", "max_msgs_per_subject": 1, "max_bytes": 2**25, "num_replicas": 1}
    assert {field: have[field] for field in want} == want
    assert have.get("max_age", 0) == 0


async def test_rows_outlive_the_process(outbox: NatsOutbox, make: Make) -> None:
    """What an operation confirmed is there for the next one who opens the bucket, each row where it stood."""
    await outbox.insert([new_row(name, lane=name) for name in ("pending", "answered", "dead", "later", "done")])
    await outbox.store_outcome(await taken(outbox, "answered"), COMPLETE)
    await outbox.kill(await taken(outbox, "dead"), "enough")
    await outbox.back_off(await taken(outbox, "later"), LONG_MS, "boom")
    await outbox.finish(await outbox.store_outcome(await taken(outbox, "done"), COMPLETE), "accepted")
    other = make(create=False)
    await other.open()
    assert await other.counts() == await outbox.counts()
    survey = await other.survey(10)
    assert set(survey.lanes) == {"pending"}
    assert 0 < (survey.next_in_ms or 0) <= LONG_MS
    await other.close()


async def test_without_create_a_missing_bucket_is_said(make: Make) -> None:
    """The command line does not make a bucket where there is none."""
    outbox = make(create=False)
    with pytest.raises(OutboxUnavailable, match="does not exist"):
        await outbox.open()
    await outbox.close()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("discard", "old", "discard is 'old'; it must be 'new'"),
        ("max_age", 3600 * topology.NS, "max_age is 3600000000000; it must be 0"),
        ("storage", "memory", "storage is 'memory'; it must be 'file'"),
        ("max_msgs_per_subject", 5, "max_msgs_per_subject is 5; it must be 1"),
        ("max_msgs", 10, "max_msgs is 10"),
        ("allow_direct", False, "allow_direct is False"),
        ("deny_delete", True, "deny_delete is True"),
    ],
)
async def test_a_bucket_that_could_lose_rows_is_refused(make: Make, field: str, value: object, says: str) -> None:
    """Whoever made it: nothing is taken in under a policy that is not safe, and the error names it."""
    outbox = make()
    await outbox.bucket.connect()
    spec = topology.outbox(2**20, outbox.bucket.stream.removeprefix("KV_"))
    await api(outbox, "STREAM.CREATE", spec.config(1) | {field: value})
    with pytest.raises(OutboxUnavailable, match=says):
        await outbox.open()
    with pytest.raises(OutboxUnavailable, match=says):
        await outbox.insert([new_row()])
    await outbox.close()


async def test_a_policy_that_drifts_is_noticed_and_its_mending_too(
    outbox: NatsOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows wait while the policy is bad; what lives goes on."""
    await outbox.insert([new_row("a")])
    claim = await taken(outbox)
    good = await config(outbox)
    await api(outbox, "STREAM.UPDATE", good | {"max_age": 3600 * topology.NS})
    await until(lambda: outbox._feed.fault, "the drift is seen")
    with pytest.raises(OutboxUnavailable, match="max_age"):
        await outbox.insert([new_row("b")])
    with pytest.raises(OutboxUnavailable, match="max_age"):
        await outbox.survey(1)
    await outbox.finish(await outbox.store_outcome(claim, COMPLETE), "accepted")
    await api(outbox, "STREAM.UPDATE", good)
    await until(lambda: outbox._feed.fault is None, "the mending is seen")
    assert await outbox.insert([new_row("b")])


async def test_a_deleted_bucket_is_made_anew(outbox: NatsOutbox) -> None:
    """Its rows are gone, and their owners refused; resumes that come again find a bucket within seconds."""
    await outbox.insert([new_row("a"), new_row("b")])
    claim = await taken(outbox)
    await api(outbox, "STREAM.DELETE")
    with pytest.raises(OutboxUnavailable):
        await outbox.finish(claim, "accepted")

    async def again() -> set[str]:
        try:
            return await outbox.insert([new_row("a")])
        except OutboxUnavailable:
            return set()

    await until(again, "the bucket is back")
    with pytest.raises(LeaseLost):
        await outbox.finish(claim, "accepted")
    assert (await outbox.counts())[State.PENDING] == 1
    assert (await taken(outbox)).attempts == 1


async def test_a_bucket_that_another_one_made_anew_is_read_anew(outbox: NatsOutbox, make: Make) -> None:
    """Deleted and made again with more in it than before: what was known of the former one is forgotten."""
    await outbox.insert([new_row("a")])
    await api(outbox, "STREAM.DELETE")
    other = make()
    await other.open()
    rows = [new_row(f"r{n}", lane="y") for n in range(3)]
    await other.insert(rows)

    async def lanes() -> bool:
        try:
            return set((await outbox.survey(5)).lanes) == {"y"}
        except OutboxUnavailable:
            return False

    await until(lanes, "only what is there is known")
    assert len(await outbox.claim("me", {"y": 5}, LONG_MS)) == 3
    await other.close()


async def test_rows_purged_by_hand_are_forgotten(outbox: NatsOutbox) -> None:
    """A purge of the stream leaves no trace to follow: the next look finds fewer messages than rows."""
    await outbox.insert([new_row("a"), new_row("b")])
    await api(outbox, "STREAM.PURGE")
    assert await outbox.counts() == dict.fromkeys(State, 0)
    assert not (await outbox.survey(5)).lanes
    assert len(await outbox.insert([new_row("a"), new_row("b")])) == 2


async def test_a_row_deleted_by_hand_is_forgotten_and_can_come_again(outbox: NatsOutbox) -> None:
    """A delete marker, as `nats kv del` writes it, ends a row; its resume is taken in anew."""
    row = new_row()
    await outbox.insert([row])
    claim = await taken(outbox)
    publisher, subject = outbox.bucket.publisher, outbox.bucket.prefix + row.resume_id
    await publisher.publish(subject, b"", {topology.KV_OPERATION_HEADER: "DEL"})
    with pytest.raises(LeaseLost):
        await outbox.store_outcome(claim, COMPLETE)
    assert await outbox.counts() == dict.fromkeys(State, 0)
    assert await outbox.insert([row]) == {row.resume_id}
    assert (await taken(outbox)).attempts == 1


@pytest.mark.parametrize(
    "header", [None, "[]", "[2,'pending','x',0]", '[2,"pending","x",0]', '[1,"pending","x",0]', "\N{SNOWMAN}"]
)
async def test_what_is_no_row_is_left_alone(outbox: NatsOutbox, make: Make, header: str | None) -> None:
    """Unreadable messages, or of a later version: they hold nothing up, are not overwritten and not counted."""
    strange, good = new_row("strange"), new_row("good")
    headers = {} if header is None else {HEADER: header}
    await outbox.bucket.publisher.publish(outbox.bucket.prefix + strange.resume_id, b"{not a row", headers)
    other = make()
    await other.open()
    for box in (outbox, other):
        assert await box.insert([strange, good]) == ({good.resume_id} if box is outbox else set())
        with pytest.raises(OutboxUnavailable, match=r"can't be read|has version 2"):
            await box.get(strange.resume_id)
        assert not await box.revive(strange.resume_id)
        assert not await box.requeue_feedback([strange.resume_id])
        assert [row.resume_id for row in await box.browse(None, 5)] == [good.resume_id]
    claims = await other.claim("me", {"x": 5}, LONG_MS)
    assert [claim.resume_id for claim in claims] == [good.resume_id]
    assert await other.claim("me", {"x": 5}, LONG_MS) == []
    assert not (await other.survey(5)).lanes
    assert (await other.counts())[State.DONE] == 0
    await other.close()


# -- keys and sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "resume_id", ["a b.0", "*.0", ">", "..", "", "\N{SNOWMAN}.1", "x" * 2_000 + ".0", "line\r\nfeed.0", "=abc.0"]
)
async def test_ids_of_any_shape_are_safe(outbox: NatsOutbox, resume_id: str) -> None:
    """Whatever names a resume, its row can be stored, found, claimed and finished; nobody else's is touched."""
    row = NewRow(resume_id, "x", b"{}")
    neighbour = new_row("neighbour", lane="y")
    assert await outbox.insert([row, neighbour]) == {resume_id, neighbour.resume_id}
    assert await outbox.insert([row]) == set()
    claim = await taken(outbox)
    assert claim.resume_id == resume_id
    await outbox.finish(await outbox.store_outcome(claim, COMPLETE), "accepted")
    assert await state_of(outbox, row) is State.DONE
    assert await state_of(outbox, neighbour) is State.PENDING


@pytest.mark.parametrize("max_payload", [65_536, 2**20])
async def test_the_largest_resume_fits(tmp_path: Path, max_payload: int) -> None:
    """A resume that fills a message to the service's margin is stored with all that its row ever gains."""
    with Broker(tmp_path / "nats", extra_config=f"max_payload: {max_payload}") as broker:
        outbox = NatsOutbox(broker.url)
        await outbox.open()
        noise = base64.b64encode(os.urandom(max_payload)).decode()
        row = new_row(payload="")
        row = NewRow(
            row.resume_id, "x" * 1_024, row.body[:-2] + noise[: max_payload - 512 - len(row.body)].encode() + b'"}'
        )
        assert await outbox.insert([row])
        claim = await taken(outbox, row.flow, owner="o" * 200)
        assert claim.body == row.body
        await outbox.back_off(claim, 0, "\N{SNOWMAN}" * 2_000)
        claim = await taken(outbox, row.flow)
        long = Feedback("fail", {"failure_code": "x" * 64, "message": "\x01" * 1_024})
        again = await outbox.store_outcome(claim, long)
        await outbox.back_off(again, 0, "\N{SNOWMAN}" * 2_000)
        claim = await taken(outbox, FEEDBACK_LANE)
        assert (claim.body, claim.feedback) == (row.body, long)
        await outbox.finish(claim, "accepted")
        await outbox.close()


async def test_what_can_never_fit_is_kept_as_dead(tmp_path: Path) -> None:
    """A row that no message holds does not hold up the others: it is there, dead, with the reason."""
    with Broker(tmp_path / "nats", extra_config="max_payload: 65536") as broker:
        outbox = NatsOutbox(broker.url)
        await outbox.open()
        large = NewRow(new_row("large").resume_id, "x", os.urandom(65_500))
        assert len(await outbox.insert([large, new_row("small")])) == 2
        row = await outbox.get(large.resume_id)
        assert row is not None
        assert (row.state, row.body) == (State.DEAD, large.body[: len(row.body)])
        assert "the broker takes" in (row.last_error or "")
        assert (await outbox.counts())[State.PENDING] == 1
        await outbox.close()


# -- room -----------------------------------------------------------------------------------------------------


async def filled(outbox: NatsOutbox) -> list[NewRow]:
    """Rows until no more are taken in."""
    rows: list[NewRow] = []
    while not outbox.bucket.full:
        rows.append(new_row(f"r{len(rows)}"))
        await outbox.insert(rows[-1:])
    with pytest.raises(OutboxUnavailable, match="is full: finishing goes on"):
        await outbox.insert([new_row("more")])
    return rows


async def test_a_full_bucket_finishes_what_lives(make: Make) -> None:
    """New rows are refused while there is still room for what those that are there must write, all of them at once."""
    outbox = make(max_bytes=256 * 1024)
    await outbox.open()
    rows = await filled(outbox)
    assert len(rows) > 100
    assert await outbox.insert(rows[:2]) == set()  # known ones are no reason to fail
    claims = await outbox.claim("me", {"x": len(rows)}, LONG_MS)
    assert len(claims) == len(rows)
    assert await outbox.renew(claims, LONG_MS) == set()
    await asyncio.gather(*(outbox.back_off(claim, 0, "boom" * 10) for claim in claims))
    claims = await outbox.claim("me", {"x": len(rows)}, LONG_MS)
    answered = await asyncio.gather(*(outbox.store_outcome(claim, COMPLETE) for claim in claims))
    await asyncio.gather(*(outbox.finish(claim, "accepted") for claim in answered))
    counts = await outbox.counts()
    assert counts[State.DONE] == len(rows)

    async def pruned() -> bool:
        return await outbox.prune_done(0) + (await outbox.counts())[State.DONE] == 0

    await until(pruned, "all are pruned")
    assert await outbox.insert([new_row("fresh")])
    await outbox.close()


async def test_a_bucket_full_to_the_brim_still_takes_ends(make: Make) -> None:
    """Where somebody else took the last byte a row can be finished, killed or given back: it only shrinks."""
    outbox = make(max_bytes=256 * 1024)
    await outbox.open()
    await outbox.insert([new_row(name, lane=name) for name in ("done", "dead", "back")])
    done, dead, back = [await taken(outbox, lane) for lane in ("done", "dead", "back")]
    done = await outbox.store_outcome(done, COMPLETE)
    publisher = outbox.bucket.publisher
    size = 16_384
    while size > 8:
        try:
            await publisher.publish(f"{outbox.bucket.prefix}filler.{secrets.token_hex(4)}", b"x" * size)
        except StorageFull:
            size //= 2
    with pytest.raises(OutboxUnavailable):
        await outbox.insert([new_row("more")])
    await outbox.back_off(back, 0, "e" * 2_000)
    await outbox.kill(dead, "e" * 2_000)
    await outbox.finish(done, "accepted")
    assert [await state_of(outbox, new_row(name)) for name in ("done", "dead", "back")] == [
        State.DONE,
        State.DEAD,
        State.PENDING,
    ]
    await outbox.close()


async def test_where_room_is_short_errors_are(make: Make) -> None:
    """A bucket that is nearly full keeps the beginning of an error: errors are what rows could grow by without end."""
    outbox = make(max_bytes=2**20)
    await outbox.open()
    await outbox.insert([new_row()])
    claim = await taken(outbox)
    for n in range(9):
        await outbox.bucket.publisher.publish(f"{outbox.bucket.prefix}filler.{n}", b"x" * 100_000)
    await outbox.counts()
    await outbox.back_off(claim, 0, "e" * 2_000)
    row = await outbox.get(claim.resume_id)
    assert row is not None
    assert row.last_error == "e" * 60
    await outbox.close()


async def test_pruning_is_fenced(outbox: NatsOutbox, make: Make) -> None:
    """A done row whose feedback is wanted again is not removed by whoever had known it as done."""
    await outbox.insert([new_row()])
    claim = await outbox.store_outcome(await taken(outbox), COMPLETE)
    await outbox.finish(claim, "accepted")
    other = make()
    await other.open()
    assert await outbox.requeue_feedback([claim.resume_id])
    await asyncio.sleep(0.01)
    assert await other.prune_done(0) == 0
    assert await outbox.prune_done(0) == 0
    assert await state_of(outbox, new_row()) is State.ANSWERED
    await other.close()


async def test_nothing_is_left_of_pruned_rows(outbox: NatsOutbox) -> None:
    """The bucket does not grow by what is over: no marker stays."""
    await outbox.insert([new_row(f"r{n}") for n in range(5)])
    for claim in await outbox.claim("me", {"x": 5}, LONG_MS):
        await outbox.finish(claim, "accepted")

    async def empty() -> bool:
        await outbox.prune_done(0)
        return bool((await api(outbox, "STREAM.INFO"))["state"]["messages"] == 0)

    await until(empty, "the bucket is empty")


# -- lost replies ---------------------------------------------------------------------------------------------


class Losing:
    """A bucket whose next write loses its reply: ``stored`` or not."""

    def __init__(self, outbox: NatsOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: list[bool] = []
        self.lost = 0
        write = outbox.bucket.write

        async def losing(*args: Any) -> int:
            if not self.stored:
                return await write(*args)
            self.lost += 1
            if self.stored.pop(0):
                await write(*args)
            raise Ambiguous("no reply")

        monkeypatch.setattr(outbox.bucket, "write", losing)


@pytest.fixture
def losing(outbox: NatsOutbox, monkeypatch: pytest.MonkeyPatch) -> Losing:
    return Losing(outbox, monkeypatch)


Write = Callable[[NatsOutbox, Claim], Awaitable[object]]
WRITES: dict[str, tuple[Write, State]] = {
    "answer": (lambda box, claim: box.store_outcome(claim, COMPLETE), State.ANSWERED),
    "finish": (lambda box, claim: box.finish(claim, "accepted"), State.DONE),
    "back_off": (lambda box, claim: box.back_off(claim, LONG_MS, "boom"), State.PENDING),
    "kill": (lambda box, claim: box.kill(claim, "enough"), State.DEAD),
    "release": (lambda box, claim: box.release(claim), State.PENDING),
    "renew": (lambda box, claim: box.renew([claim], LONG_MS), State.CLAIMED),
}
LOSSES = [[True], [False], [True, False], [False, True], [False, False]]


@pytest.mark.parametrize("losses", LOSSES, ids=str)
@pytest.mark.parametrize("name", WRITES)
async def test_a_lost_reply_is_made_up_for(outbox: NatsOutbox, losing: Losing, name: str, losses: list[bool]) -> None:
    """Whether or not the write was stored, it is found or repeated, and counts once."""
    write, state = WRITES[name]
    await outbox.insert([new_row()])
    claim = await taken(outbox)
    losing.stored = list(losses)
    assert not isinstance(await write(outbox, claim), set) or name == "renew"
    assert losing.lost >= 1
    losing.stored = []
    row = await outbox.get(claim.resume_id)
    assert row is not None
    assert (row.state, row.attempts) == (state, 0 if name == "release" else 1)


@pytest.mark.parametrize("losses", LOSSES, ids=str)
async def test_lost_replies_of_insert_and_claim(outbox: NatsOutbox, losing: Losing, losses: list[bool]) -> None:
    """An insert whose reply is lost says that the row was new; such a claim is one attempt."""
    losing.stored = list(losses)
    row = new_row()
    assert await outbox.insert([row]) == {row.resume_id}
    losing.stored = list(losses)
    (claim,) = await outbox.claim("me", {"x": 1}, LONG_MS)
    losing.stored = []
    assert (claim.attempts, claim.body) == (1, row.body)
    await outbox.finish(claim, "accepted")


@pytest.mark.parametrize("name", WRITES)
async def test_a_repeated_write_is_the_same(outbox: NatsOutbox, make: Make, name: str) -> None:
    """Whoever did not hear that his write was stored may repeat it, through another connection too."""
    write, state = WRITES[name]
    await outbox.insert([new_row()])
    claim = await taken(outbox)
    other = make()
    await other.open()
    for box in (outbox, other, outbox):
        assert not await write(box, claim) or name == "answer"
    assert await state_of(outbox, new_row()) is state
    await other.close()


# -- whose clock ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off_s", [60, -60])
async def test_the_clock_of_the_process_does_not_count(
    outbox: NatsOutbox, make: Make, monkeypatch: pytest.MonkeyPatch, off_s: int
) -> None:
    """A minute ahead steals no live lease; a minute behind takes over one that ran out (C33)."""
    await outbox.insert([new_row("live"), new_row("over", lane="y")])
    live = await taken(outbox, lease_ms=30_000)
    over = await taken(outbox, "y", lease_ms=SHORT_MS)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + off_s)
    other = make()
    await other.open()
    again = await taken(other, "y", owner="other")
    assert (again.resume_id, again.attempts) == (over.resume_id, 2)
    assert await other.claim("other", {"x": 1}, LONG_MS) == []
    with pytest.raises(LeaseLost):
        await outbox.finish(over, "accepted")
    assert await outbox.renew([live], LONG_MS) == set()
    await other.close()


async def test_another_process_sees_what_changes(outbox: NatsOutbox, make: Make) -> None:
    """Rows, claims and ends of one process are known to the other without being asked for."""
    other = make()
    await other.open()
    await outbox.insert([new_row("a"), new_row("b")])

    async def waiting() -> int:
        lanes = (await other.survey(5)).lanes
        return lanes["x"].count if "x" in lanes else 0

    async def one() -> bool:
        return await waiting() == 1

    async def two() -> bool:
        return await waiting() == 2

    await until(two, "both are seen")
    claim = await taken(outbox)
    await until(one, "the claim is seen")
    await outbox.release(claim)
    await until(two, "the release is seen")
    await other.close()


async def test_two_that_compete_finish_everything_once(outbox: NatsOutbox, make: Make) -> None:
    """Two stores on one bucket, both with room for more than there is: each row has one attempt, none is left."""
    other = make()
    await other.open()
    rows = [new_row(f"r{n}") for n in range(300)]
    await outbox.insert(rows)
    seen: list[str] = []

    async def work(box: NatsOutbox) -> None:
        while claims := await box.claim("me", {"x": 20}, LONG_MS):
            seen.extend(claim.resume_id for claim in claims)
            answered = await asyncio.gather(*(box.store_outcome(claim, COMPLETE) for claim in claims))
            await asyncio.gather(*(box.finish(claim, "accepted") for claim in answered))

    await asyncio.gather(work(outbox), work(other))
    assert sorted(seen) == sorted(row.resume_id for row in rows)

    async def all_done() -> bool:
        return (await other.counts())[State.DONE] == 300

    await until(all_done, "the other one has heard of every end")
    await other.close()


async def test_bodies_are_read_where_another_process_took_them_in(
    outbox: NatsOutbox, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not remembered is read, also when the memory for rows is too small for one."""
    monkeypatch.setattr("notify_consumer.outbox.nats_rows.RECENT_BYTES", 10)
    other = make()
    await other.open()
    row = new_row()
    await outbox.insert([row])
    claim = await taken(other)
    assert claim.body == row.body
    await other.back_off(claim, 0, "boom")
    assert (await taken(outbox)).body == row.body
    await other.close()


async def test_what_was_stored_before_can_be_claimed_at_once(outbox: NatsOutbox, make: Make) -> None:
    """A row that another process has just taken in is found by a claim, not only by the next one."""
    other = make()
    await other.open()
    for n in range(30):
        await outbox.insert([new_row(f"r{n}")])
        assert len(await other.claim("me", {"x": 1}, LONG_MS)) == 1
    await other.close()


async def test_a_claim_that_fails_keeps_no_others_back(outbox: NatsOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rows the broker refuses one: the other is claimed, and only where none is, that is an error."""
    first, second = new_row("a"), new_row("b")
    await outbox.insert([first, second])
    write = outbox.bucket.write

    async def refusing(key: str, *args: Any) -> int:
        if key == first.resume_id:
            raise Unavailable("not now")
        return await write(key, *args)

    monkeypatch.setattr(outbox.bucket, "write", refusing)
    assert [claim.resume_id for claim in await outbox.claim("me", {"x": 2}, LONG_MS)] == [second.resume_id]
    with pytest.raises(OutboxUnavailable, match="not now"):
        await outbox.claim("me", {"x": 2}, LONG_MS)
    monkeypatch.undo()
    assert (await taken(outbox)).resume_id == first.resume_id


async def test_memory_refuses_nobody(outbox: NatsOutbox, make: Make) -> None:
    """A process that has not heard yet of a claim looks at the broker before it calls the claim lost."""
    other = make()
    await other.open()
    await outbox.insert([new_row()])
    follower = outbox._feed._follower
    assert follower is not None
    await follower.stop()
    claim = await taken(other)
    answered = await outbox.store_outcome(claim, COMPLETE)
    await other.back_off(answered, 0, "boom")
    with pytest.raises(LeaseLost):
        await outbox.finish(answered, "accepted")
    await other.close()


def test_the_broker_is_asked_every_other_second() -> None:
    """So far a broker's clock that steps, a policy that drifts and a full bucket go unnoticed."""
    assert nats_feed.LOOK_S <= 2
    assert nats_bucket.INSERT_UP_TO <= 0.8
