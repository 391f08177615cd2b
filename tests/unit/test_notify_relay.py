"""The relay: claims, hands off, feeds back, backs off, survives and gives back. On the outbox in memory."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from notify_consumer import Context, Handlers, Resume, done, fail, retry
from notify_consumer.errors import OutboxUnavailable
from notify_consumer.outbox.base import Outbox, Row, State, Survey
from notify_consumer.policy import Policy
from notify_consumer.relay import Relay
from notify_consumer.testing import MemoryOutbox
from tests.support.notify import FakeSender, new_row, outcome, rejected, resume_body, until
from timer_service.clock import ManualClock
from timer_service.domain.codes import Status
from timer_service.errors import NotStored, OutcomeUnknown

QUICK = Policy(lease_ms=60_000, backoff_initial_ms=1, backoff_max_ms=4, grace_ms=20_000)
SLOW_BACKOFF = Policy(lease_ms=60_000, backoff_initial_ms=60_000, backoff_max_ms=60_000, grace_ms=20_000)
SHORT_LEASE = Policy(lease_ms=150, backoff_initial_ms=1, backoff_max_ms=4, grace_ms=20_000)
KEPT_LEASE = Policy(lease_ms=2_000, backoff_initial_ms=1, backoff_max_ms=4, grace_ms=20_000)
"""Where nobody is to take it while it is renewed: a busy machine must not stop the process for two thirds of it."""


class Stage:
    """An outbox, handlers and a sender, and the relays started on them."""

    def __init__(self) -> None:
        self.outbox: MemoryOutbox = MemoryOutbox()
        self.handlers = Handlers()
        self.sender = FakeSender()
        self.tasks: dict[Relay, asyncio.Task[None]] = {}

    def start(self, policy: Policy = QUICK, *, outbox: Outbox | None = None) -> Relay:
        owner = f"relay-{len(self.tasks)}"
        relay = Relay(outbox or self.outbox, self.handlers, self.sender, owner=owner, policy=policy)
        self.tasks[relay] = asyncio.create_task(relay.run())
        return relay

    async def put(self, *names: str, lane: str = "x", **fields: Any) -> None:
        """Insert resumes and wake the relays, as the consumer does."""
        await self.outbox.insert([new_row(name, lane=lane, **fields) for name in names])
        for relay in self.tasks:
            relay.wake()

    async def stop(self, relay: Relay) -> None:
        relay.stop()
        await self.tasks[relay]

    async def crash(self, relay: Relay) -> None:
        """End a relay as SIGKILL would: nothing is written any more."""
        self.tasks[relay].cancel()
        await asyncio.gather(self.tasks[relay], return_exceptions=True)
        await until(lambda: not relay.handling and not relay.sending)

    async def row(self, name: str = "a") -> Row:
        row = await self.outbox.get(resume_body(name)["resume_id"])
        assert row is not None
        return row

    async def reaches(self, state: State, name: str = "a") -> Row:
        async def there() -> bool:
            return (await self.row(name)).state is state

        await until(there, f"{name} is {state}")
        return await self.row(name)

    async def errs(self, text: str, name: str = "a") -> Row:
        """Wait until the row is given back with an error like ``text``."""

        async def there() -> bool:
            row = await self.row(name)
            return row.owner is None and text in (row.last_error or "")

        await until(there, f"{name} fails with {text}")
        return await self.row(name)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)


# -- the way through ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"), [(done(), "complete"), (None, "complete"), (retry(7), "retry"), (fail("no"), "fail")]
)
async def test_an_answer_is_fed_back(stage: Stage, answer: Any, kind: str) -> None:
    """A resume goes to its handler, the answer to the timer service, and the row is done."""
    seen: list[Resume] = []

    @stage.handlers.default
    async def handler(resume: Resume) -> Any:
        seen.append(resume)
        return answer

    stage.start()
    await stage.put("a")
    row = await stage.reaches(State.DONE)
    assert [resume.resume_id for resume in seen] == [row.resume_id]
    assert seen[0].payload == {"n": 1}
    ((sent_kind, body),) = stage.sender.sent
    assert (sent_kind, body["command_id"]) == (kind, f"notify:{row.resume_id}")
    assert row.settled == "accepted"


async def test_the_answer_is_stored_before_it_is_sent(stage: Stage) -> None:
    """When the feedback goes out the row says what it is: a crash from here on does not ask the handler again."""
    stage.handlers.default(lambda resume: retry(7))
    stage.sender.open.clear()
    stage.start()
    await stage.put("a")
    await until(lambda: stage.sender.sent)
    row = await stage.row()
    assert row.state is State.ANSWERED
    assert row.feedback is not None
    assert row.feedback.body == stage.sender.sent[0][1]


async def test_what_was_there_before_the_start_is_taken_up(stage: Stage) -> None:
    """Nothing depends on a wake: rows from before are found at the start."""
    stage.handlers.default(lambda resume: None)
    await stage.put("a")
    stage.start()
    await stage.reaches(State.DONE)


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the periodic look at the outbox came once an hour."""
    monkeypatch.setattr("notify_consumer.relay.POLL_S", 3_600)


