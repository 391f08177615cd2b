"""How the relay shares its slots out, how often it looks at the store, and what it says of one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from notify_consumer import Handlers, Resume
from notify_consumer.errors import OutboxUnavailable
from notify_consumer.outbox.base import Claim, State, Survey
from notify_consumer.policy import Policy
from notify_consumer.relay import Relay
from notify_consumer.testing import MemoryOutbox
from tests.support.notify import FakeSender, new_row, resume_body, until


class Watched(MemoryOutbox):
    """Counts and remembers what is asked of it; refuses writes while ``locked``, as a file that somebody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.surveys = 0
        self.renewed: list[int] = []
        self.wanted: list[Mapping[str, int]] = []
        self.locked = False
        self.surveying = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()

    async def survey(self, limit: int) -> Survey:
        self.surveys += 1
        found = await super().survey(limit)
        self.surveying.set()
        await self.answering.wait()
        return found

    async def claim(self, owner: str, wanted: Mapping[str, int], lease_ms: int) -> list[Claim]:
        self._check()
        self.wanted.append(wanted)
        return await super().claim(owner, wanted, lease_ms)

    async def renew(self, claims: Sequence[Claim], lease_ms: int) -> set[str]:
        self._check()
        self.renewed.append(len(claims))
        return await super().renew(claims, lease_ms)

    async def finish(self, claim: Claim, settled: str) -> None:
        self._check()
        await super().finish(claim, settled)

    def _check(self) -> None:
        if self.locked:
            raise OutboxUnavailable("locked")


class Stage:
    """One relay on a store that is watched. ``gate`` holds the handlers of every flow but ``quick``."""

    def __init__(self) -> None:
        self.outbox = Watched()
        self.gate = asyncio.Event()
        self.calls: list[str] = []
        self.handlers = Handlers()
        self.handlers.flow("quick")(self._quick)
        self.handlers.default(self._gated)
        self.relay: Relay
        self._tasks: list[asyncio.Task[None]] = []

    async def _gated(self, resume: Resume) -> None:
        self.calls.append(resume.timer["flow_id"])
        await self.gate.wait()

    async def _quick(self, resume: Resume) -> None:
        self.calls.append("quick")

    def start(self, **policy: int) -> Relay:
        rules = {"lease_ms": 60_000, "grace_ms": 20_000, **policy}
        self.relay = Relay(self.outbox, self.handlers, FakeSender(), owner="me", policy=Policy(**rules))
        self._tasks.append(asyncio.create_task(self.relay.run()))
        return self.relay

    async def put(self, flow: str, count: int = 1) -> None:
        names = [f"{flow}-{n}-{len(self.outbox._entries)}" for n in range(count)]
        await self.outbox.insert([new_row(name, lane=f"flow:{flow}", flow=flow) for name in names])
        self.relay.wake()

    async def done(self, count: int) -> None:
        async def there() -> bool:
            return (await self.outbox.counts())[State.DONE] == count

        await until(there, f"{count} rows are done")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    await made.close()


# -- shares ---------------------------------------------------------------------------------------------------


async def test_all_of_a_flow_is_handed_off_while_every_handler_of_another_blocks(stage: Stage) -> None:
    """200 resumes of A none of whose handlers ends, then 10 of B: B's are done, and A still holds only its share."""
    stage.start(concurrency=8)
    await stage.put("a", 200)
    await until(lambda: len(stage.calls) == 4)
    await stage.put("quick", 10)
    await stage.done(10)
    assert stage.calls.count("a") == stage.relay.handling == 4


async def test_who_comes_later_does_not_wait_for_an_old_backlog(stage: Stage) -> None:
    """Flows take turns: with one slot a newcomer has the next one, however long the rows of another have waited."""
    stage.start(concurrency=1)
    await stage.put("a", 50)
    await until(lambda: stage.calls == ["a"])
    await stage.put("quick")
    stage.gate.set()
    await stage.done(51)
    assert stage.calls[:3] == ["a", "quick", "a"]


async def test_more_slow_flows_than_slots_leave_one_for_a_newcomer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flows that were slow before don't get the last slot, so the next one finds it free."""
    monkeypatch.setattr("notify_consumer.fairness.SLOW_S", 0.0)  # each of them, from its first hand-off on
    stage.start(concurrency=8)
    stage.gate.set()
    for number in range(20):
        await stage.put(f"slow-{number}")
    await stage.done(20)
    stage.gate.clear()
    for number in range(20):
        await stage.put(f"slow-{number}")
    await until(lambda: stage.relay.handling == 7)
    await stage.put("quick")
    await stage.done(21)
    assert stage.relay.handling == 7


