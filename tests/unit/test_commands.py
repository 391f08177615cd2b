"""The command service on ports in memory: every command gets one outcome, after what it says is stored."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.support.commands import LINEAGE, REF, fields_of
from tests.support.ids import stable_id
from tests.support.ring import T0_MS, Ring, play
from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import LineageKey, NameKey, TimerRef, derive_timer_ref
from timer_service.domain.machine import decide
from timer_service.domain.model import Absent, Phase, Timer
from timer_service.errors import Ambiguous, BrokerError, StorageFull, Unavailable
from timer_service.ports import Fill
from timer_service.runtime import commands as command_module
from timer_service.wire.commands import KINDS, BadCommand, Kind
from timer_service.wire.records import Outcome, encode, resume_of

Story = Callable[..., Coroutine[Any, Any, None]]
OTHER_REF = derive_timer_ref(NameKey("another"))
LINEAGE_REF = derive_timer_ref(LineageKey(**LINEAGE))
LATER = {"delay_ms": 3_600_000}
SOON = {"delay_ms": 10}


def played(*, flawless: bool = True, **settings: Any) -> Callable[[Story], Callable[..., None]]:
    """Make a test of a story on a ring of its own. A flawless story leaves no mistake in the log."""

    def decorate(story: Story) -> Callable[..., None]:
        async def run(**given: Any) -> None:
            async with Ring(**settings) as ring:
                await story(ring, **given)
                if flawless:
                    ring.sound()

        def test(**given: Any) -> None:
            play(run(**given))

        functools.update_wrapper(test, story)
        del test.__wrapped__  # type: ignore[attr-defined]
        signature = inspect.signature(story)
        parameters = [parameter for name, parameter in signature.parameters.items() if name != "ring"]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def fields(kind: Kind, **changes: Any) -> dict[str, Any]:
    """The fields of a command; version and id are left to the ring unless they are given."""
    return fields_of(kind, **{"v": ..., "command_id": ..., **changes})


async def ask(ring: Ring, kind: Kind, **changes: Any) -> Outcome:
    return await ring.ask(kind, **fields(kind, **changes))


def store(ring: Ring, kind: Kind, *, stored_at_ms: int, **changes: Any) -> int:
    """A command that the broker stored earlier and delivers only now."""
    ring._seq += 1
    seq = ring._seq
    body = json.dumps({"v": 1, "command_id": f"c-{seq}", **fields(kind, **changes)}).encode()
    headers = {"Durable-Timer-Reply": f"_INBOX.{seq}"}
    ring.queued[seq] = (f"durable_timer.commands.{kind}.v1", body, headers, stored_at_ms)
    ring.deliver(seq)
    return seq


async def told(ring: Ring, seq: int) -> Outcome:
    """The outcome of one command, which must be the only one."""
    await ring.until(lambda: ring.outcomes(seq), "its outcome")
    await ring.until(lambda: seq not in ring.queued, "its end")
    assert len(ring.outcomes(seq)) == 1
    return ring.outcomes(seq)[0]


def live(ring: Ring, ref: TimerRef = REF) -> Timer:
    timer = ring.state.peek(ref).timer
    assert timer is not None
    return timer


async def elapsed(ring: Ring, **changes: Any) -> Timer:
    """Start a timer, wait until it has elapsed, and read its resume."""
    outcome = await ask(ring, "start", **{"due": SOON, "max_retries": 5, **changes})
    assert outcome.timer_ref is not None
    assert outcome.generation is not None
    await ring.resume(TimerRef(outcome.timer_ref), outcome.generation)
    return live(ring, TimerRef(outcome.timer_ref))


def answer(timer: Timer) -> dict[str, Any]:
    return {"timer_ref": timer.timer_ref, "generation": timer.generation, "fence": timer.fence}


# ── every outcome ───────────────────────────────────────────────────────────────────────────────────────────


@played()
async def test_an_accepted_start(ring: Ring) -> None:
    """Its outcome describes the timer; the state is stored and armed."""
    outcome = await ask(ring, "start", due=LATER)
    due_at_ms = live(ring).due_at_ms
    assert outcome == Outcome("c-1", Status.ACCEPTED, None, None, REF, 0, 1, "waiting", due_at_ms)
    assert T0_MS + 3_600_000 <= due_at_ms <= T0_MS + 3_601_000
    assert ring.replicas[0].driver.get(REF) is not None
    assert ring.publicity.rejections == []


async def nothing(ring: Ring) -> None:
    """There is no timer."""


async def waits(ring: Ring) -> None:
    await ask(ring, "start", due=LATER, command_id="first")


async def waits_as_lineage(ring: Ring) -> None:
    await ask(ring, "start", due=LATER, timer=LINEAGE)


async def has_elapsed(ring: Ring) -> None:
    await elapsed(ring)


async def was_completed(ring: Ring) -> None:
    await ask(ring, "complete", **answer(await elapsed(ring)))
    await ring.settle()


async def was_completed_as_lineage(ring: Ring) -> None:
    await ask(ring, "complete", **answer(await elapsed(ring, timer=LINEAGE)))
    await ring.settle()


async def is_corrupt(ring: Ring) -> None:
    ring.state.overwrite(REF, b"{")


Prepare = Callable[[Ring], Coroutine[Any, Any, None]]
OUTCOMES: list[tuple[Prepare, Kind, dict[str, Any], Status, Code | None]] = [
    (nothing, "start", {"unknown": 1}, Status.REJECTED, Code.MALFORMED),
    (nothing, "start", {"v": 2}, Status.REJECTED, Code.UNSUPPORTED_VERSION),
    (nothing, "start", {"payload": "x" * 262_144}, Status.REJECTED, Code.TOO_LARGE),
    (nothing, "fail", {"message": "x" * 1_025}, Status.REJECTED, Code.TOO_LARGE),
    (nothing, "start", {"due": {"delay_ms": 0}}, Status.REJECTED, Code.INVALID_DUE),
    (nothing, "start", {"payload_sha256": "0" * 64}, Status.REJECTED, Code.HASH_MISMATCH),
    (nothing, "complete", {}, Status.REJECTED, Code.UNKNOWN_TIMER),
    (nothing, "retry", {}, Status.REJECTED, Code.UNKNOWN_TIMER),
    (nothing, "fail", {}, Status.REJECTED, Code.UNKNOWN_TIMER),
    (nothing, "cancel", {"wait_ms": 0}, Status.REJECTED, Code.UNKNOWN_TIMER),
    (waits, "start", {"command_id": "first", "due": LATER}, Status.DUPLICATE, None),
    (waits, "start", {"command_id": "first", "due": SOON}, Status.REJECTED, Code.CONFLICT),
    (waits, "start", {"if_exists": "reject"}, Status.REJECTED, Code.CONFLICT),
    (waits, "start", {"due": LATER}, Status.ACCEPTED, None),
    (waits, "complete", {}, Status.REJECTED, Code.NOT_ELAPSED),
    (waits, "complete", {"generation": 1}, Status.REJECTED, Code.STALE_GENERATION),
    (waits, "cancel", {"generation": 1}, Status.REJECTED, Code.STALE_GENERATION),
    (waits, "cancel", {"reason": "enough"}, Status.ACCEPTED, None),
    (waits_as_lineage, "start", {"timer": LINEAGE, "due": LATER}, Status.DUPLICATE, None),
    (waits_as_lineage, "start", {"timer": LINEAGE, "due": SOON}, Status.REJECTED, Code.CONFLICT),
    (has_elapsed, "complete", {"fence": 9}, Status.REJECTED, Code.STALE_FENCE),
    (has_elapsed, "complete", {}, Status.ACCEPTED, None),
    (has_elapsed, "retry", {}, Status.ACCEPTED, None),
    (has_elapsed, "fail", {}, Status.ACCEPTED, None),
    (has_elapsed, "cancel", {}, Status.ACCEPTED, Code.TOO_LATE),
    (was_completed, "complete", {}, Status.REJECTED, Code.ALREADY_TERMINAL),
    (was_completed, "cancel", {}, Status.REJECTED, Code.ALREADY_TERMINAL),
    (was_completed, "start", {}, Status.ACCEPTED, None),
    (was_completed_as_lineage, "start", {"timer": LINEAGE}, Status.REJECTED, Code.ALREADY_TERMINAL),
    *((is_corrupt, kind, {}, Status.REJECTED, Code.STATE_UNREADABLE) for kind in KINDS),
]


@pytest.mark.parametrize(("prepare", "kind", "changes", "status", "code"), OUTCOMES, ids=stable_id)
@played()
async def test_each_outcome(
    ring: Ring, prepare: Prepare, kind: Kind, changes: dict[str, Any], status: Status, code: Code | None
) -> None:
    """Status and code as the contract says; a rejection is recorded once, and changes nothing."""
    await prepare(ring)
    refs = (REF, LINEAGE_REF)
    before = {ref: ring.state._values.get(ref) for ref in refs}
    records = len(ring.publicity.rejections)
    seq = ring.send(kind, **fields(kind, **changes))
    outcome = await told(ring, seq)
    assert (outcome.status, outcome.code) == (status, code)
    assert ring.deliveries[seq] == 1
    if status is Status.REJECTED:
        (recorded,) = ring.publicity.rejections[records:]
        assert (recorded.kind, recorded.code, recorded.message) == (kind, code, outcome.message)
        assert (recorded.command_id, recorded.timer_ref) == (outcome.command_id, outcome.timer_ref)
        assert outcome.message
    else:
        assert len(ring.publicity.rejections) == records
    if status is not Status.ACCEPTED:
        assert {ref: ring.state._values.get(ref) for ref in refs} == before


@played()
async def test_a_duplicate_is_told_what_was_told_then(ring: Ring) -> None:
    """Also after the end and after a new start, with the timer as it is now."""
    timer = await elapsed(ring)
    late = {"timer_ref": REF, "command_id": "late"}
    assert (await ring.ask("cancel", **late)).code == Code.TOO_LATE
    await ask(ring, "retry", **answer(timer))
    await ring.settle()
    again = await ring.ask("cancel", **late)
    assert (again.status, again.code, again.phase) == (Status.DUPLICATE, Code.TOO_LATE, "cancelled")
    await ask(ring, "start", due=LATER)
    again = await ring.ask("cancel", **late)
    assert (again.status, again.code, again.phase, again.generation) == (Status.DUPLICATE, Code.TOO_LATE, "waiting", 1)


@played()
async def test_a_command_from_before_the_newest_is_superseded(ring: Ring) -> None:
    """Accepted with that code, recorded nowhere, and the timer stays as it is."""
    await ask(ring, "start", due=LATER)
    await asyncio.sleep(1)
    await ask(ring, "start", due=LATER, payload="newest")
    before = live(ring)
    for kind in ("start", "cancel"):
        outcome = await told(ring, store(ring, kind, stored_at_ms=ring.clock.now_ms() - 500))
        assert (outcome.status, outcome.code, outcome.generation) == (Status.ACCEPTED, Code.SUPERSEDED, 1)
    assert live(ring) == before
    assert ring.publicity.rejections == []


@played()
async def test_every_settled_command_is_counted(ring: Ring) -> None:
    """By kind, status and code."""
    await ask(ring, "start", due=LATER, command_id="a")
    await ask(ring, "start", due=LATER, command_id="a")
    await ask(ring, "complete")
    text = generate_latest(ring.replicas[0].metrics.registry).decode()
    for line in (
        'durable_timer_commands_total{code="",kind="start",status="accepted"} 1.0',
        'durable_timer_commands_total{code="",kind="start",status="duplicate"} 1.0',
        'durable_timer_commands_total{code="not_elapsed",kind="complete",status="rejected"} 1.0',
    ):
        assert line in text


# ── the order of storing, telling and settling ──────────────────────────────────────────────────────────────


def watch(ring: Ring) -> list[tuple[str, int, int, bool]]:
    """At each settling: how, how many rejections and outcomes there were, and whether the timer's state stood."""
    seen: list[tuple[str, int, int, bool]] = []
    usual = ring._on_settled

    def settled(delivery: Any) -> None:
        stood = ring.state.peek(REF).revision > 0
        seen.append((delivery.answers[-1], len(ring.publicity.rejections), len(ring.publicity.outcomes), stood))
        usual(delivery)

    ring._on_settled = settled  # type: ignore[method-assign]
    return seen


