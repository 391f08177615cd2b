"""One timer's life through the real service on a real broker, from start to archive record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.service import Desk, Engine, eventually, lineage_key, name_ref, now_ms, ref_of, unique
from timer_service.jetstream import topology

RESUME_FIELDS = {
    "v", "resume_id", "timer_ref", "timer", "generation", "fence", "retries_used", "max_retries", "edges",
    "runtime_sha256", "due_at_ms", "elapsed_at_ms", "payload", "payload_sha256",
}  # fmt: skip
TIMELINE_FIELDS = {
    "generation", "accepted_at_ms", "due_at_ms", "woken_at_ms", "elapsed_at_ms", "resumed_at_ms", "resumes", "answer",
    "answered_at_ms", "lateness_ms",
}  # fmt: skip
RECORD_FIELDS = {
    "v", "timer_ref", "timer", "phase", "status", "generation", "fence", "due_at_ms", "retries_used", "max_retries",
    "payload_sha256", "timeline", "ended_at_ms",
}  # fmt: skip
LARGE = {"text": "x" * 1_500}
SMALL = {"order": 42}


@pytest.fixture
async def engine(desk: Desk) -> AsyncIterator[Engine]:
    async with Engine(desk) as running:
        yield running


async def elapsed(desk: Desk, engine: Engine, **body: Any) -> tuple[str, dict[str, Any]]:
    """Start a named timer (or the one in ``body``), wait for its resume."""
    key = body.pop("timer", None) or {"name": unique()}
    outcome = await desk.ask("start", timer=key, due={"delay_ms": 50}, **body)
    assert outcome["status"] == "accepted", outcome
    return ref_of(key), await engine.resume_of(ref_of(key))


@pytest.mark.parametrize("payload", [LARGE, SMALL, None], ids=["snapshot", "inline", "none"])
async def test_a_completed_timer_leaves_a_full_record_and_nothing_else(
    desk: Desk, engine: Engine, payload: Any
) -> None:
    """Start, resume, complete: the record tells all of it; entry and snapshot are gone, a marker guards the key."""
    key, before_ms = lineage_key(), now_ms()
    edges = {"start": "a", "elapsed": "b"}
    started = await desk.ask(
        "start", timer=key, due={"delay_ms": 300}, payload=payload, edges=edges, runtime_sha256="ab" * 32
    )
    timer_ref = ref_of(key)
    assert started["status"] == "accepted"
    assert (started["generation"], started["fence"], started["phase"]) == (0, 1, "waiting")
    assert await desk.snapshots_of(timer_ref) == (1 if payload == LARGE else 0)

    resume = await engine.resume_of(timer_ref)
    text = json.dumps(payload, separators=(",", ":")).encode()
    assert set(resume) == RESUME_FIELDS
    assert resume["resume_id"] == f"{timer_ref}.0"
    assert (resume["timer"], resume["payload"]) == (key, payload)
    assert resume["payload_sha256"] == hashlib.sha256(text).hexdigest()
    assert {name: resume["edges"][name] for name in edges} == edges
    assert resume["runtime_sha256"] == "ab" * 32
    assert resume["due_at_ms"] == started["due_at_ms"]
    assert resume["elapsed_at_ms"] >= resume["due_at_ms"] >= before_ms + 300
    assert (resume["generation"], resume["fence"]) == (0, 2)
    assert (resume["retries_used"], resume["max_retries"]) == (0, 0)

    completed = await engine.reply(resume, "complete")
    assert (completed["status"], completed["phase"], completed["fence"]) == ("accepted", "completed", 3)

    record = await desk.ended(timer_ref)
    assert set(record) >= RECORD_FIELDS
    assert (record["status"], record["phase"], record["fence"]) == ("completed", "completed", 3)
    assert (record["timer"], record["payload_sha256"]) == (key, resume["payload_sha256"])
    (line,) = record["timeline"]
    assert set(line) == TIMELINE_FIELDS
    assert None not in line.values()
    assert line["due_at_ms"] == line["accepted_at_ms"] + 300 == resume["due_at_ms"]
    assert line["accepted_at_ms"] < line["due_at_ms"] <= line["woken_at_ms"] <= line["elapsed_at_ms"]
    assert line["elapsed_at_ms"] <= line["resumed_at_ms"]
    assert line["lateness_ms"] == line["elapsed_at_ms"] - line["due_at_ms"]
    assert (line["answer"], line["resumes"]) == ("complete", 1)
    assert line["answered_at_ms"] == record["ended_at_ms"]

    entry = await desk.entry(timer_ref)
    assert entry is not None
    assert entry.headers is not None
    assert entry.headers["KV-Operation"] == "PURGE"
    assert entry.headers["Nats-TTL"] == "3600s"
    marker = json.loads(entry.data or b"")
    assert (marker["generation"], marker["fence"]) == (0, 3)
    await no_snapshots(desk, timer_ref)
    assert await desk.records_of(timer_ref) == 1


async def no_snapshots(desk: Desk, timer_ref: str) -> None:
    """Wait until no payload of this timer is kept."""

    async def none() -> bool:
        return await desk.snapshots_of(timer_ref) == 0

    await eventually(none, what="the snapshots to be gone")


async def test_retries_count_up_to_their_limit_and_then_end_as_failed(desk: Desk, engine: Engine) -> None:
    """Every retry is a new generation with a growing fence; one too many ends as max_retries_exceeded."""
    timer_ref, resume = await elapsed(desk, engine, max_retries=2, payload=LARGE)
    for generation in (1, 2):
        again = await engine.reply(resume, "retry")
        assert (again["status"], again["phase"], again["generation"]) == ("accepted", "waiting", generation)
        resume = await engine.resume_of(timer_ref, generation)
        assert (resume["retries_used"], resume["fence"]) == (generation, 2 + 2 * generation)
        assert resume["payload"] == LARGE
    last = await engine.reply(resume, "retry", due={"delay_ms": 1})
    assert (last["status"], last["phase"]) == ("accepted", "failed")

    record = await desk.ended(timer_ref)
    assert (record["status"], record["failure_code"]) == ("failed", "max_retries_exceeded")
    assert record["retries_used"] == 2
    assert [line["generation"] for line in record["timeline"]] == [0, 1, 2]
    assert [line["answer"] for line in record["timeline"]] == ["retry"] * 3
    assert all(line["lateness_ms"] is not None for line in record["timeline"])
    assert [r.resume["generation"] for r in engine.of(timer_ref)] == [0, 1, 2]


async def test_a_retry_waits_for_its_own_due_time(desk: Desk, engine: Engine) -> None:
    """The due time of a retry counts from the retry; absent, the last delay is repeated."""
    timer_ref, resume = await elapsed(desk, engine, max_retries=None)
    given = await engine.reply(resume, "retry", due={"delay_ms": 200})
    resume = await engine.resume_of(timer_ref, 1)
    assert resume["due_at_ms"] == given["due_at_ms"]
    assert resume["max_retries"] is None
    repeated = await engine.reply(resume, "retry")
    await engine.resume_of(timer_ref, 2)
    state = await desk.state(timer_ref)
    assert state is not None
    assert state["timeline"][1]["due_at_ms"] - state["timeline"][1]["accepted_at_ms"] == 200
    assert repeated["due_at_ms"] - state["timeline"][2]["accepted_at_ms"] == 200


async def test_a_failure_is_recorded_with_its_code_and_message(desk: Desk, engine: Engine) -> None:
    """Fail ends the timer; code and message stand in the record."""
    timer_ref, resume = await elapsed(desk, engine)
    outcome = await engine.reply(resume, "fail", failure_code="no_luck", message="nothing helped: ä€😀")
    assert (outcome["status"], outcome["phase"]) == ("accepted", "failed")
    record = await desk.ended(timer_ref)
    assert (record["status"], record["failure_code"], record["message"]) == (
        "failed", "no_luck", "nothing helped: ä€😀",
    )  # fmt: skip
    assert record["timeline"][0]["answer"] == "fail"


async def test_a_cancelled_timer_never_resumes(desk: Desk, engine: Engine) -> None:
    """Cancel of a waiting timer ends it for good, with its snapshot."""
    key = lineage_key()
    timer_ref = ref_of(key)
    await desk.ask("start", timer=key, due={"delay_ms": 700}, payload=LARGE)
    outcome = await desk.ask("cancel", timer_ref=timer_ref, reason="not wanted")
    assert (outcome["status"], outcome["code"], outcome["phase"]) == ("accepted", None, "cancelled")
    record = await desk.ended(timer_ref)
    assert (record["status"], record["message"]) == ("cancelled", "not wanted")
    assert record["timeline"][0]["answer"] == "cancel"
    assert record["timeline"][0]["elapsed_at_ms"] is None

    await elapsed(desk, engine)  # others go on
    await eventually(lambda: now_ms() > outcome["due_at_ms"] + 300)
    assert engine.of(timer_ref) == []
    await no_snapshots(desk, timer_ref)


async def test_a_cancel_that_comes_too_late_turns_a_retry_into_the_end(desk: Desk, engine: Engine) -> None:
    """After the timer elapsed the resume stands and the fence stays; a retry then ends it as cancelled."""
    timer_ref, resume = await elapsed(desk, engine, max_retries=5)
    late = await desk.ask("cancel", timer_ref=timer_ref)
    assert (late["status"], late["code"], late["phase"]) == ("accepted", "too_late", "elapsed")
    assert late["fence"] == resume["fence"]
    ended = await engine.reply(resume, "retry")
    assert (ended["status"], ended["phase"]) == ("accepted", "cancelled")
    record = await desk.ended(timer_ref)
    assert (record["status"], record["timeline"][0]["answer"]) == ("cancelled", "retry")


async def test_a_complete_counts_also_after_a_late_cancel(desk: Desk, engine: Engine) -> None:
    """A cancel that came too late takes nothing from complete."""
    timer_ref, resume = await elapsed(desk, engine)
    await desk.ask("cancel", timer_ref=timer_ref)
    assert (await engine.reply(resume, "complete"))["phase"] == "completed"
    assert (await desk.ended(timer_ref))["status"] == "completed"


async def test_a_replaced_occurrence_never_resumes(desk: Desk, engine: Engine) -> None:
    """Replace is one step to the next generation; the old due time passes in silence."""
    name = unique()
    timer_ref = name_ref(name)
    first = await desk.ask("start", timer={"name": name}, due={"delay_ms": 400}, payload=LARGE)
    second = await desk.ask("start", timer={"name": name}, due={"delay_ms": 1_200}, payload={"new": LARGE})
    assert (second["status"], second["generation"], second["fence"]) == ("accepted", 1, 2)
    await eventually(lambda: now_ms() > first["due_at_ms"] + 300)
    assert engine.of(timer_ref) == []
    resume = await engine.resume_of(timer_ref, 1)
    assert (resume["payload"], resume["due_at_ms"]) == ({"new": LARGE}, second["due_at_ms"])
    await engine.reply(resume, "complete")
    record = await desk.ended(timer_ref)
    assert [line["answer"] for line in record["timeline"]] == ["replace", "complete"]
    assert record["timeline"][0]["elapsed_at_ms"] is None
    assert len(engine.of(timer_ref)) == 1
    await no_snapshots(desk, timer_ref)


async def test_feedback_for_a_replaced_occurrence_is_stale(desk: Desk, engine: Engine) -> None:
    """A start over an elapsed timer begins the next generation; who still works on the old one is told."""
    key = {"name": unique()}
    timer_ref, resume = await elapsed(desk, engine, timer=key)
    again = await desk.ask("start", timer=key, due={"delay_ms": 60_000})
    assert (again["generation"], again["phase"]) == (1, "waiting")
    stale = await engine.reply(resume, "complete")
    assert (stale["status"], stale["code"], stale["generation"]) == ("rejected", "stale_generation", 1)
    assert (await desk.ask("cancel", timer_ref=timer_ref))["status"] == "accepted"


async def test_a_name_that_has_ended_starts_again_where_it_left_off(desk: Desk, engine: Engine) -> None:
    """The next life of a name takes the next generation and a higher fence, and begins its retries anew."""
    key = {"name": unique(), "namespace": "shop"}
    timer_ref, resume = await elapsed(desk, engine, timer=key, max_retries=3)
    await engine.reply(resume, "retry")
    resume = await engine.resume_of(timer_ref, 1)
    ended = await engine.reply(resume, "complete")
    await desk.ended(timer_ref)
    started = await desk.ask("start", timer=key, due={"delay_ms": 50}, max_retries=3)
    assert (started["generation"], started["fence"]) == (2, ended["fence"] + 1)
    resume = await engine.resume_of(timer_ref, 2)
    assert (resume["retries_used"], resume["timer"]) == (0, key)
    await engine.reply(resume, "complete")
    record = await desk.ended(timer_ref)
    assert record["generation"] == 2
    assert [line["generation"] for line in record["timeline"]] == [0, 1, 2]
    assert await desk.records_of(timer_ref) == 2


async def test_the_marker_of_an_end_is_not_the_memory_of_it(desk: Desk, engine: Engine) -> None:
    """With the marker gone the archive still knows: the next generation, never generation 0 again."""
    key = {"name": unique()}
    timer_ref, resume = await elapsed(desk, engine, timer=key)
    await engine.reply(resume, "complete")
    await desk.ended(timer_ref)
    entry = await desk.entry(timer_ref)
    assert entry is not None
    await desk.js.purge_stream(topology.STATE_STREAM, subject=topology.state_subject(timer_ref))
    assert await desk.entry(timer_ref) is None
    started = await desk.ask("start", timer=key, due={"delay_ms": 60_000})
    assert (started["status"], started["generation"], started["fence"]) == ("accepted", 1, 4)


async def test_a_lineage_starts_once(desk: Desk, engine: Engine) -> None:
    """A lineage that has ended refuses every later start, and feedback too."""
    key = lineage_key()
    timer_ref, resume = await elapsed(desk, engine, timer=key)
    await engine.reply(resume, "complete")
    await desk.ended(timer_ref)
    for kind, body in (
        ("start", {"timer": key, "due": {"delay_ms": 50}}),
        ("start", {"timer": key, "due": {"delay_ms": 77}, "if_exists": "replace"}),
        ("complete", {"timer_ref": timer_ref, "generation": 0, "fence": 2}),
        ("cancel", {"timer_ref": timer_ref}),
    ):
        outcome = await desk.ask(kind, **body)
        assert (outcome["status"], outcome["code"], outcome["phase"]) == ("rejected", "already_terminal", "completed")
    assert len(engine.of(timer_ref)) == 1


async def test_a_repeated_command_is_told_what_became_of_it(desk: Desk, engine: Engine) -> None:
    """The same command id with the same content changes nothing, also long after the end; other content conflicts."""
    key = {"name": unique()}
    start: dict[str, Any] = {"command_id": unique("c"), "timer": key, "due": {"delay_ms": 50}}
    assert (await desk.ask("start", **start))["status"] == "accepted"
    assert (await desk.ask("start", **start))["status"] == "duplicate"
    resume = await engine.resume_of(ref_of(key))
    answer: dict[str, Any] = {
        "command_id": unique("c"),
        "timer_ref": ref_of(key),
        "generation": 0,
        "fence": resume["fence"],
    }
    assert (await desk.ask("complete", **answer))["status"] == "accepted"
    await desk.ended(ref_of(key))
    for kind, body in (("start", start), ("complete", answer)):
        again = await desk.ask(kind, **body)
        assert (again["status"], again["phase"], again["generation"]) == ("duplicate", "completed", 0)
    other = await desk.ask("start", **{**start, "due": {"delay_ms": 51}})
    assert (other["status"], other["code"]) == ("rejected", "conflict")
    assert len(engine.of(ref_of(key))) == 1


async def test_a_cancel_waits_for_the_start_that_is_still_on_its_way(desk: Desk, engine: Engine) -> None:
    """A cancel stored before its start takes effect on it when it names the generation, and then nothing fires."""
    key = lineage_key()
    body = json.dumps({"v": 1, "command_id": "c1", "timer_ref": ref_of(key), "generation": 0, "wait_ms": 8_000})
    asked = await desk.asked("durable_timer.commands.cancel.v1", body.encode())
    await desk.ask("start", timer=key, due={"delay_ms": 60_000})
    outcome = await asked.outcome()
    assert (outcome["status"], outcome["phase"]) == ("accepted", "cancelled")
    assert (await desk.ended(ref_of(key)))["status"] == "cancelled"


async def test_a_start_that_comes_again_and_again_stores_its_payload_once(desk: Desk) -> None:
    """Neither duplicates nor conflicting starts leave large payloads behind."""
    key = lineage_key()
    start: dict[str, Any] = {"command_id": unique("c"), "timer": key, "due": {"delay_ms": 60_000}, "payload": LARGE}
    for n in range(6):
        assert (await desk.ask("start", **start))["status"] == ("duplicate" if n else "accepted")
        other = await desk.ask("start", **{**start, "command_id": unique("c"), "payload": {"other": LARGE}})
        assert other["code"] == "conflict"
    assert await desk.snapshots_of(ref_of(key)) == 1
