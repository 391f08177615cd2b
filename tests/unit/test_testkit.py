"""The test kit for users: what it promises of time, handlers, clients and trouble."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest

from notify_consumer import Handlers, Resume, done, fail, retry
from notify_consumer.outbox.base import State
from notify_consumer.policy import Policy
from notify_consumer.testkit import TimerTestKit
from timer_service import testkit
from timer_service.errors import (
    Ambiguous,
    CommandRejected,
    NotFound,
    NotStored,
    OutcomeUnknown,
    SleepInterrupted,
    Unavailable,
)
from timer_service.testkit import T0_MS, MemoryService

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Diary:
    """Handlers that note when they were called, and answer as told."""

    def __init__(self, answer: Any = None) -> None:
        self.handlers = Handlers()
        self.calls: list[tuple[int, str]] = []
        self.resumes: list[Resume] = []
        self.kit: TimerTestKit | None = None
        self.answer = answer
        self.handlers.default(self.handle)

    async def handle(self, resume: Resume) -> Any:
        assert self.kit is not None
        self.calls.append((self.kit.clock.now_ms() - T0_MS, resume.timer["name"]))
        self.resumes.append(resume)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def opened(self, **options: Any) -> TimerTestKit:
        self.kit = TimerTestKit(self.handlers, **options)
        return self.kit


# -- time -----------------------------------------------------------------------------------------------------


async def test_each_fires_at_its_own_time_in_due_order() -> None:
    """One long advance: handlers see the time at which their timer was due, earliest first, never early or late."""
    diary = Diary()
    async with diary.opened() as kit:
        for name, delay_ms in (("c", 3_000), ("a", 1_000), ("b", 2_000), ("far", DAY_MS), ("b2", 2_000)):
            await kit.client.start({"name": name}, delay_ms=delay_ms)
        await kit.advance(999)
        assert diary.calls == []
        await kit.advance(HOUR_MS)
        assert diary.calls == [(1_000, "a"), (2_000, "b"), (2_000, "b2"), (3_000, "c")]
        assert kit.clock.now_ms() == T0_MS + 999 + HOUR_MS
        record = await kit.get({"name": "a"})
        assert record is not None
        assert (record["status"], record["timeline"][0]["lateness_ms"]) == ("completed", 0)
        far = await kit.get({"name": "far"})
        assert far is not None
        assert far["phase"] == "waiting"


async def test_a_hundred_years_of_retries_take_no_time() -> None:
    """Each generation at its time; a retry's delay counts from the answer."""
    diary = Diary(retry())
    async with diary.opened() as kit:
        await kit.client.start({"name": "yearly"}, delay_ms=365 * DAY_MS, max_retries=None)
        await kit.advance(timedelta(days=365 * 100))
        assert [at_ms for at_ms, _ in diary.calls] == [n * 365 * DAY_MS for n in range(1, 101)]
        assert [resume.generation for resume in diary.resumes] == list(range(100))


async def test_steps_go_from_one_thing_to_the_next() -> None:
    """``step`` passes exactly the time that it takes; where nothing will happen any more it says so."""
    diary = Diary()
    async with diary.opened() as kit:
        assert await kit.step() is False
        await kit.client.start({"name": "a"}, delay_ms=DAY_MS)
        assert await kit.step() is True
        assert diary.calls == [(DAY_MS, "a")]
        assert await kit.step() is False
        assert kit.clock.now_ms() == T0_MS + DAY_MS
        with pytest.raises(ValueError, match="never goes back"):
            await kit.advance(-1)


# -- handlers -------------------------------------------------------------------------------------------------


async def test_a_failing_handler_backs_off_in_the_kits_time() -> None:
    """3, 6, 12, 24, 30, 30 s, as in production; the row tells why; then it is mended, and the timer completes."""
    diary = Diary(RuntimeError("no"))
    async with diary.opened() as kit:
        await kit.client.start({"name": "a"}, delay_ms=1_000)
        await kit.advance(1_000 + 75_000)
        assert [at_ms - 1_000 for at_ms, _ in diary.calls] == [0, 3_000, 9_000, 21_000, 45_000, 75_000]
        row = await kit.outbox.get(diary.resumes[0].resume_id)
        assert row is not None
        assert (row.state, row.attempts, row.last_error) == (State.PENDING, 6, "RuntimeError: no")
        diary.answer = None
        await kit.advance(30_000)
        record = await kit.get({"name": "a"})
        assert record is not None
        assert record["status"] == "completed"
        assert {resume.resume_id for resume in diary.resumes} == {row.resume_id}