@pytest.mark.usefixtures("no_poll")
async def test_a_freed_slot_is_used_at_once(stage: Stage) -> None:
    """The end of a hand-off is what lets the next one begin."""
    stage.handlers.default(lambda resume: None)
    stage.start(Policy(concurrency=1))
    await stage.put(*(f"r{n}" for n in range(20)))
    await stage_empties(stage, 20)


@pytest.mark.usefixtures("no_poll")
async def test_a_backoff_that_is_over_is_noticed(stage: Stage) -> None:
    """The relay knows when the next row can be claimed, and looks then."""
    calls: list[int] = []

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(1)
        if len(calls) < 4:
            raise RuntimeError("boom")

    stage.start(Policy(backoff_initial_ms=20, backoff_max_ms=20))
    await stage.put("a")
    await stage.reaches(State.DONE)


@pytest.mark.usefixtures("no_poll")
async def test_a_lease_that_ran_out_is_noticed(stage: Stage) -> None:
    """A dead process's claim is taken up when its lease ends, known from the store."""
    stage.handlers.default(lambda resume: None)
    await stage.put("a")
    await stage.outbox.claim("dead", {"x": 1}, 100)
    stage.start()
    assert (await stage.reaches(State.DONE)).attempts == 2


# -- what the timer service says ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["stale_generation", "stale_fence", "already_terminal", "unknown_timer"])
async def test_feedback_that_came_too_late_is_done(stage: Stage, code: str) -> None:
    """Where the occurrence is over there is nothing to say any more; the row records why."""
    stage.handlers.default(lambda resume: None)
    stage.sender.reply = rejected(code)
    stage.start()
    await stage.put("a")
    assert (await stage.reaches(State.DONE)).settled == code
    assert len(stage.sender.sent) == 1


@pytest.mark.parametrize("code", ["invalid_due", "conflict", "malformed", "not_elapsed", "state_unreadable"])
async def test_feedback_that_is_refused_is_dead(stage: Stage, code: str) -> None:
    """Any other rejection puts the row aside, visibly, with the reason; it is not sent again."""
    stage.handlers.default(lambda resume: None)
    stage.sender.reply = rejected(code)
    stage.start()
    await stage.put("a")
    row = await stage.reaches(State.DEAD)
    assert code in (row.last_error or "")
    assert row.feedback is not None
    assert len(stage.sender.sent) == 1


async def test_a_duplicate_is_as_good_as_accepted(stage: Stage) -> None:
    """A feedback that the service knows already is settled."""
    stage.handlers.default(lambda resume: None)
    stage.sender.reply = outcome(Status.DUPLICATE)
    stage.start()
    await stage.put("a")
    assert (await stage.reaches(State.DONE)).settled == "duplicate"


@pytest.mark.parametrize("error", [OutcomeUnknown("c", "t"), NotStored("no stream"), RuntimeError("a bug")])
async def test_feedback_that_was_not_heard_is_repeated(stage: Stage, error: Exception) -> None:
    """The same feedback goes out again and again until its outcome is known; the handler is not asked again."""
    calls: list[str] = []
    stage.handlers.default(lambda resume: calls.append(resume.resume_id))
    stage.sender.reply = error
    stage.start(SHORT_LEASE)
    await stage.put("a")
    await until(lambda: len(stage.sender.sent) >= 3)
    assert (await stage.row()).state is State.ANSWERED
    stage.sender.reply = outcome()
    await stage.reaches(State.DONE)
    assert len(calls) == 1
    assert len({str(body) for _, body in stage.sender.sent}) == 1