async def test_no_more_is_claimed_than_can_begin(stage: Stage) -> None:
    """Claims go no further than free slots: nothing is leased and waits."""
    stage.start(concurrency=8)
    for flow in "abcdefghij":
        await stage.put(flow, 30)
    await until(lambda: len(stage.calls) == 8)
    assert (await stage.outbox.counts())[State.CLAIMED] == 8
    assert max(sum(wanted.values()) for wanted in stage.outbox.wanted) <= 8
    stage.gate.set()
    await stage.done(300)
    assert max(sum(wanted[lane] for lane in wanted if lane) for wanted in stage.outbox.wanted) <= 8


# -- how often the store is asked -----------------------------------------------------------------------------


async def test_leases_are_renewed_together(stage: Stage) -> None:
    """One call for all that runs."""
    stage.start(concurrency=8, lease_ms=300)
    for flow in "abcdefgh":
        await stage.put(flow)
    await until(lambda: len(stage.calls) == 8)
    before = len(stage.outbox.renewed)
    await until(lambda: len(stage.outbox.renewed) >= before + 3)
    assert stage.outbox.renewed[-1] == 8
    assert len(stage.calls) == 8


async def test_backoffs_that_end_one_after_the_other_mean_few_looks(stage: Stage) -> None:
    """A flow that holds its share and has hundreds of rows in backoff does not keep the relay asking every time."""
    stage.start(concurrency=2)
    await stage.put("a", 1_001)
    await until(lambda: stage.calls)
    stage.outbox.answering.clear()
    now_ms = stage.outbox._clock.now_ms()
    waiting = [entry for entry in stage.outbox._entries.values() if entry.row.state is State.PENDING]
    for number, entry in enumerate(waiting):
        entry.change(now_ms, claimable_at_ms=now_ms + number)
    before = stage.outbox.surveys
    stage.outbox.answering.set()
    stage.relay.wake()

    async def all_ready() -> bool:
        return stage.outbox._clock.now_ms() > now_ms + len(waiting)

    await until(all_ready)
    assert stage.outbox.surveys - before < len(waiting) / 10
    assert len(stage.calls) == 1


async def test_an_idle_relay_is_woken_and_does_not_ask(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wake there is one look a period; what is put in is found by its wake alone."""
    monkeypatch.setattr("notify_consumer.relay.POLL_S", 3_600)
    stage.start()
    await until(lambda: stage.outbox.surveys == 1)
    await stage.put("quick")
    await stage.done(1)
    await until(lambda: not stage.relay.sending)
    assert stage.outbox.surveys <= 5


# -- a store that can be read and not written ----------------------------------------------------------------


def said(relay: Relay) -> str | None:
    return relay.unavailable


async def test_it_stays_unavailable_until_a_write_works(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking works all the while: only a write shows that the store is back, and the relay tries one by itself."""
    monkeypatch.setattr("notify_consumer.relay.RETRY_S", 0.01)
    relay = stage.start()
    stage.outbox.locked = True
    relay.say_unavailable("told by another")
    assert said(relay) == "told by another"
    relay.wake()
    await until(lambda: relay.unavailable == "locked", "its own try fails")
    surveys = stage.outbox.surveys
    await stage.put("quick")
    await until(lambda: relay._woken.is_set() is False)
    assert said(relay) == "locked"
    assert stage.outbox.surveys == surveys  # who can't write need not look
    stage.outbox.locked = False
    await stage.done(1)
    await until(lambda: said(relay) is None)
    assert 0 in stage.outbox.renewed


async def test_what_is_told_during_a_look_stays_until_the_next(stage: Stage) -> None:
    """A look that had begun before the failure says nothing about it."""
    relay = stage.start()
    await stage.outbox.surveying.wait()
    stage.outbox.answering.clear()
    stage.outbox.surveying.clear()
    relay.wake()
    await stage.outbox.surveying.wait()
    relay.say_unavailable("told meanwhile")
    stage.outbox.locked = True
    surveys = stage.outbox.surveys
    stage.outbox.answering.set()
    await until(lambda: relay._woken._waiters or relay.unavailable is None)
    assert said(relay) == "told meanwhile"
    assert stage.outbox.surveys == surveys
    stage.outbox.locked = False
    relay.wake()
    await until(lambda: relay.unavailable is None)


async def test_a_failing_write_of_a_hand_off_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker can't write makes the relay unavailable, without waiting for the next renewal."""
    monkeypatch.setattr("notify_consumer.work.RETRY_S", 0.01)
    relay = stage.start(lease_ms=3_600_000)
    await stage.put("a")
    await until(lambda: stage.calls)
    stage.outbox.locked = True
    stage.gate.set()
    await until(lambda: relay.unavailable == "locked")
    row = await stage.outbox.get(resume_body("a-0-0", flow="a")["resume_id"])
    assert row is not None
    assert row.state is State.ANSWERED
    stage.outbox.locked = False
    await stage.done(1)
    await until(lambda: relay.unavailable is None)
