"""C44: a named timer that fails 1,500 times, and one that is deleted and made again while its handler runs.

The whole ring in memory and in virtual time: timer service, notify consumer, and the scheduler of timed actions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from itertools import pairwise
from typing import Any

import pytest
from structlog.testing import capture_logs

from notify_consumer import Effect, Handlers, TimedAction, TimerScheduler, action
from notify_consumer.actions.dispatch import NAMESPACE
from notify_consumer.outbox.base import NewRow, State
from notify_consumer.policy import Policy
from notify_consumer.relay import Relay
from notify_consumer.resume import read_resume
from notify_consumer.testing import MemoryOutbox
from tests.support.ring import Ring, play
from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import NameKey, derive_timer_ref
from timer_service.errors import CommandRejected
from timer_service.wire.canonical import strict_loads
from timer_service.wire.records import Outcome, encode

FAILURES = 1_500


class RingTimers:
    """What the scheduler and the relay need of a TimerClient, on a ring in memory."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._ids = 0
        self.outcomes: list[tuple[str, Outcome]] = []

    async def start(self, timer: Mapping[str, str], **options: Any) -> None:
        delay_ms = options.pop("delay_ms")
        await self.send("start", {"timer": dict(timer), "due": {"delay_ms": delay_ms}, **options})

    async def delete(self, timer: Mapping[str, str]) -> bool:
        try:
            await self.send("cancel", {"timer_ref": _ref(timer), "wait_ms": 0})
        except CommandRejected as rejected:
            return rejected.code not in (Code.UNKNOWN_TIMER, Code.ALREADY_TERMINAL)
        return True

    async def get(self, timer: Mapping[str, str], *, payload: bool = True) -> dict[str, Any] | None:
        stored = self._ring.state.peek(_ref(timer)).timer
        found: Any = None if stored is None else strict_loads(encode(stored))
        return found  # type: ignore[no-any-return]

    async def send(self, kind: str, body: Mapping[str, Any], **_: Any) -> Outcome:
        self._ids += 1
        outcome = await self._ring.ask(kind, **{"command_id": f"c-{self._ids}", **body, "v": 1})
        self.outcomes.append((kind, outcome))
        if outcome.status is Status.REJECTED:
            raise CommandRejected(outcome)
        return outcome


def _ref(timer: Mapping[str, str]) -> Any:
    return derive_timer_ref(NameKey(timer["name"], timer["namespace"]))


class World:
    """A ring, a relay on an outbox in memory, and what carries resumes from one to the other."""

    def __init__(self, ring: Ring, *actions: TimedAction) -> None:
        self.ring = ring
        self.outbox = MemoryOutbox(ring.clock)
        self.timers = RingTimers(ring)
        self.scheduler = TimerScheduler(self.timers)
        self.handlers = Handlers()
        self.handlers.actions(*actions)
        self.relay = Relay(self.outbox, self.handlers, self.timers, owner="me", policy=Policy(lease_ms=3_600_000))

    async def carry(self) -> None:
        """Take resumes in as the consumer does; what is done is forgotten, so that looking stays cheap."""
        published, usual = asyncio.Event(), self.ring.resumes.publish

        async def publish(*args: Any) -> int:
            seq = await usual(*args)
            published.set()
            return seq

        self.ring.resumes.publish = publish  # type: ignore[method-assign, assignment]
        while True:
            await published.wait()
            published.clear()
            while (record := self.ring.resumes.read()) is not None:
                resume = read_resume(encode(record))
                await self.outbox.insert([NewRow(resume.resume_id, self.handlers.flow_of(resume), encode(record))])
                self.relay.wake()
            await self.outbox.prune_done(60_000)


def world(story: Callable[[World], Coroutine[Any, Any, None]], *actions: TimedAction) -> None:
    """Play a story in a world; at its end nothing was dead, and the ring is sound."""

    async def played() -> None:
        async with Ring() as ring:
            made = World(ring, *actions)
            tasks = [asyncio.create_task(made.relay.run()), asyncio.create_task(made.carry())]
            try:
                await story(made)
                await ring.settle()
                assert (await made.outbox.counts())[State.DEAD] == 0
                ring.sound()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    with capture_logs():  # hundreds of tracebacks, nicely printed, take most of the time
        play(played())