async def test_an_absent_timer_service_does_not_stop_handlers(stage: Stage) -> None:
    """Feedback on its way takes no handler's slot: with every answer unheard, all handlers still run."""
    calls: list[str] = []
    stage.handlers.default(lambda resume: calls.append(resume.resume_id))
    stage.sender.open.clear()
    stage.start(Policy(concurrency=2))
    await stage.put(*(f"r{n}" for n in range(40)))
    await until(lambda: len(calls) == 40)


async def test_the_number_of_feedbacks_on_their_way_is_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers beyond the limit wait in the outbox, not in memory, and go out when there is room."""
    monkeypatch.setattr("notify_consumer.relay.SENDING_LIMIT", 3)
    calls: list[str] = []
    stage.handlers.default(lambda resume: calls.append(resume.resume_id))
    stage.sender.open.clear()
    relay = stage.start()
    await stage.put(*(f"r{n}" for n in range(20)))
    await until(lambda: len(calls) == 20 and not relay.handling)
    assert len(stage.sender.sent) == 3
    stage.sender.open.set()
    await stage_empties(stage, 20)
    assert len(stage.sender.sent) == 20


async def stage_empties(stage: Stage, count: int) -> None:
    async def all_done() -> bool:
        return (await stage.outbox.counts())[State.DONE] == count

    await until(all_done, f"{count} rows are done")


# -- failures -------------------------------------------------------------------------------------------------


async def test_a_failed_hand_off_is_repeated_until_it_works(stage: Stage) -> None:
    """An exception gives the row back, and it comes again; no failure is final without max_attempts."""
    calls: list[int] = []

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(1)
        if len(calls) < 6:
            raise RuntimeError(f"boom {len(calls)}")

    stage.start()
    await stage.put("a")
    row = await stage.reaches(State.DONE)
    assert (row.attempts, row.last_error) == (6, None)


async def test_backoff_doubles_up_to_its_maximum() -> None:
    """3, 6, 12, 24, 30, 30 … seconds with the default settings, for any number of attempts."""
    policy = Policy()
    assert [policy.delay_ms(n) for n in range(1, 8)] == [3_000, 6_000, 12_000, 24_000, 30_000, 30_000, 30_000]
    assert policy.delay_ms(10**6) == 30_000


async def test_a_failure_is_kept_in_the_row(stage: Stage) -> None:
    """What the handler raised can be read in the outbox while the row waits."""

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        raise RuntimeError("boom")

    stage.start(SLOW_BACKOFF)
    await stage.put("a")
    row = await stage.errs("RuntimeError: boom")
    assert (row.state, row.attempts) == (State.PENDING, 1)
    assert not stage.sender.sent


async def test_a_resume_without_a_handler_waits_for_one(stage: Stage) -> None:
    """No match is a failure that says what is missing; when a handler is there the resume goes to it."""
    stage.handlers.flow("something else")(lambda resume: None)
    stage.start()
    await stage.put("a")
    await stage.errs("no handler for x")
    stage.handlers.default(lambda resume: None)
    await stage.reaches(State.DONE)


async def test_after_max_attempts_the_row_is_dead(stage: Stage) -> None:
    """With max_attempts the last failure puts the row aside, and it is not handed off again."""
    calls: list[int] = []

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(1)
        raise RuntimeError("boom")

    stage.start(Policy(backoff_initial_ms=1, backoff_max_ms=1, max_attempts=3))
    await stage.put("a")
    row = await stage.reaches(State.DEAD)
    assert len(calls) == 3
    assert "attempt 3, the last one: RuntimeError: boom" in (row.last_error or "")


async def test_attempts_that_die_with_the_process_count(stage: Stage) -> None:
    """A resume that brings its process down is not handed off more often than max_attempts either."""
    never = asyncio.Event()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        await never.wait()

    policy = Policy(lease_ms=50, max_attempts=1)
    relay = stage.start(policy)
    await stage.put("a")
    await until(lambda: relay.handling)
    await stage.crash(relay)
    stage.start(policy)
    row = await stage.reaches(State.DEAD)
    assert "ended without an answer" in (row.last_error or "")


async def test_a_body_that_became_unreadable_is_dead(stage: Stage) -> None:
    """A row whose body can't be read (an older program wrote it) is put aside instead of tried for ever."""
    stage.handlers.default(lambda resume: None)
    row = new_row("a")
    await stage.outbox.insert([type(row)(row.resume_id, "x", b"{}")])
    stage.start()
    assert "unreadable" in ((await stage.reaches(State.DEAD)).last_error or "")