async def test_plain_functions_and_real_waits_are_waited_for() -> None:
    """A handler in a thread, and one that awaits something real, have answered when ``advance`` returns."""
    handlers = Handlers()

    @handlers.name("thread")
    def plain(resume: Resume) -> Any:
        time.sleep(0.2)
        return fail("thread")

    @handlers.name("await")
    async def slow(resume: Resume) -> Any:
        await asyncio.sleep(0.2)
        return fail("await")

    async with TimerTestKit(handlers) as kit:
        for name in ("thread", "await"):
            await kit.client.start({"name": name}, delay_ms=5)
        await kit.advance(5)
        for name in ("thread", "await"):
            record = await kit.get({"name": name})
            assert record is not None
            assert record["failure_code"] == name


async def test_a_handler_that_waits_for_time_to_pass_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever, since time stands while it runs."""
    handlers = Handlers()
    monkeypatch.setattr(testkit, "PATIENCE_S", 0.2)
    kit = TimerTestKit(handlers, policy=Policy(grace_ms=0))

    @handlers.default
    async def waits(resume: Resume) -> None:
        await kit.client.sleep("never", 5)

    async with kit:
        await kit.client.start({"name": "a"}, delay_ms=5)
        with pytest.raises(AssertionError, match="time to pass"):
            await kit.advance(5)


async def test_handlers_may_start_timers() -> None:
    """A flow of handlers: each starts the next one's timer."""
    handlers, seen = Handlers(), []
    kit = TimerTestKit(handlers)

    @handlers.name("step/")
    async def step(resume: Resume) -> None:
        number = int(resume.timer["name"].removeprefix("step/"))
        seen.append(number)
        if number < 3:
            await kit.client.start({"name": f"step/{number + 1}"}, delay_ms=HOUR_MS)

    async with kit:
        await kit.client.start({"name": "step/1"}, delay_ms=HOUR_MS)
        await kit.advance(10 * HOUR_MS)
    assert seen == [1, 2, 3]


# -- clients --------------------------------------------------------------------------------------------------


async def test_the_client_is_told_as_by_a_real_service() -> None:
    """Outcomes, duplicates, refusals, large payloads: nothing here knows of the kit."""
    diary = Diary(done())
    async with diary.opened() as kit:
        key, payload = {"name": "a"}, {"text": "x" * 5_000, "big": 2**70}
        first = await kit.client.start(key, delay_ms=DAY_MS, payload=payload, command_id="one")
        again = await kit.client.start(key, delay_ms=DAY_MS, payload=payload, command_id="one")
        assert first is not None
        assert again is not None
        assert (first.status, again.status, again.due_at_ms) == ("accepted", "duplicate", T0_MS + DAY_MS)
        with pytest.raises(CommandRejected, match="not_elapsed"):
            await kit.client.complete(key, 0, 1)
        with pytest.raises(CommandRejected, match="invalid_due"):
            await kit.client.start({"name": "b"}, delay_ms=0)
        stored = await kit.get(key)
        assert stored is not None
        assert stored["payload"] == payload
        await kit.advance(DAY_MS)
        assert diary.resumes[0].payload == payload
        assert len(kit.snapshots) == 0
        assert [one.code for one in kit.publicity.rejections] == ["not_elapsed", "invalid_due"]


async def test_deleting_is_cancelling_what_is_there() -> None:
    """True once; then, and where there never was one, False, at once and without an error."""
    async with TimerTestKit(Handlers()) as kit:
        await kit.client.start({"name": "a"}, delay_ms=DAY_MS)
        assert [await kit.client.delete({"name": name}) for name in ("a", "a", "nobody")] == [True, False, False]
        assert await kit.client.cancel({"name": "a2"}, wait=False, wait_ms=10_000) is None
        await kit.settle()
        assert kit.publicity.rejections[-1].code == "unknown_timer"


async def test_what_is_published_without_waiting_is_settled() -> None:
    """``settle`` is for code that does not wait for outcomes."""
    async with TimerTestKit(Handlers()) as kit:
        await kit.client.start({"name": "a"}, delay_ms=DAY_MS, wait=False)
        assert await kit.get({"name": "a"}) is None
        await kit.settle()
        assert await kit.get({"name": "a"}) is not None