@played()
async def test_what_was_accepted_is_stored_before_it_is_settled(ring: Ring) -> None:
    """State, then outcome, then ack."""
    seen = watch(ring)
    await told(ring, ring.send("start", **fields("start", due=LATER)))
    assert seen == [("ack", 0, 1, True)]


@pytest.mark.parametrize("kind", ["start", "complete"])
@played()
async def test_a_rejection_is_stored_before_it_is_settled(ring: Ring, kind: Kind) -> None:
    """Whether it was refused on sight or by the state: record, outcome, ack."""
    seen = watch(ring)
    await told(ring, ring.send(kind, **fields(kind, **({"due": None} if kind == "start" else {}))))
    assert seen == [("ack", 1, 1, False)]


@pytest.mark.parametrize("kind", ["start", "complete"])
@played()
async def test_a_rejection_that_cannot_be_recorded_stays_queued(ring: Ring, kind: Kind) -> None:
    """It is given back without an outcome, and refused once it can be recorded."""
    seen = watch(ring)
    ring.publicity.fail_next(Unavailable("away"), times=2)
    await told(ring, ring.send(kind, **fields(kind, **({"due": None} if kind == "start" else {}))))
    assert seen == [("nak", 0, 0, False), ("nak", 0, 0, False), ("ack", 1, 1, False)]