# -- crashes --------------------------------------------------------------------------------------------------


async def test_a_crash_during_the_hand_off_repeats_it(stage: Stage) -> None:
    """When the process dies before the answer is stored, the next owner hands the same resume off again."""
    calls: list[str] = []
    hang = asyncio.Event()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        if len(calls) == 1:
            await hang.wait()

    first = stage.start(SHORT_LEASE)
    await stage.put("a")
    await until(lambda: calls)
    await stage.crash(first)
    stage.start(SHORT_LEASE)
    row = await stage.reaches(State.DONE)
    assert calls == [row.resume_id] * 2


async def test_a_crash_after_the_answer_repeats_only_the_feedback(stage: Stage) -> None:
    """When the process dies with the answer stored, the next owner sends that answer and asks nobody again."""
    calls: list[str] = []

    @stage.handlers.default
    async def handler(resume: Resume) -> Any:
        calls.append(resume.resume_id)
        return fail("first_answer")

    stage.sender.open.clear()
    first = stage.start(SHORT_LEASE)
    await stage.put("a")
    await until(lambda: stage.sender.sent)
    await stage.crash(first)
    stage.sender.open.set()
    stage.start(SHORT_LEASE)
    await stage.reaches(State.DONE)
    assert len(calls) == 1
    assert stage.sender.sent[0] == stage.sender.sent[1]
    assert stage.sender.sent[1][1]["failure_code"] == "first_answer"


async def test_a_crash_after_the_feedback_repeats_it_under_the_same_id(stage: Stage) -> None:
    """When the process dies before the row is done, the same command goes out again, and a duplicate settles it."""

    class Forgetful(MemoryOutbox):
        async def finish(self, claim: Any, settled: str) -> None:
            if claim.owner == "relay-0":
                await asyncio.Event().wait()
            await super().finish(claim, settled)

    stage.outbox = Forgetful()
    stage.handlers.default(lambda resume: None)
    first = stage.start(SHORT_LEASE)
    await stage.put("a")
    await until(lambda: stage.sender.sent and first.sending)
    await stage.crash(first)
    stage.sender.reply = outcome(Status.DUPLICATE)
    stage.start(SHORT_LEASE)
    assert (await stage.reaches(State.DONE)).settled == "duplicate"
    assert stage.sender.sent[0] == stage.sender.sent[1]


async def test_a_repeated_resume_of_a_done_row_sends_its_feedback_again(stage: Stage) -> None:
    """Requeued feedback goes out as it was, the handler stays out of it, and the row is done again."""
    calls: list[str] = []

    @stage.handlers.default
    async def handler(resume: Resume) -> Any:
        calls.append(resume.resume_id)
        return retry(9)

    relay = stage.start()
    await stage.put("a")
    row = await stage.reaches(State.DONE)
    await stage.outbox.requeue_feedback([row.resume_id])
    relay.wake()
    await until(lambda: len(stage.sender.sent) == 2)
    await stage.reaches(State.DONE)
    assert stage.sender.sent[0] == stage.sender.sent[1]
    assert len(calls) == 1


# -- leases ---------------------------------------------------------------------------------------------------


async def test_a_lease_is_renewed_while_the_handler_runs(stage: Stage) -> None:
    """A handler may take longer than the lease; with a competitor at hand it still runs once."""
    calls: list[str] = []
    loop = asyncio.get_running_loop()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        begun = loop.time()
        await until(lambda: loop.time() - begun > 1.2 * KEPT_LEASE.lease_ms / 1000)

    stage.start(KEPT_LEASE)
    await stage.put("a")
    await until(lambda: calls)
    stage.start(KEPT_LEASE)
    row = await stage.reaches(State.DONE)
    assert (len(calls), row.attempts) == (1, 1)


