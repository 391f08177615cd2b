"""What strangers may send: every refusal is told and recorded, nothing breaks, valid traffic goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
from tests.support.stage import Stage
from timer_service.jetstream import topology

SETTINGS = {"reconcile_interval_ms": 1_000, "snapshot_grace_ms": 1_000}
SOON = {"delay_ms": 60_000}
OUTCOME_FIELDS = {
    "command_id", "status", "code", "message", "timer_ref", "generation", "fence", "phase", "due_at_ms",
}  # fmt: skip
REJECTION_FIELDS = {
    "v", "kind", "code", "message", "command_id", "timer_ref", "received_at_ms", "body", "body_truncated",
}  # fmt: skip
SUBJECT = "durable_timer.commands.start.v1"


def start_body(**fields: Any) -> dict[str, Any]:
    return {"v": 1, "command_id": unique("c"), "timer": {"name": unique()}, "due": SOON, **fields}


async def refused(desk: Desk, kind: str, data: bytes, subject: str | None = None) -> dict[str, Any]:
    """Send these bytes; the refusal must be told and recorded alike. Returns the outcome."""
    before = await desk.last_seq(topology.REJECTIONS)
    outcome = await desk.ask_raw(subject or f"durable_timer.commands.{kind}.v1", data)
    assert set(outcome) == OUTCOME_FIELDS
    assert outcome["status"] == "rejected"
    (record,) = await desk.rejections(kind, after=before)
    assert set(record) == REJECTION_FIELDS
    assert (record["kind"], record["code"], record["message"]) == (kind, outcome["code"], outcome["message"])
    assert (record["command_id"], record["timer_ref"]) == (outcome["command_id"], outcome["timer_ref"])
    assert record["body_truncated"] == (len(data) > 4096)
    assert record["body"].encode() == data[: len(record["body"].encode())]
    return outcome


UNREADABLE = {
    "empty": (b"", "malformed"),
    "not JSON": (b"{", "malformed"),
    "not UTF-8": (b'{"v":1,"x":"\xff"}', "malformed"),
    "a list": (b"[]", "malformed"),
    "deep": (b'{"v":1,"payload":' + b"[" * 5_000 + b"]" * 5_000 + b"}", "malformed"),
    "too large": (encoded(start_body(payload="x" * 262_144)), "too_large"),
    "huge": (encoded(start_body(payload="x" * 900_000)), "too_large"),
}


@pytest.mark.parametrize("case", UNREADABLE)
async def test_what_cannot_be_read_is_refused(desk: Desk, case: str) -> None:
    """Bodies that are no command at all are settled at once, with whatever could be read of them."""
    data, code = UNREADABLE[case]
    before = await desk.last_seq(topology.REJECTIONS)
    outcome = await desk.ask_raw(SUBJECT, data)
    assert (outcome["status"], outcome["code"], outcome["command_id"]) == ("rejected", code, None)
    (record,) = await desk.rejections(after=before)
    assert (record["kind"], record["code"]) == ("start", code)
    assert len(record["body"].encode()) <= 4096
    assert record["body_truncated"] == (len(data) > 4096)


START_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no v": ({"v": None}, "malformed"),
    "v as text": ({"v": "1"}, "malformed"),
    "v true": ({"v": True}, "malformed"),
    "a later v": ({"v": 2}, "unsupported_version"),
    "unknown field": ({"colour": "red"}, "malformed"),
    "no key": ({"timer": None}, "malformed"),
    "mixed key": ({"timer": {"name": "n", "flow_id": "f"}}, "malformed"),
    "no due": ({"due": None}, "invalid_due"),
    "two dues": ({"due": {"delay_ms": 5, "at_ms": 5}}, "invalid_due"),
    "no delay": ({"due": {"delay_ms": 0}}, "invalid_due"),
    "too long a delay": ({"due": {"delay_ms": 3_155_760_000_001}}, "invalid_due"),
    "delay as text": ({"due": {"delay_ms": "5"}}, "malformed"),
    "delay true": ({"due": {"delay_ms": True}}, "malformed"),
    "delay of a fraction": ({"due": {"delay_ms": 1.5}}, "malformed"),
    "year 10000": ({"due": {"at_ms": 253_402_300_800_000}}, "invalid_due"),
    "before 1970": ({"due": {"at_ms": -1}}, "invalid_due"),
    "no offset": ({"due": {"at": "2100-01-01T00:00:00"}}, "invalid_due"),
    "second 60": ({"due": {"at": "2100-12-31T23:59:60Z"}}, "invalid_due"),
    "hash": ({"payload": {"a": 1}, "payload_sha256": "0" * 64}, "hash_mismatch"),
    "retries below none": ({"max_retries": -1}, "malformed"),
    "edges of a name": ({"edges": {"start": "a", "elapsed": "b"}}, "malformed"),
    "no command id": ({"command_id": None}, "malformed"),
    "long command id": ({"command_id": "c" * 129}, "malformed"),
}


@pytest.mark.parametrize("case", START_REFUSALS)
async def test_a_bad_start_is_refused_with_its_code(desk: Desk, case: str) -> None:
    """Each mistake has its code, told and recorded, and the timer does not come into being."""
    fields, code = START_REFUSALS[case]
    body = start_body(**fields)
    outcome = await refused(desk, "start", json.dumps(body).encode())
    assert outcome["code"] == code
    if body["timer"] and "flow_id" not in body["timer"]:
        assert outcome["timer_ref"] == ref_of(body["timer"])
        assert await desk.entry(ref_of(body["timer"])) is None


@pytest.mark.parametrize("kind", ["retry", "complete", "fail", "cancel"])
async def test_answers_to_nothing_are_refused(desk: Desk, kind: str) -> None:
    """Feedback for a timer that does not exist, and a cancel after its wait, are unknown_timer."""
    body: dict[str, Any] = {"timer_ref": name_ref(unique())}
    body |= {"wait_ms": 200} if kind == "cancel" else {"generation": 0, "fence": 1}
    body |= {"failure_code": "no"} if kind == "fail" else {}
    outcome = await refused(desk, kind, encoded(body))
    assert (outcome["code"], outcome["timer_ref"], outcome["phase"]) == ("unknown_timer", body["timer_ref"], None)


async def test_answers_to_another_occurrence_are_refused(desk: Desk) -> None:
    """not_elapsed, stale_generation, stale_fence and conflict tell where the timer stands."""
    key = lineage_key()
    named: dict[str, Any] = {"timer_ref": ref_of(key), "generation": 0, "fence": 1}
    await desk.ask("start", timer=key, due={"delay_ms": 300})
    assert (await refused(desk, "complete", encoded(named)))["code"] == "not_elapsed"
    conflict = await refused(desk, "start", encoded({"timer": key, "due": {"delay_ms": 301}}))
    assert (conflict["code"], conflict["phase"]) == ("conflict", "waiting")
    async with Engine(desk) as engine:
        await engine.resume_of(ref_of(key))
    for fields, code in (({"generation": 3}, "stale_generation"), ({"fence": 9}, "stale_fence")):
        outcome = await refused(desk, "complete", encoded({**named, "fence": 2, **fields}))
        assert (outcome["code"], outcome["phase"], outcome["fence"]) == (code, "elapsed", 2)
    outcome = await refused(desk, "cancel", encoded({"timer_ref": ref_of(key), "generation": 3}))
    assert outcome["code"] == "stale_generation"
    outcome = await refused(desk, "fail", encoded({**named, "fence": 2, "failure_code": "No!"}))
    assert outcome["code"] == "malformed"
    too_long = {**named, "fence": 2, "failure_code": "no", "message": "ä" * 513}
    assert (await refused(desk, "fail", encoded(too_long)))["code"] == "too_large"
    assert (await desk.ask("complete", **{**named, "fence": 2}))["status"] == "accepted"


async def test_retry_without_a_delay_to_repeat_is_refused(desk: Desk) -> None:
    """After an absolute start a retry must say when."""
    name = unique()
    await desk.ask("start", timer={"name": name}, due={"at": "2001-01-01T00:00:00Z"}, max_retries=1)
    async with Engine(desk) as engine:
        resume = await engine.resume_of(name_ref(name))
        answer: dict[str, Any] = {"timer_ref": name_ref(name), "generation": 0, "fence": resume["fence"]}
        assert (await refused(desk, "retry", encoded(answer)))["code"] == "invalid_due"
        assert (await engine.reply(resume, "retry", due={"delay_ms": 1}))["status"] == "accepted"


@pytest.mark.parametrize(
    ("subject", "kind", "code"),
    [
        ("durable_timer.commands.start.v2", "start", "unsupported_version"),
        ("durable_timer.commands.explode.v1", "unknown", "malformed"),
        ("durable_timer.commands.start", "unknown", "malformed"),
        ("durable_timer.commands.start.v1.more", "unknown", "malformed"),
        ("durable_timer.commands.ä.ö", "unknown", "malformed"),
    ],
)
async def test_unknown_subjects_are_refused(desk: Desk, subject: str, kind: str, code: str) -> None:
    """What the stream takes and nobody knows is settled too."""
    assert (await refused(desk, kind, encoded(start_body()), subject))["code"] == code


PARTS = {
    "space": ("a b", True),
    "star": ("*", True),
    "greater": (">", True),
    "dots": ("..", True),
    "leading dot": (".a", True),
    "dollar": ("$KV.DURABLE_TIMER_STATE.x", True),
    "emoji": ("😀", True),
    "combining": ("e\u0301", True),
    "256 bytes": ("ä" * 128, True),
    "257 bytes": ("ä" * 128 + "a", False),
    "1 kB": ("k" * 1_024, False),
    "newline": ("a\nb", False),
    "crlf": ("a\r\nPUB x 0\r\n", False),
    "nul": ("\0", False),
    "del": ("\x7f", False),
    "c1": ("\x85", False),
    "empty": ("", False),
    "lone surrogate": ("\ud800", False),
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("field", ["name", "namespace", "flow_version"])
async def test_key_parts_of_every_kind(desk: Desk, case: str, field: str) -> None:
    """C21: a part is taken byte for byte or refused, and the next command is answered."""
    part, taken = PARTS[case]
    key = lineage_key() if field == "flow_version" else {"name": unique(), "namespace": "n"}
    if field == "name":
        key["namespace"] = unique()
    key[field] = part
    outcome = await desk.ask("start", timer=key, due=SOON)
    assert (outcome["status"], outcome["code"]) == (("accepted", None) if taken else ("rejected", "malformed"))
    if taken:
        state = await desk.state(ref_of(key))
        assert state is not None
        assert state["timer"] == key
    assert (await desk.ask("start", timer={"name": unique()}, due=SOON))["status"] == "accepted"


REPLIES = {
    "state": topology.STATE_PREFIX + "x" * 26,
    "wake": topology.wake_subject("x" * 26),
    "resume": topology.RESUME_SUBJECT,
    "archive": topology.terminal_subject("x" * 26),
    "command": "durable_timer.commands.start.v1",
    "api": "$JS.API.STREAM.DELETE.DURABLE_TIMER_SNAPSHOTS",
    "no prefix": "somewhere",
    "prefix without dot": "_INBOXES.x",
    "wildcard": "_INBOX.*",
    "greater": "_INBOX.>",
    "inner wildcard": "_INBOX.a.*.b",
    "space": "_INBOX.a b",
    "empty token": "_INBOX.a..b",
    "last token empty": "_INBOX.a.",
    "prefix alone": "_INBOX.",
    "two kilobytes": "_INBOX." + "a" * 2_048,
    "not ascii": "_INBOX.ä",
    "empty": "",
}


@pytest.mark.parametrize("case", REPLIES)
async def test_a_reply_subject_outside_the_inboxes_is_ignored(desk: Desk, service: Service, case: str) -> None:
    """The command counts, the reply is dropped and counted, nothing is written where only the service may write."""
    subject, name = REPLIES[case], unique()
    before = service.metric("durable_timer_replies_ignored_total")
    counts = [await desk.last_seq(s) for s in (topology.RESUMES, topology.TERMINALS, topology.SCHEDULES)]
    subscription = await desk.client.subscribe("somewhere")
    header = f"NATS/1.0\r\nDurable-Timer-Reply: {subject}\r\n\r\n".encode()
    publish_raw(_port(desk), SUBJECT.encode(), header, encoded(start_body(timer={"name": name})))
    await eventually(lambda: desk.state(name_ref(name)))
    if subject:
        assert service.metric("durable_timer_replies_ignored_total") == before + 1
    assert (await desk.ask("start", timer={"name": unique()}, due=SOON))["status"] == "accepted"
    assert [await desk.last_seq(s) for s in (topology.RESUMES, topology.TERMINALS, topology.SCHEDULES)] == counts
    assert subscription.pending_msgs == 0
    assert await desk.last(topology.STATE_STREAM, topology.STATE_PREFIX + "x" * 26) is None
    await subscription.unsubscribe()


def _port(desk: Desk) -> int:
    url = desk.client.connected_url
    assert url is not None
    assert url.port is not None
    return url.port


BLOCKS = {
    "cut short": b"NATS/1.0",
    "only the line": b"NATS/1.0\r\n\r\n",
    "a status": b"NATS/1.0 503\r\n\r\n",
    "heartbeat": b"NATS/1.0 100 Idle Heartbeat\r\n\r\n",
    "end of a pull": b"NATS/1.0 409 Consumer Deleted\r\nNats-Pending-Messages: 256\r\n\r\n",
    "status not UTF-8": b"NATS/1.0 \xff\xfe\xff\r\n\r\n",
    "status text not UTF-8": b"NATS/1.0 100 \xff\xfe\r\n\r\n",
    "value not UTF-8": b"NATS/1.0\r\nA: \xff\xfe\r\n\r\n",
    "name not UTF-8": b"NATS/1.0\r\n\xff\xfe: a\r\n\r\n",
    "no name": b"NATS/1.0\r\n: a\r\n\r\n",
    "no colon": b"NATS/1.0\r\nabc\r\n\r\n",
    "garbage": b"garbage!\r\n\r\n",
    "two replies": b"NATS/1.0\r\nDurable-Timer-Reply: a\r\nDurable-Timer-Reply: b\r\n\r\n",
}


@pytest.mark.parametrize("case", BLOCKS)
async def test_a_broken_header_block_harms_nobody(desk: Desk, case: str) -> None:
    """The body of such a command is judged as any other, and the service goes on."""
    name = unique()
    publish_raw(_port(desk), SUBJECT.encode(), BLOCKS[case], encoded(start_body(timer={"name": name})))
    await eventually(lambda: desk.state(name_ref(name)), what="the command to take effect")
    assert (await desk.ask("start", timer={"name": unique()}, due=SOON))["status"] == "accepted"


async def test_ten_thousand_poison_messages_are_settled_and_valid_traffic_goes_on(desk: Desk, service: Service) -> None:
    """C22: all are recorded and gone from the queue; commands and timers beside them are served meanwhile."""
    poison = [
        b"", b"{", b"null", b"[1]", b"\x00\xff" * 50, b'{"v":1}', b'{"v":99,"command_id":"c"}',
        encoded({"timer": {"name": "a\nb"}, "due": SOON}), encoded({"timer": {"name": "p"}, "due": {"delay_ms": 0}}),
        encoded({"timer": {"name": "p"}, "due": SOON, "payload": 1, "payload_sha256": "no"}),
        encoded({"timer_ref": name_ref("nobody"), "generation": 0, "fence": 1}),
        b'{"v":1,"v":1,"command_id":"c"}', b'{"v":1,"command_id":"c","payload":1e999}',
    ]  # fmt: skip
    kinds = ("start", "retry", "complete", "fail", "cancel", "nonsense")
    before = await desk.last_seq(topology.REJECTIONS)
    names = [unique() for _ in range(20)]
    async with Engine(desk, complete) as engine:
        for name in names:
            await desk.send("start", timer={"name": name}, due={"delay_ms": 1_000})
        for n in range(10_000):
            subject = f"durable_timer.commands.{kinds[n % 6]}.v1"
            await desk.client.publish(subject, poison[n % len(poison)])
        assert (await desk.ask("start", timer={"name": unique()}, due=SOON))["status"] == "accepted"
        for name in names:
            assert (await desk.ended(name_ref(name)))["status"] == "completed"
        assert [len({r.resume_id for r in engine.of(name_ref(name))}) for name in names] == [1] * len(names)
    await eventually(lambda: _empty(desk, topology.COMMANDS), 30, what="all poison settled")
    assert await desk.last_seq(topology.REJECTIONS) == before + 10_000
    assert service.readyz()[0] == 200


async def _empty(desk: Desk, stream: str) -> bool:
    return await desk.count(stream) == 0


# -- wakes that the driver did not send -------------------------------------------------------------------------


async def test_a_wake_is_never_believed(desk: Desk, service: Service) -> None:
    """Early ones, ones of another generation, of nobody, and garbage change nothing; the timer fires when it is due."""
    key, delay_ms = {"name": unique()}, 1_500
    while not await _still_waits_after_wakes(desk, key, delay_ms):  # a slow machine may need longer to tell
        key, delay_ms = {"name": unique()}, 4 * delay_ms
        assert delay_ms < 60_000
    async with Engine(desk, complete) as engine:
        await desk.ended(ref_of(key), 40)
        (received,) = engine.of(ref_of(key))
        assert 0 <= received.stored_at_ms - received.due_at_ms < 20_000


async def _still_waits_after_wakes(desk: Desk, key: dict[str, str], delay_ms: int) -> bool:
    """False where the timer was due before all wakes were settled."""
    started = await desk.ask("start", timer=key, due={"delay_ms": delay_ms})
    entry = await desk.entry(ref_of(key))
    assert entry is not None
    good = {"v": 1, "timer_ref": ref_of(key), "generation": 0, "woken_at_ms": now_ms(), "revision": entry.seq}
    wakes = [
        good, {**good, "revision": 0}, {**good, "generation": 7}, {**good, "timer_ref": name_ref("nobody")},
        {**good, "v": 2}, {**good, "generation": -1}, {**good, "woken_at_ms": "x"},
    ]  # fmt: skip
    for data in [*(json.dumps(wake).encode() for wake in wakes), b"", b"{", b"\xff"]:
        await desk.js.publish(topology.wake_subject(ref_of(key)), data)

    async def settled() -> bool:
        info = await desk.js.consumer_info(topology.SCHEDULES, topology.WAKE_CONSUMER)
        return bool(info.num_pending == 0 and info.num_ack_pending == 0)

    await eventually(settled)
    state = await desk.state(ref_of(key))
    if now_ms() >= started["due_at_ms"]:
        return False
    assert state is not None
    assert (state["phase"], state["fence"]) == ("waiting", 1)
    return True


# -- states that can't be read ----------------------------------------------------------------------------------


async def put_by_hand(desk: Desk, timer_ref: str, value: bytes, headers: dict[str, str] | None = None) -> int:
    ack = await desk.js.publish(topology.state_subject(timer_ref), value, headers=headers)
    return ack.seq


UNREADABLE_STATES = {
    "corrupt": b"\x00 no JSON",
    "empty": b"",
    "newer": b'{"v":2,"timer_ref":"?","future":true}',
    "not a timer": b'{"v":1}',
}


@pytest.mark.parametrize("case", UNREADABLE_STATES)
async def test_a_state_that_cannot_be_read_is_reported_and_left_alone(desk: Desk, service: Service, case: str) -> None:
    """It shows in details.problems and in the gauge, commands for it get state_unreadable, and nobody else waits."""
    key = {"name": unique()}
    seq = await put_by_hand(desk, ref_of(key), UNREADABLE_STATES[case])
    await eventually(lambda: service.details()["problems"] == 1)
    assert service.metric("durable_timer_problems") == 1
    assert service.readyz()[0] == 200
    commands: dict[str, dict[str, Any]] = {
        "start": {"timer": key, "due": SOON},
        "complete": {"timer_ref": ref_of(key), "generation": 0, "fence": 1},
        "cancel": {"timer_ref": ref_of(key)},
    }
    for kind, body in commands.items():
        assert (await refused(desk, kind, encoded(body)))["code"] == "state_unreadable"
    assert (await desk.ask("start", timer={"name": unique()}, due=SOON))["status"] == "accepted"
    entry = await desk.entry(ref_of(key))
    assert entry is not None
    assert (entry.seq, entry.data or b"") == (seq, UNREADABLE_STATES[case])
    await desk.js.purge_stream(topology.STATE_STREAM, subject=topology.state_subject(ref_of(key)))
    assert (await desk.ask("start", timer=key, due=SOON))["status"] == "accepted"
    await eventually(lambda: service.details()["problems"] == 0)


async def test_a_state_that_goes_bad_while_it_waits_blocks_nobody(desk: Desk, service: Service) -> None:
    """An entry overwritten by garbage does not fire and keeps nobody waiting; purged by hand, it is forgotten."""
    key, name = {"name": unique()}, unique()
    await desk.ask("start", timer=key, due={"delay_ms": 3_000})
    await put_by_hand(desk, ref_of(key), b"\x00")
    async with Engine(desk, complete) as engine:
        await desk.ask("start", timer={"name": name}, due={"delay_ms": 3_200})
        assert (await desk.ended(name_ref(name)))["status"] == "completed"
        await eventually(lambda: service.details()["problems"] == 1)
        assert engine.of(ref_of(key)) == []
    await desk.js.purge_stream(topology.STATE_STREAM, subject=topology.state_subject(ref_of(key)))
    await eventually(lambda: service.details()["problems"] == 0, what="the next scan to notice")


async def test_the_payload_of_a_newer_state_is_not_swept(desk: Desk, service: Service) -> None:
    """What a later version of the service has stored, its large payload too, is there when that version returns."""
    key, orphan = {"name": unique()}, name_ref(unique())
    await desk.ask("start", timer=key, due=SOON, payload="x" * 2_000)
    entry = await desk.entry(ref_of(key))
    assert entry is not None
    newer = json.dumps({**json.loads(entry.data or b""), "v": 2, "snapshot_seq": None}).encode()
    await put_by_hand(desk, ref_of(key), newer)
    await desk.js.publish(topology.snapshot_subject(orphan, 0), b'"swept"')

    async def swept() -> bool:
        return await desk.snapshots_of(orphan) == 0

    await eventually(swept, 15)
    assert await desk.snapshots_of(ref_of(key)) == 1
    await put_by_hand(desk, ref_of(key), entry.data or b"")
    await eventually(lambda: service.details()["problems"] == 0)
    assert (await desk.ask("cancel", timer_ref=ref_of(key)))["status"] == "accepted"


async def test_a_foreign_key_in_the_bucket_is_reported(desk: Desk, service: Service, stage: Stage) -> None:
    """An entry whose key is no timer_ref is a problem too, and stays."""
    await desk.js.publish(topology.STATE_PREFIX + "not.a.ref", b"{}")
    await eventually(lambda: service.details()["problems"] == 1)
    assert await desk.last(topology.STATE_STREAM, topology.STATE_PREFIX + "not.a.ref") is not None
    await desk.js.publish(topology.STATE_PREFIX + "not.a.ref", b"", headers={"KV-Operation": "DEL"})
    await eventually(lambda: service.details()["problems"] == 0)