# ── writes whose reply is lost ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "lost"])
@pytest.mark.parametrize(
    ("prepare", "kind", "phase", "code"),
    [
        (nothing, "start", Phase.WAITING, None),
        (waits, "start", Phase.WAITING, None),
        (waits, "cancel", Phase.CANCELLED, None),
        (has_elapsed, "retry", Phase.WAITING, None),
        (has_elapsed, "complete", Phase.COMPLETED, None),
        (has_elapsed, "fail", Phase.FAILED, None),
        (has_elapsed, "cancel", Phase.ELAPSED, Code.TOO_LATE),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
@played()
async def test_an_ambiguous_write_is_recognised_as_our_own(
    ring: Ring, prepare: Prepare, kind: Kind, phase: Phase, code: Code | None, stored: bool
) -> None:
    """By the command id in the state: accepted once, not a duplicate of itself, whether it was stored or not."""
    await prepare(ring)
    fence = ring.fences.get(REF, [(0, 0)])[-1][1]
    ring.state.fail_next(Ambiguous("no reply"), stored=stored)
    due = {"due": LATER} if phase is Phase.WAITING else {}
    outcome = await told(ring, ring.send(kind, **fields(kind, **due)))
    assert (outcome.status, outcome.code, outcome.phase) == (Status.ACCEPTED, code, phase)
    assert outcome.fence == (fence if code else fence + 1)
    await ring.settle()
    assert max(fence for _, fence in ring.fences[REF]) == outcome.fence
    assert len(ring.archive.records(REF)) == phase.ended


@played()
async def test_a_repetition_after_an_ambiguous_write_is_a_duplicate(ring: Ring) -> None:
    """Only the command whose write it was is told accepted."""
    ring.state.fail_next(Ambiguous("no reply"), stored=True)
    first = await ask(ring, "start", due=LATER, command_id="a")
    second = await ask(ring, "start", due=LATER, command_id="a")
    assert [first.status, second.status] == [Status.ACCEPTED, Status.DUPLICATE]


@played()
async def test_a_broker_that_stays_away_loses_nothing(ring: Ring) -> None:
    """After many tries the command is given back, and carried out when the broker is there again: once."""
    ring.state.fail_next(Unavailable("away"), times=40)
    seq = ring.send("start", **fields("start", due=LATER))
    outcome = await told(ring, seq)
    assert (outcome.status, outcome.generation) == (Status.ACCEPTED, 0)
    assert ring.deliveries[seq] > 1


# ── compare-and-set ─────────────────────────────────────────────────────────────────────────────────────────


def deafen(ring: Ring) -> None:
    """The replicas hear nothing of one another's writes any more: what they remember grows old."""
    ring.followers.clear()
    ring.state.on_written = lambda _ref, _revision: None


@played(replicas=2)
async def test_a_lost_comparison_is_decided_again(ring: Ring) -> None:
    """On a fresh reading, by the present timer; the replicas take turns and know nothing of one another."""
    deafen(ring)
    outcomes = [await ask(ring, "start", due=LATER) for _ in range(4)]
    assert [outcome.generation for outcome in outcomes] == [0, 1, 2, 3]
    cancelled = await ask(ring, "cancel")
    assert (cancelled.status, cancelled.generation, cancelled.fence) == (Status.ACCEPTED, 3, 5)


@played(replicas=2)
async def test_nothing_is_refused_from_memory(ring: Ring) -> None:
    """One replica remembers the timer waiting; the other saw it elapse. Its answer is taken by either."""
    await ask(ring, "start", due={"delay_ms": 1_000})
    deafen(ring)
    first, second = ring.replicas
    first.driver.disarm(REF, 10**9)
    await ring.resume(REF, 0)
    timer = live(ring)
    ring._turn = iter([0, 0, 0, 0, 0, 0])  # type: ignore[assignment]
    outcome = await ask(ring, "complete", **answer(timer))
    assert (outcome.status, outcome.phase) == (Status.ACCEPTED, "completed")
    assert second.driver.holds_lease


@played(replicas=2)
async def test_two_replicas_and_one_command(ring: Ring) -> None:
    """Delivered to both at once it takes effect once; one of them says duplicate."""
    seq = ring.send("start", **fields("start", due=LATER))
    ring.deliver(seq)
    await ring.until(lambda: len(ring.outcomes(seq)) == 2, "both outcomes")
    assert sorted(outcome.status for outcome in ring.outcomes(seq)) == [Status.ACCEPTED, Status.DUPLICATE]
    assert live(ring).generation == 0
    assert len(live(ring).receipts) == 1


@played()
async def test_a_second_delivery_of_what_is_in_hand(ring: Ring) -> None:
    """It is put off: the first settles the command, and there is one outcome."""
    ring.state.fail_next(Unavailable("away"), times=3)
    seq = ring.send("start", **fields("start", due=LATER))
    for _ in range(5):
        ring.deliver(seq)
    outcome = await told(ring, seq)
    await asyncio.sleep(10)
    assert ring.outcomes(seq) == [outcome]
    assert outcome.status is Status.ACCEPTED


@played()
async def test_commands_of_one_timer_wait_for_one_another_and_for_nobody_else(ring: Ring) -> None:
    """A slow write of one timer holds up its own later commands, in their order, and no other timer."""
    usual = ring.state.put

    async def put(timer: Timer, expected: int) -> int:
        if timer.timer_ref == REF:
            await asyncio.sleep(10)
        return await usual(timer, expected)

    ring.state.put = put  # type: ignore[method-assign]
    slow = [ring.send("start", **fields("start", due=LATER)), ring.send("cancel", **fields("cancel"))]
    quick = await ask(ring, "start", timer={"name": "another"}, due=LATER)
    assert quick.status is Status.ACCEPTED
    assert ring.clock.now_ms() - T0_MS < 1_000
    assert (await told(ring, slow[0])).phase == "waiting"
    assert ring.outcomes(slow[1]) == []
    assert (await told(ring, slow[1])).phase == "cancelled"


# ── cancels before their start ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("wait_ms", "least", "most"), [(0, 0, 50), (None, 5_000, 6_000), (10_000, 10_000, 11_000)])
@played()
async def test_a_cancel_of_an_unknown_timer_waits(ring: Ring, wait_ms: int | None, least: int, most: int) -> None:
    """For as long as it says; then it is refused."""
    outcome = await ask(ring, "cancel", wait_ms=wait_ms)
    assert (outcome.status, outcome.code) == (Status.REJECTED, Code.UNKNOWN_TIMER)
    assert least <= ring.clock.now_ms() - T0_MS <= most


@played()
async def test_a_start_that_was_under_way_is_cancelled(ring: Ring) -> None:
    """Stored before the cancel and delivered after it: the cancel is decided again at once."""
    cancel = ring.send("cancel", **fields("cancel", wait_ms=10_000))
    await asyncio.sleep(1)
    start = store(ring, "start", stored_at_ms=T0_MS - 5, due=LATER)
    assert (await told(ring, start)).phase == "waiting"
    outcome = await told(ring, cancel)
    assert (outcome.status, outcome.code, outcome.phase) == (Status.ACCEPTED, None, "cancelled")
    assert ring.clock.now_ms() - T0_MS < 2_000
    await ring.settle()
    assert [record.status for record in ring.archive.records(REF)] == ["cancelled"]


@played()
async def test_a_start_from_after_the_cancel_lives(ring: Ring) -> None:
    """Commands take effect in the order in which they were stored: the cancel is the older one."""
    cancel = ring.send("cancel", **fields("cancel", wait_ms=10_000))
    await asyncio.sleep(1)
    await ask(ring, "start", due=LATER)
    outcome = await told(ring, cancel)
    assert (outcome.status, outcome.code, outcome.phase) == (Status.ACCEPTED, Code.SUPERSEDED, "waiting")


@played(replicas=2)
async def test_a_start_through_another_replica_is_noticed(ring: Ring) -> None:
    """The feed shows it to the one whose cancel waits."""
    cancel = ring.send("cancel", **fields("cancel", wait_ms=10_000))
    await asyncio.sleep(1)
    await told(ring, store(ring, "start", stored_at_ms=T0_MS - 5, due=LATER))
    assert (await told(ring, cancel)).phase == "cancelled"
    assert ring.clock.now_ms() - T0_MS < 2_000


@played()
async def test_waiting_cancels_are_handed_back_at_a_stop(ring: Ring) -> None:
    """Without an outcome: another replica takes them on."""
    cancel = ring.send("cancel", **fields("cancel", wait_ms=10_000))
    await asyncio.sleep(1)
    await ring.replicas[0].commands.stop()
    await ring.until(lambda: ring.deliveries[cancel] == 2, "its next delivery")
    assert ring.outcomes(cancel) == []
    assert (await told(ring, cancel)).code == Code.UNKNOWN_TIMER


# ── reply subjects ──────────────────────────────────────────────────────────────────────────────────────────

FORBIDDEN = [
    "", "_INBOX", "durable_timer.commands.start.v1", "$JS.API.STREAM.DELETE.KV_DURABLE_TIMER_STATE", "_inbox.a",
    "_INBOX.*", "_INBOX.>", "_INBOX.a.>", "_INBOX.a b", "_INBOX..a", "_INBOX.a.", "_INBOX.", "_INBOX.a\r\nPUB x 0",
    "_INBOX.é", "_INBOX." + "a" * 1_000,
]  # fmt: skip


@pytest.mark.parametrize("reply_to", FORBIDDEN, ids=lambda text: ascii(text)[:30])
@pytest.mark.parametrize("kind", ["start", "complete"])
@played()
async def test_a_reply_subject_that_is_not_allowed(ring: Ring, kind: Kind, reply_to: str) -> None:
    """It is ignored and counted; the command takes its course."""
    body = json.dumps(fields_of(kind, **({"due": LATER} if kind == "start" else {}))).encode()
    seq = ring.publish(f"durable_timer.commands.{kind}.v1", body, {"Durable-Timer-Reply": reply_to})
    await ring.until(lambda: seq not in ring.queued, "its end")
    assert ring.publicity.outcomes == []
    assert ring.replicas[0].metrics.replies_ignored == 1
    assert (ring.state.peek(REF).timer is not None) == (kind == "start")
    assert len(ring.publicity.rejections) == (kind == "complete")


@played()
async def test_nobody_is_told_who_does_not_ask(ring: Ring) -> None:
    """Without the header there is no outcome, and nothing is counted."""
    seq = ring.publish("durable_timer.commands.start.v1", json.dumps(fields_of("start", due=LATER)).encode(), {})
    await ring.until(lambda: seq not in ring.queued, "its end")
    assert (ring.publicity.outcomes, ring.replicas[0].metrics.replies_ignored) == ([], 0)
    assert live(ring).generation == 0


# ── poison ──────────────────────────────────────────────────────────────────────────────────────────────────

POISON: list[tuple[str, bytes, str]] = [
    ("durable_timer.commands.start.v1", b"", "start"),
    ("durable_timer.commands.start.v1", b"\xff\x00\xfe", "start"),
    ("durable_timer.commands.start.v1", b"[" * 100_000, "start"),
    ("durable_timer.commands.start.v1", b'{"v":' + b"9" * 5_000 + b"}", "start"),
    ("durable_timer.commands.start.v9", b"{}", "start"),
    ("durable_timer.commands.begin.v1", b"{}", "unknown"),
    ("durable_timer.commands.x", b"{}", "unknown"),
    ("durable_timer.commands.cancel.v1", b'{"v":1,"' + b"k" * 200_000 + b'":1}', "cancel"),
    ("durable_timer.commands.start.v1", b'"' + b"\\u0001" * 40_000 + b'"', "start"),
]


@pytest.mark.parametrize(("subject", "body", "kind"), POISON, ids=lambda part: ascii(part)[:40])
@played()
async def test_a_poison_message_is_settled(ring: Ring, subject: str, body: bytes, kind: str) -> None:
    """At its first delivery, recorded in small, and the next command is handled."""
    seq = ring.publish(subject, body)
    outcome = await told(ring, seq)
    assert outcome.status is Status.REJECTED
    assert (outcome.generation, outcome.fence, outcome.phase, outcome.due_at_ms) == (None, None, None, None)
    assert ring.deliveries[seq] == 1
    (record,) = ring.publicity.rejections
    assert record.kind == kind
    assert len(encode(record)) < 32_768
    assert (await ask(ring, "start", due=LATER)).status is Status.ACCEPTED


@played()
async def test_much_poison_holds_up_nobody(ring: Ring) -> None:
    """A thousand of them, and one start in the middle."""
    seqs = [ring.publish("durable_timer.commands.fail.v1", b"{" * (n % 7)) for n in range(500)]
    start = ring.send("start", **fields("start", due=LATER))
    seqs += [ring.publish("durable_timer.commands.fail.v1", b"{" * (n % 7)) for n in range(500)]
    assert (await told(ring, start)).status is Status.ACCEPTED
    await ring.settle()
    assert [len(ring.outcomes(seq)) for seq in seqs] == [1] * 1_000
    assert len(ring.publicity.rejections) == 1_000


@played(flawless=False)
async def test_a_mistake_of_ours_in_reading_strands_nothing(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged; the message is refused and settled."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(command_module, "read_command", broken)
    outcome = await told(ring, ring.send("start", **fields("start")))
    assert outcome.code == Code.MALFORMED
    assert len(ring.log.mistakes) == 1


@played(flawless=False)
async def test_a_mistake_of_ours_in_deciding_strands_nothing(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged; the command is given back and carried out later, and its lane goes on."""
    calls: list[Any] = []

    def broken_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise ZeroDivisionError
        return decide(*given)

    monkeypatch.setattr(command_module, "decide", broken_once)
    start = ring.send("start", **fields("start", due=LATER))
    other = ring.send("start", **fields("start", due=LATER, payload="second"))
    assert (await told(ring, other)).generation == 0
    assert (await told(ring, start)).code == Code.SUPERSEDED
    assert len(ring.log.mistakes) == 1


# ── what can't be read ──────────────────────────────────────────────────────────────────────────────────────


@played()
async def test_an_unreadable_state_is_left_alone(ring: Ring) -> None:
    """It is one problem however often it is met; other timers go on, and so does this one once it is mended."""
    await ask(ring, "start", due=LATER)
    good = encode(live(ring))
    ring.state.overwrite(REF, b"garbage")
    for kind in KINDS:
        outcome = await ask(ring, kind)
        assert (outcome.code, outcome.timer_ref, outcome.phase) == (Code.STATE_UNREADABLE, REF, None)
    assert ring.state._values[REF][0] == b"garbage"
    assert len(ring.replicas[0].problems) == 1
    assert (await ask(ring, "start", timer={"name": "another"}, due=LATER)).status is Status.ACCEPTED
    ring.state.overwrite(REF, good)
    assert (await ask(ring, "cancel")).phase == "cancelled"
    assert len(ring.replicas[0].problems) == 0


# ── room ────────────────────────────────────────────────────────────────────────────────────────────────────


def close_admission(ring: Ring, *, queue_percent: int = 0) -> None:
    ring.replicas[0].admission.update({"state": Fill(60, 100)}, Fill(queue_percent, 100))


def open_admission(ring: Ring) -> None:
    ring.replicas[0].admission.update({"state": Fill(10, 10**9)}, Fill(0, 100))


@played()
async def test_a_start_without_room_is_held(ring: Ring) -> None:
    """It stays queued without an outcome until there is room; what lives goes on meanwhile."""
    timer = await elapsed(ring)
    close_admission(ring)
    start = ring.send("start", **fields("start", timer={"name": "another"}, due=LATER))
    await asyncio.sleep(60)
    assert ring.outcomes(start) == []
    assert start in ring.queued
    assert (await ask(ring, "retry", **answer(timer), due=LATER)).status is Status.ACCEPTED
    assert (await ask(ring, "cancel", wait_ms=0)).phase == "cancelled"
    open_admission(ring)
    outcome = await told(ring, start)
    assert (outcome.status, outcome.generation) == (Status.ACCEPTED, 0)


@played()
async def test_a_start_is_refused_when_its_queue_fills_up(ring: Ring) -> None:
    """Admission closed, and the command stream more than half full: ``storage_full``. At half it is still held."""
    close_admission(ring, queue_percent=50)
    start = ring.send("start", **fields("start"))
    await asyncio.sleep(10)
    assert ring.outcomes(start) == []
    close_admission(ring, queue_percent=51)
    assert (await told(ring, start)).code == Code.STORAGE_FULL
    assert ring.state.peek(REF).revision == 0


@played()
async def test_a_known_start_is_not_held(ring: Ring) -> None:
    """It takes no room: duplicates and conflicts are told without any."""
    await ask(ring, "start", due=LATER, command_id="a")
    close_admission(ring, queue_percent=90)
    assert (await ask(ring, "start", due=LATER, command_id="a")).status is Status.DUPLICATE
    assert (await ask(ring, "start", due=SOON, command_id="a")).code == Code.CONFLICT


@played()
async def test_a_cancel_stays_behind_its_held_start(ring: Ring) -> None:
    """The start waits longer than the cancel would: neither is lost, and the cancel wins in the end."""
    close_admission(ring)
    start = ring.send("start", **fields("start", due=LATER))
    await asyncio.sleep(1)
    cancel = ring.send("cancel", **fields("cancel", wait_ms=0))
    await asyncio.sleep(30)
    assert ring.outcomes(cancel) == []
    open_admission(ring)
    assert (await told(ring, start)).phase == "waiting"
    assert (await told(ring, cancel)).phase == "cancelled"


@pytest.mark.parametrize(("prepare", "kind"), [(nothing, "start"), (waits, "cancel"), (has_elapsed, "complete")])
@played()
async def test_a_broker_without_room(ring: Ring, prepare: Prepare, kind: Kind) -> None:
    """What it refuses for want of room stays queued, and is carried out when there is some."""
    await prepare(ring)
    ring.state.fail_next(StorageFull("full"), times=3)
    seq = ring.send(kind, **fields(kind, **({"due": LATER} if kind == "start" else {})))
    outcome = await told(ring, seq)
    assert outcome.status is Status.ACCEPTED
    assert ring.deliveries[seq] == 4


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1_022, 1_023])
@played()
async def test_a_large_payload_is_kept_beside_the_state(ring: Ring, size: int) -> None:
    """Over 1,024 bytes of JSON (two are the quotes); smaller ones travel in the state. Handed back either way."""
    payload = "x" * size
    timer = await elapsed(ring, payload=payload)
    large = size > 1_022
    assert (timer.snapshot_seq is not None, isinstance(timer.payload, Absent)) == (large, large)
    assert len(ring.snapshots) == large
    await ask(ring, "complete", **answer(timer))
    await ring.settle()
    assert len(ring.snapshots) == 0


@played()
async def test_a_replacement_drops_the_payload_before_it(ring: Ring) -> None:
    """And keeps its own."""
    await ask(ring, "start", due=LATER, payload="x" * 2_000)
    await ask(ring, "start", due=LATER, payload="y" * 2_000)
    assert len(ring.snapshots) == 1
    seq = live(ring).snapshot_seq
    assert seq is not None
    assert bytes(await ring.snapshots.get(seq)) == b'"' + b"y" * 2_000 + b'"'


@played()
async def test_a_start_stores_its_payload_once(ring: Ring) -> None:
    """However often its state has to be written."""
    for _ in range(3):
        ring.state.fail_next(Ambiguous("no reply"))
        ring.state.fail_next(Unavailable("away"))
    await ask(ring, "start", due=LATER, payload="x" * 2_000)
    assert (ring.snapshots.calls, len(ring.snapshots)) == (1, 1)


@pytest.mark.parametrize("size", [100, 1_000, 20_000, 38_000, 38_500, 39_000, 39_200, 39_500, 39_900, 41_000])
@played(max_payload=40_000)
async def test_no_start_is_taken_whose_resume_would_be_too_large(ring: Ring, size: int) -> None:
    """Judged at admission: what is taken fits the broker with everything around it, what is refused would not."""
    outcome = await ask(ring, "start", timer=LINEAGE, due=SOON, payload="x" * size)
    if outcome.status is Status.REJECTED:
        assert outcome.code == Code.TOO_LARGE
        assert size > 38_000
        assert len(ring.snapshots) == 0
        return
    resume = await ring.resume(LINEAGE_REF, 0)
    timer = live(ring, LINEAGE_REF)
    assert resume == resume_of(timer, resume.payload)
    assert len(encode(resume)) <= 40_000
    assert size < 39_900


# ── ends and new beginnings ─────────────────────────────────────────────────────────────────────────────────


@played()
async def test_an_end_is_archived_and_removed(ring: Ring) -> None:
    """One record with the receipt in it, then a marker with generation and fence; nothing is armed any more."""
    outcome = await ask(ring, "complete", **answer(await elapsed(ring)))
    await ring.settle()
    (record,) = ring.archive.records(REF)
    assert (record.status, record.receipts[-1].command_id) == (Phase.COMPLETED, outcome.command_id)
    marker = ring.state.marker(REF)
    assert marker is not None
    assert (marker.generation, marker.fence) == (0, 3)
    assert ring.replicas[0].driver.get(REF) is None


ADAPTERS: list[tuple[str, str]] = [("archive", "append"), ("state", "remove")]


@pytest.mark.parametrize("error", [Ambiguous("no reply"), Unavailable("away"), StorageFull("full")], ids=ascii)
@pytest.mark.parametrize(("port", "method"), ADAPTERS)
@played()
async def test_an_end_that_was_interrupted_is_finished(ring: Ring, port: str, method: str, error: BrokerError) -> None:
    """Whichever step failed: the end stands, its publisher was told, and a moment later the rest is done, once."""
    timer = await elapsed(ring)
    fail_next_call(getattr(ring, port), method, error)
    assert (await ask(ring, "complete", **answer(timer))).phase == "completed"
    await ring.settle()
    assert len(ring.archive.records(REF)) == 1
    assert ring.state.marker(REF) is not None


def fail_next_call(adapter: Any, method: str, error: BrokerError) -> None:
    usual = getattr(adapter, method)

    async def once(*given: Any) -> Any:
        setattr(adapter, method, usual)
        raise error

    setattr(adapter, method, once)


@played()
async def test_a_start_finishes_the_end_before_it(ring: Ring) -> None:
    """It meets an ended entry that is neither archived nor removed: the archive comes first, then the next life."""
    timer = await elapsed(ring)
    fail_next_call(ring.archive, "append", Unavailable("away"))
    await ask(ring, "fail", **answer(timer), message="why")
    again = await ask(ring, "start", due=LATER)
    assert (again.status, again.generation, again.fence) == (Status.ACCEPTED, 1, 4)
    (record,) = ring.archive.records(REF)
    assert (record.generation, record.status, record.message) == (0, Phase.FAILED, "why")
    assert live(ring).archive_seq == 1
    await ask(ring, "cancel")
    await ring.settle()
    assert [record.generation for record in ring.archive.records(REF)] == [0, 1]


@played()
async def test_a_duplicate_finishes_the_end_it_repeats(ring: Ring) -> None:
    """An answer sent again after a crash between receipt and archive."""
    timer = await elapsed(ring)
    fail_next_call(ring.archive, "append", Unavailable("away"))
    await ask(ring, "complete", **answer(timer), command_id="done")
    assert (await ask(ring, "complete", **answer(timer), command_id="done")).status is Status.DUPLICATE
    await ring.until(lambda: ring.state.peek(REF).timer is None, "its removal", within_s=0.5)
    assert len(ring.archive.records(REF)) == 1


@pytest.mark.parametrize("markers", ["standing", "run out"])
@pytest.mark.parametrize("memory", ["warm", "cold"])
@played()
async def test_the_archive_is_the_memory_of_the_ended(ring: Ring, markers: str, memory: str) -> None:
    """A name goes on with the next generation and fence, and knows its old commands, with and without a marker."""
    await ask(ring, "complete", **answer(await elapsed(ring)), command_id="done")
    await ring.settle()
    if markers == "run out":
        ring.state.expire_markers()
    if memory == "cold":
        ring.replicas[0].archived.complete = False
    again = await ask(ring, "start", due=LATER)
    assert (again.status, again.generation, again.fence) == (Status.ACCEPTED, 1, 4)
    assert live(ring).archive_seq == (await ring.archive.last(REF)).revision
    assert (await ask(ring, "complete", command_id="done")).status is Status.DUPLICATE


@pytest.mark.parametrize("markers", ["standing", "run out"])
@played()
async def test_an_ended_lineage_stays_ended(ring: Ring, markers: str) -> None:
    """As long as its archive record exists, and whatever is asked."""
    await ask(ring, "complete", **answer(await elapsed(ring, timer=LINEAGE)))
    await ring.settle()
    if markers == "run out":
        ring.state.expire_markers()
    for if_exists in ("reject", "replace"):
        outcome = await ask(ring, "start", timer=LINEAGE, if_exists=if_exists)
        assert (outcome.code, outcome.generation, outcome.phase) == (Code.ALREADY_TERMINAL, 0, "completed")


@played()
async def test_after_the_archives_age_a_timer_is_unknown(ring: Ring) -> None:
    """Marker and record have run out: it begins as if it had never been."""
    await ask(ring, "complete", **answer(await elapsed(ring)))
    await ring.settle()
    ring.state.expire_markers()
    ring.archive.expire(REF)
    ring.fences.clear()  # so they may begin anew, too
    assert (await ask(ring, "complete")).code == Code.UNKNOWN_TIMER
    outcome = await ask(ring, "start", due=LATER)
    assert (outcome.status, outcome.generation, outcome.fence) == (Status.ACCEPTED, 0, 1)


def test_nothing_else_is_raised_for_a_publisher():
    """``BadCommand`` is not for outcomes: it never leaves the service."""
    assert not issubclass(BadCommand, BrokerError)