async def test_who_lost_its_lease_stops_and_writes_nothing(stage: Stage) -> None:
    """An owner that was frozen past its lease has its handler cancelled and its answer refused."""
    cancelled: list[str] = []
    relay = stage.start(KEPT_LEASE)

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(resume.resume_id)
            raise

    await stage.put("a")
    await until(lambda: relay.handling)
    entry = stage.outbox._entries[resume_body("a")["resume_id"]]
    entry.token = "somebody else's"  # as if another process had claimed it while this one was frozen
    await until(lambda: cancelled)
    await until(lambda: not relay.handling)
    row = await stage.row()
    assert (row.state, entry.token) == (State.CLAIMED, "somebody else's")
    assert not stage.sender.sent


async def test_a_lost_claim_is_not_fed_back(stage: Stage) -> None:
    """A handler that ends after its lease was taken over sends nothing: its answer can't be stored."""
    release = asyncio.Event()
    relay = stage.start(QUICK)

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        await release.wait()

    await stage.put("a")
    await until(lambda: relay.handling)
    stage.outbox._entries[resume_body("a")["resume_id"]].token = "somebody else's"
    release.set()
    await until(lambda: not relay.handling)
    assert not stage.sender.sent
    assert (await stage.row()).state is State.CLAIMED


async def test_a_process_does_not_take_its_own_rows_away(stage: Stage) -> None:
    """Where leases may have run out unnoticed they are renewed before anything is claimed: the hand-off goes on."""
    clock = ManualClock()
    stage.outbox = MemoryOutbox(clock)
    release, calls = asyncio.Event(), []

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        await release.wait()

    relay = stage.start()
    await stage.put("a")
    await until(lambda: calls)
    clock.advance(2 * QUICK.lease_ms)
    relay._renewed_at -= 2 * QUICK.lease_ms / 1000  # as if the process had been frozen for as long
    await stage.put("b", lane="y")
    await until(lambda: len(calls) == 2)
    release.set()
    await stage_empties(stage, 2)
    assert sorted(calls) == sorted(resume_body(name)["resume_id"] for name in "ab")


async def test_a_row_taken_again_ends_the_former_work_first(stage: Stage) -> None:
    """Should a process claim a row of its own after all, the two hand-offs never run at the same time."""
    clock = ManualClock()
    stage.outbox = MemoryOutbox(clock)
    most, running, calls = 0, 0, 0

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        nonlocal most, running, calls
        running, calls = running + 1, calls + 1
        most = max(most, running)
        try:
            await asyncio.sleep(0 if calls > 1 else 60)
        finally:
            await asyncio.sleep(0)
            running -= 1

    relay = stage.start()
    await stage.put("a")
    await until(lambda: running)
    clock.advance(2 * QUICK.lease_ms)
    relay.wake()
    row = await stage.reaches(State.DONE)
    assert (row.attempts, calls, most) == (2, 2, 1)
    assert relay.handling == 0


async def test_a_cancellation_is_never_missed(stage: Stage) -> None:
    """Cancelled in the very moment of a wake, the relay ends all the same."""
    relay = stage.start()
    await until(lambda: relay._woken._waiters)
    relay.wake()
    stage.tasks[relay].cancel()
    await asyncio.wait({stage.tasks[relay]}, timeout=20)
    assert stage.tasks[relay].cancelled()


async def test_competing_relays_hand_off_once(stage: Stage) -> None:
    """Many relays on one store: each resume is handed off once."""
    calls: Counter[str] = Counter()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls[resume.resume_id] += 1
        await asyncio.sleep(0)

    for _ in range(3):
        stage.start(Policy(concurrency=4))
    await stage.put(*(f"r{n}" for n in range(200)))
    await stage_empties(stage, 200)
    assert set(calls.values()) == {1}
    assert len(calls) == 200


# -- fairness -------------------------------------------------------------------------------------------------


async def test_a_failing_flow_does_not_hold_up_another(stage: Stage) -> None:
    """200 resumes of a flow that always fails, then another flow: its turn comes while they all still wait."""

    @stage.handlers.flow("bad")
    async def bad(resume: Resume) -> None:
        raise RuntimeError("always")

    stage.handlers.flow("good")(lambda resume: None)
    stage.start(Policy(concurrency=4, backoff_initial_ms=1, backoff_max_ms=2))
    await stage.put(*(f"r{n}" for n in range(200)), lane="flow:bad", flow="bad")
    await stage.outbox.insert([new_row("g", lane="flow:good", flow="good")])
    await until(lambda: "complete" in stage.sender.kinds)
    counts = await stage.outbox.counts()
    assert counts[State.PENDING] + counts[State.CLAIMED] == 200
    assert counts[State.DEAD] == 0