async def test_a_closed_client_says_so() -> None:
    """Also to whoever sleeps."""
    async with TimerTestKit(Handlers()) as kit:
        other = kit.connect()
        asleep = asyncio.create_task(other.sleep("a", DAY_MS))
        await kit.settle()
        asked = asyncio.create_task(other.start({"name": "b"}, delay_ms=DAY_MS, command_id="mine"))
        await asyncio.sleep(0)
        await other.close()
        with pytest.raises(OutcomeUnknown, match="mine"):
            await asked
        with pytest.raises(Unavailable):
            await asleep
        with pytest.raises(NotStored):
            await other.start({"name": "c"}, delay_ms=DAY_MS)


async def test_a_payload_that_went_while_it_was_looked_for_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer ended between two reads: ``get`` tells how it stands then. A payload that stays away is an error."""
    async with MemoryService() as service:
        key, client = {"name": "a"}, service.client
        find = client._payload

        async def late(seq: int) -> Any:
            await client.cancel(key)
            await service.settle()
            return await find(seq)

        await client.start(key, delay_ms=DAY_MS, payload="x" * 2_000)
        monkeypatch.setattr(client, "_payload", late)
        record = await client.get(key)
        assert record is not None
        assert record["status"] == "cancelled"
        monkeypatch.undo()
        await client.start(key, delay_ms=DAY_MS, payload="x" * 2_000)
        service.snapshots.fail_next(NotFound("gone"), times=2)
        with pytest.raises(NotFound):
            await client.get(key)


# -- durable sleep, and who answers its resume ----------------------------------------------------------------


async def test_a_sleep_is_nobodys_to_handle() -> None:
    """No handler sees it, no row stays, nothing is refused though sleeper and consumer both answer; one record."""
    diary = Diary()
    async with diary.opened() as kit:
        asleep = [asyncio.create_task(client.sleep("nap", DAY_MS)) for client in (kit.client, kit.connect())]
        await kit.advance(DAY_MS - 1)
        assert not any(task.done() for task in asleep)
        await kit.advance(1)
        await asyncio.gather(*asleep)
        await kit.advance(40 * DAY_MS)
        assert diary.calls == []
        assert kit.publicity.rejections == []
        assert await kit.outbox.counts() == {**dict.fromkeys(State, 0), State.DONE: 1}
        [ref] = kit.archive._records
        assert [record.status for record in kit.archive.records(ref)] == ["completed"]
        assert kit.state.refs() == []
        await kit.client.sleep("nap", 5 * DAY_MS)


async def test_a_sleep_that_nobody_waits_for_any_more_ends() -> None:
    """The application is gone: the consumer completes it, and whoever asks later is told that it is over."""
    async with TimerTestKit(Handlers()) as kit:
        asleep = asyncio.create_task(kit.client.sleep("nap", HOUR_MS))
        await kit.settle()
        asleep.cancel()
        await kit.advance(2 * HOUR_MS)
        assert kit.state.refs() == []
        await kit.connect().sleep("nap", HOUR_MS)


async def test_sleeps_need_no_consumer() -> None:
    """Without one the sleeper ends the timer; its resume stays behind in the stream, once."""
    async with MemoryService() as service:
        asleep = asyncio.create_task(service.client.sleep({"name": "nap"}, HOUR_MS))
        await service.advance(HOUR_MS)
        await asleep
        await service.advance(40 * DAY_MS)
        assert service.state.refs() == []
        assert len(service.resumes.standing()) == 1


async def test_a_start_that_crosses_the_end_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read before the timer was there, sent after it has ended: its id is known, and the sleep is over."""
    async with TimerTestKit(Handlers()) as kit:
        asleep = asyncio.create_task(kit.client.sleep("nap", HOUR_MS))
        await kit.advance(HOUR_MS)
        await asleep
        late, usual, looks = kit.connect(), kit.client.get, 0

        async def get(timer: Any, *, payload: bool = True) -> Any:
            nonlocal looks
            looks += 1
            return None if looks == 1 else await usual(timer, payload=payload)

        monkeypatch.setattr(late, "get", get)
        again = asyncio.create_task(late.sleep("nap", 7))
        await kit.settle()
        assert again.done()
        assert looks == 2
        record = await kit.get({"namespace": "sleep", "name": "nap"})
        assert record is not None
        assert (record["generation"], record["status"]) == (0, "completed")