@pytest.fixture(autouse=True)
def _no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours pass here; nothing depends on a look every second."""
    monkeypatch.setattr("notify_consumer.relay.POLL_S", 3_600)


class Stubborn(TimedAction):
    """Fails in every way there is, until it has failed often enough; notes when it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []
        self.others: list[float] = []
        self.over = asyncio.Event()

    @action("try")
    async def attempt(self, argument: str) -> Effect:
        assert (argument, self.timer_name) == ("x", "stubborn")
        previous = self.previous_attempts
        self.calls.append((asyncio.get_running_loop().time(), previous))
        if previous >= FAILURES:
            self.over.set()
            return self.effects.done()
        match previous % 4:
            case 0:
                raise asyncio.CancelledError
            case 1:
                raise RuntimeError("boom")
            case 2:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(60)
        return self.effects.fail("not yet")

    @action("other")
    async def other(self) -> None:
        self.others.append(asyncio.get_running_loop().time())


def test_c44_a_timer_fails_1500_times() -> None:
    """3, 6, 12, 24, 30, 30 … s after each failure, told, raised or cancelled; others fire in time all along."""
    actions = Stubborn()

    async def story(world: World) -> None:
        await world.scheduler.create_single_timer("stubborn", 1_000, Stubborn.attempt.deferred("x"))
        begun = asyncio.get_running_loop().time()
        for n in range(1, 101):
            await world.scheduler.create_single_timer(f"other-{n}", n * 400_000, Stubborn.other.deferred())
        async with asyncio.timeout(3_600 * 24):
            await actions.over.wait()
        await asyncio.sleep(10)
        assert len(actions.others) == 100
        late = [fired - begun - (n + 1) * 400 for n, fired in enumerate(actions.others)]
        assert -0.5 < min(late) <= max(late) < 1.5
        assert not await world.scheduler.exists("stubborn")

    world(story, actions)
    assert [previous for _, previous in actions.calls] == list(range(FAILURES + 1))
    times = [at for at, _ in actions.calls]
    gaps = [after - before for before, after in pairwise(times)]
    wanted = [3, 6, 12, 24] + [30] * (FAILURES - 4)
    over = [gap - want for gap, want in zip(gaps, wanted, strict=True)]
    assert 0 <= min(over) <= max(over) < 1.5


class Slow(TimedAction):
    """Its first call waits until it is told to fail."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.entered, self.release = asyncio.Event(), asyncio.Event()

    @action("go")
    async def go(self, argument: str) -> Effect:
        self.seen.append((argument, self.previous_attempts))
        if argument == "old":
            self.entered.set()
            await self.release.wait()
            return self.effects.fail("too late")
        return self.effects.done()


def test_c44_deleted_twice_and_made_again_while_its_handler_runs() -> None:
    """The old call fails in the end and is never repeated; the new one fires, with its own argument, once."""
    actions = Slow()

    async def story(world: World) -> None:
        scheduler = world.scheduler
        await scheduler.create_single_timer("t", 1_000, Slow.go.deferred("old"))
        assert await scheduler.exists("t")
        await actions.entered.wait()
        assert await scheduler.exists("t")
        await scheduler.delete("t")
        await scheduler.delete("t")
        assert not await scheduler.exists("t")
        await scheduler.create_single_timer("t", 5_000, Slow.go.deferred("new"))
        assert await scheduler.exists("t")
        actions.release.set()
        await world.ring.until(lambda: len(actions.seen) == 2, "the new one fires")
        await asyncio.sleep(600)
        refused = [outcome.code for kind, outcome in world.timers.outcomes if kind == "retry"]
        assert refused == [Code.STALE_GENERATION]
        assert not await scheduler.exists("t")

    world(story, actions)
    assert actions.seen == [("old", 0), ("new", 0)]


def test_c44_deleted_while_its_handler_runs() -> None:
    """A call that has begun goes on; when it fails it is not repeated, and the timer is gone."""
    actions = Slow()

    async def story(world: World) -> None:
        scheduler = world.scheduler
        await scheduler.create_single_timer("t", 1_000, Slow.go.deferred("old"))
        await actions.entered.wait()
        assert await scheduler.delete("t")
        actions.release.set()
        await asyncio.sleep(600)
        assert not await scheduler.exists("t")
        assert not await scheduler.delete("t")
        assert world.ring.state.peek(_ref({"namespace": NAMESPACE, "name": "t"})).timer is None

    world(story, actions)
    assert actions.seen == [("old", 0)]


def test_a_replaced_timer_calls_with_its_new_argument_only() -> None:
    """Making a timer again before it fires moves the deadline in one step."""
    actions = Slow()

    async def story(world: World) -> None:
        for argument in ("first", "second"):
            await world.scheduler.create_single_timer("t", 60_000, Slow.go.deferred(argument))
            await asyncio.sleep(40)
        assert actions.seen == []
        await asyncio.sleep(600)

    world(story, actions)
    assert actions.seen == [("second", 0)]