async def test_a_hanging_flow_leaves_room(stage: Stage) -> None:
    """A flow whose handlers never end takes half of the slots at most; others go through, however many there are."""
    never = asyncio.Event()
    hanging: list[str] = []

    @stage.handlers.flow("hangs")
    async def hangs(resume: Resume) -> None:
        hanging.append(resume.resume_id)
        await never.wait()

    stage.handlers.default(lambda resume: None)
    relay = stage.start(Policy(concurrency=8))
    await stage.put(*(f"r{n}" for n in range(50)), lane="flow:hangs", flow="hangs")
    await until(lambda: len(hanging) == 4)
    await stage.put(*(f"o{n}" for n in range(100)), lane="other")
    await stage_empties(stage, 100)
    assert (len(hanging), relay.handling) == (4, 4)


async def test_concurrency_is_a_limit(stage: Stage) -> None:
    """Never more handlers at a time than set, over all flows; what waits stays in the store."""
    most, running, release = 0, 0, asyncio.Event()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1

    relay = stage.start(Policy(concurrency=5))
    for lane in "abcdefgh":
        await stage.put(*(f"{lane}{n}" for n in range(5)), lane=lane)
    await until(lambda: running == 5)
    assert (await stage.outbox.counts())[State.CLAIMED] == 5
    release.set()
    await stage_empties(stage, 40)
    assert most == 5
    assert relay.handling == 0


async def test_plain_functions_that_hang_hold_up_nobody(stage: Stage) -> None:
    """Handlers in threads count like any others, and a hanging one takes nobody's thread."""
    release = threading.Event()
    stage.handlers.flow("hangs")(lambda resume: release.wait() and None)
    stage.handlers.default(lambda resume: None)
    stage.start(Policy(concurrency=64))
    await stage.put(*(f"r{n}" for n in range(40)), lane="flow:hangs", flow="hangs")
    await stage.put("a", lane="other")
    await stage.reaches(State.DONE)
    release.set()
    await stage_empties(stage, 41)


# -- the store is away ----------------------------------------------------------------------------------------


class Flaky(MemoryOutbox):
    """Refuses everything while ``away``."""

    away = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"survey", "claim", "renew", "store_outcome", "finish", "back_off"} and self.away:
            return _refuse
        return super().__getattribute__(name)


async def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OutboxUnavailable("locked")


async def test_a_store_that_is_away_is_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is locked nothing is lost or repeated: the answer of a running handler is stored afterwards."""
    monkeypatch.setattr("notify_consumer.relay.UNAVAILABLE_S", 0.05)
    monkeypatch.setattr("notify_consumer.work.RETRY_S", 0.01)
    monkeypatch.setattr("notify_consumer.relay.RETRY_S", 0.01)
    stage.outbox = flaky = Flaky()
    calls: list[str] = []

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        flaky.away = True

    relay = stage.start()
    await stage.put("a")
    await until(lambda: relay.unavailable == "locked")
    assert (await stage.row()).state is State.CLAIMED
    flaky.away = False
    await stage.reaches(State.DONE)
    assert len(calls) == 1
    await until(lambda: relay.unavailable is None)


async def test_a_store_that_refuses_now_and_then_is_not_ready_in_between(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes what changes nothing: the relay's own rounds work, and each delivery of a resume fails."""
    monkeypatch.setattr("notify_consumer.relay.RETRY_S", 0.01)
    monkeypatch.setattr("notify_consumer.relay.UNAVAILABLE_S", 3_600)
    looks: list[int] = []

    class Watched(MemoryOutbox):
        async def survey(self, limit: int) -> Survey:
            looks.append(limit)
            return await super().survey(limit)

    stage.outbox = Watched()
    relay = stage.start()
    relay.say_unavailable("database or disk is full")
    begun = len(looks)
    await until(lambda: len(looks) > begun + 3)
    assert relay.unavailable == "database or disk is full"
    monkeypatch.setattr("notify_consumer.relay.UNAVAILABLE_S", 0.05)
    await until(lambda: relay.unavailable is None)


# -- the end --------------------------------------------------------------------------------------------------