@pytest.mark.parametrize(
    "duration", [0, -1, 1.5, True, 10**13, timedelta(0), timedelta(days=-1), timedelta(days=40_000)]
)
async def test_a_sleep_of_no_sensible_length_is_refused(duration: Any) -> None:
    """Before anything is stored."""
    async with MemoryService() as service:
        with pytest.raises(ValueError, match="a sleep lasts"):
            await service.client.sleep("nap", duration)
        await service.settle()
        assert service.state.refs() == []


async def test_a_part_of_a_millisecond_counts_as_one() -> None:
    """Never shorter than asked for."""
    async with MemoryService() as service:
        asleep = asyncio.create_task(service.client.sleep("nap", timedelta(microseconds=1_001)))
        await service.advance(1)
        assert not asleep.done()
        await service.advance(1)
        await asleep


async def test_a_sleep_failed_by_hand_wakes_with_its_code() -> None:
    """Somebody answered for the sleeper, before it looked."""
    async with MemoryService() as service:
        asleep = asyncio.create_task(service.client.sleep({"name": "nap"}, HOUR_MS))
        await service.settle()
        asleep.cancel()
        await service.advance(HOUR_MS)
        await service.client.fail({"name": "nap"}, 0, 2, "given_up")
        with pytest.raises(SleepInterrupted, match="failed: given_up") as raised:
            await service.client.sleep({"name": "nap"}, HOUR_MS)
        assert (raised.value.status, raised.value.reason) == ("failed", "given_up")


async def test_an_ended_timer_of_another_kind_does_not_count_as_slept() -> None:
    """A name that was an ordinary timer begins anew; a lineage that has ended is refused."""
    lineage = {"flow_id": "f", "flow_version": "1", "root_execution_id": "r", "node_id": "n"}
    async with TimerTestKit(Diary(done()).handlers) as kit:
        for key in ({"name": "nap"}, lineage):
            await kit.client.start(key, delay_ms=HOUR_MS)
            await kit.client.cancel(key)
        asleep = asyncio.create_task(kit.client.sleep({"name": "nap"}, HOUR_MS))
        with pytest.raises(CommandRejected, match="already_terminal"):
            await kit.client.sleep(lineage, HOUR_MS)
        await kit.advance(HOUR_MS)
        await asleep
        record = await kit.get({"name": "nap"})
        assert record is not None
        assert (record["generation"], record["status"]) == (1, "completed")


# -- trouble --------------------------------------------------------------------------------------------------


async def test_trouble_on_purpose_is_lived_through() -> None:
    """A write whose reply is lost, as with a real broker: the command takes effect once."""
    diary = Diary()
    async with diary.opened() as kit:
        kit.state.fail_next(Ambiguous("no reply"), stored=True)
        outcome = await kit.client.start({"name": "a"}, delay_ms=1_000)
        assert outcome is not None
        assert (outcome.status, outcome.generation) == ("accepted", 0)
        await kit.advance(1_000)
        assert len(diary.calls) == 1


async def test_an_unanswered_resume_is_repeated() -> None:
    """After its time-out, doubling, under the same id; not while the earlier one stands unread."""
    async with MemoryService(resume_timeout_ms=10_000) as service:
        await service.client.start({"name": "a"}, delay_ms=1_000)
        await service.advance(60_000)
        assert len(service.resumes.standing()) == 1
        ids = set()
        for wait_ms in (0, 80_000, 160_000):
            await service.advance(wait_ms)
            resume = service.resumes.read()
            assert resume is not None
            ids.add(resume.resume_id)
            assert service.resumes.read() is None
        assert len(ids) == 1


async def test_a_mistake_of_the_service_fails_the_test() -> None:
    """What would be logged as an error in production is not passed over."""

    async def spoil() -> None:
        async with MemoryService() as service:
            await service.client.start({"name": "a"}, delay_ms=1_000)
            [ref] = service.state.refs()
            service.state.overwrite(ref, b"{")
            with pytest.raises(CommandRejected, match="state_unreadable"):
                await service.client.complete(ref, 0, 1)

    with pytest.raises(AssertionError, match=r"logged errors.*state.unreadable"):
        await spoil()