async def test_draining_lets_handlers_finish(stage: Stage) -> None:
    """After stop nothing more is claimed, and what runs is finished, fed back and done before run() returns."""
    release = asyncio.Event()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        await release.wait()

    relay = stage.start(Policy(concurrency=2))
    await stage.put("a", "b")
    await until(lambda: relay.handling == 1)
    relay.stop()
    await asyncio.sleep(0)
    release.set()
    await stage.tasks[relay]
    assert (await stage.row("a")).state is State.DONE
    assert (await stage.row("b")).state is State.PENDING
    assert (await stage.row("b")).attempts == 0


async def test_draining_keeps_leases(stage: Stage) -> None:
    """A hand-off that outlasts its lease while the process drains is not handed to anybody else."""
    calls: list[str] = []
    loop = asyncio.get_running_loop()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        begun = loop.time()
        await until(lambda: loop.time() - begun > 1.2 * KEPT_LEASE.lease_ms / 1000)

    first = stage.start(KEPT_LEASE)
    await stage.put("a")
    await until(lambda: calls)
    stage.start(KEPT_LEASE)
    await stage.stop(first)
    await stage.reaches(State.DONE)
    assert len(calls) == 1


async def test_after_the_grace_the_rest_is_given_back(stage: Stage) -> None:
    """A handler that does not end within the grace is cancelled. Its row can be claimed at once: that is no failure,
    so it counts as no attempt."""
    never, ended = asyncio.Event(), []

    @stage.handlers.default
    async def handler(resume: Resume, context: Context) -> None:
        try:
            await never.wait()
        except asyncio.CancelledError:
            ended.append(("cancelled", context.stopping))
            raise

    relay = stage.start(Policy(grace_ms=10, max_attempts=1))
    await stage.put("a")
    await until(lambda: relay.handling)
    await stage.stop(relay)
    assert ended == [("cancelled", True)]
    row = await stage.row()
    assert (row.state, row.owner, row.attempts, row.last_error) == (State.PENDING, None, 0, None)
    assert "x" in (await stage.outbox.survey(1)).lanes
    assert not relay.stuck


async def test_after_the_grace_feedback_is_left_to_the_next(stage: Stage) -> None:
    """Feedback that is still on its way at the end stays answered, to be sent by whoever comes."""
    stage.handlers.default(lambda resume: None)
    stage.sender.open.clear()
    relay = stage.start(Policy(grace_ms=10))
    await stage.put("a")
    await until(lambda: stage.sender.sent)
    await stage.stop(relay)
    row = await stage.row()
    assert (row.state, row.owner) == (State.ANSWERED, None)
    assert "" in (await stage.outbox.survey(1)).lanes


async def test_a_thread_that_goes_on_keeps_its_lease(stage: Stage) -> None:
    """What can't be stopped is not given back: as long as its lease runs nobody else begins the same work."""
    release = threading.Event()
    stage.handlers.default(lambda resume: release.wait() and None)
    relay = stage.start(Policy(grace_ms=10))
    await stage.put("a")
    await until(lambda: relay.handling)
    await stage.stop(relay)
    row = await stage.row()
    assert (row.state, row.owner) == (State.CLAIMED, "relay-0")
    assert not relay.stuck
    release.set()


async def test_a_handler_that_ignores_its_cancellation_is_known(stage: Stage) -> None:
    """The relay ends all the same, keeps the lease, and says that something is stuck."""
    release = asyncio.Event()

    @stage.handlers.default
    async def handler(resume: Resume) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    relay = stage.start(Policy(grace_ms=10))
    await stage.put("a")
    await until(lambda: relay.handling)
    await stage.stop(relay)
    assert relay.stuck
    assert (await stage.row()).state is State.CLAIMED
    release.set()


async def test_a_claim_that_comes_in_while_stopping_is_released(stage: Stage) -> None:
    """Rows claimed but not begun when the stop came are given back as if never claimed."""
    claiming, go = asyncio.Event(), asyncio.Event()

    class Slow(MemoryOutbox):
        async def claim(self, *args: Any) -> Any:
            claims = await super().claim(*args)
            claiming.set()
            await go.wait()
            return claims

    stage.outbox = Slow()
    stage.handlers.default(lambda resume: None)
    await stage.put("a")
    relay = stage.start()
    await claiming.wait()
    relay.stop()
    go.set()
    await stage.tasks[relay]
    row = await stage.row()
    assert (row.state, row.owner, row.attempts) == (State.PENDING, None, 0)
