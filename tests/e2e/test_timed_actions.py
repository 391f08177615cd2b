"""Timed actions on a real timer service: made, replaced, deleted, failed and called, from within one program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pydantic
import pytest

from notify_consumer import Effect, Handlers, TimedAction, TimerScheduler, action
from notify_consumer.actions.dispatch import NAMESPACE
from notify_consumer.app import NotifyConsumer
from notify_consumer.config import Settings
from notify_consumer.outbox.base import State
from tests.support.notify_bench import gets_ready
from tests.support.service import Desk, Service, eventually, name_ref, unique
from tests.support.stage import Stage

FLAGS = ("--test-clock",)
HOUR_MS = 3_600_000


class Order(pydantic.BaseModel):
    """An argument."""

    number: int
    note: str


class OrderTimers(TimedAction):
    """Notes what it was called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    @action("expire")
    async def expire(self, order: Order) -> Effect:
        self.seen.append((self.timer_name, order.note, self.previous_attempts))
        if order.note == "fails" and self.previous_attempts < 2:
            return self.effects.fail("not yet")
        return self.effects.done()


class Program:
    """Somebody's program, with a notify consumer in it."""

    def __init__(self, consumer: NotifyConsumer, actions: OrderTimers) -> None:
        self.consumer, self.actions = consumer, actions
        self.timers = TimerScheduler(consumer.client)

    def seen(self, name: str) -> list[tuple[str, int]]:
        return [(note, attempts) for timer, note, attempts in self.actions.seen if timer == name]


@pytest.fixture
async def program(stage: Stage, desk: Desk, tmp_path: Path) -> AsyncIterator[Program]:
    actions, handlers = OrderTimers(), Handlers()
    handlers.actions(actions)
    settings = Settings(nats=stage.broker.url, outbox=f"sqlite:{tmp_path / 'outbox.db'}", instance=unique("program"))
    async with NotifyConsumer(settings, handlers) as consumer:
        await gets_ready(consumer)
        yield Program(consumer, actions)


def shift(service: Service, ms: int) -> None:
    assert service.http("/debug/clock", b'{"offset_ms": %d}' % ms)[0] == 200


async def waits(desk: Desk, name: str, retries: int) -> bool:
    state = await desk.state(name_ref(name, NAMESPACE))
    return state is not None and (state["phase"], state["retries_used"]) == ("waiting", retries)


async def test_a_timer_calls_its_action_once(program: Program, service: Service, desk: Desk) -> None:
    """It exists until it was called; made again it has moved; deleted, and deleted again, it calls nothing."""
    kept, gone = unique("kept"), unique("gone")
    deferred = OrderTimers.expire.deferred
    for name in (kept, gone):
        await program.timers.create_single_timer(name, timedelta(hours=1), deferred(Order(number=1, note="first")))
    await program.timers.create_single_timer(kept, timedelta(hours=3), deferred(Order(number=1, note="second")))
    assert [await program.timers.exists(name) for name in (kept, gone, unique())] == [True, True, False]
    assert [await program.timers.delete(gone) for _ in range(2)] == [True, False]
    assert not await program.timers.exists(gone)
    shift(service, 2 * HOUR_MS)
    assert await program.timers.exists(kept)
    shift(service, HOUR_MS)
    await eventually(lambda: program.seen(kept), what="the call")
    assert (await desk.ended(name_ref(kept, NAMESPACE)))["status"] == "completed"
    assert (program.seen(kept), program.seen(gone)) == ([("second", 0)], [])
    assert not await program.timers.exists(kept)


async def test_a_failure_waits_in_a_durable_timer(program: Program, service: Service, desk: Desk) -> None:
    """A failed call is a waiting timer again, in 3 and then 6 s, with the failures counted."""
    name = unique("fails")
    await program.timers.create_single_timer(name, HOUR_MS, OrderTimers.expire.deferred(Order(number=1, note="fails")))
    shift(service, HOUR_MS)
    for retries, delay_ms in ((1, 3_000), (2, 6_000)):
        await eventually(partial(waits, desk, name, retries), what=f"retry {retries}")
        state = await desk.state(name_ref(name, NAMESPACE))
        assert state is not None
        assert (state["delay_ms"], state.get("max_retries")) == (delay_ms, None)
        assert await program.timers.exists(name)
        shift(service, delay_ms)
    await desk.ended(name_ref(name, NAMESPACE))
    assert program.seen(name) == [("fails", 0), ("fails", 1), ("fails", 2)]


async def test_a_call_that_nobody_knows_is_kept_and_can_be_revived(
    program: Program, service: Service, desk: Desk
) -> None:
    """Its row is dead with the reason; a program that knows the action revives it."""
    name = unique("unknown")
    body = {"v": 1, "action": "Newer", "handler": "go", "argument": None}
    key = {"namespace": NAMESPACE, "name": name}
    await program.consumer.client.start(key, delay_ms=1, payload=body, max_retries=None)
    outbox = program.consumer.outbox

    async def dead() -> list[str]:
        return [row.resume_id for row in await outbox.browse(State.DEAD, 10)]

    [resume_id] = await eventually(dead, what="a dead row")
    row = await outbox.get(resume_id)
    assert row is not None
    assert row.last_error == "no timed action 'Newer' with 'go' is registered here"

    class Newer(TimedAction):
        @action("go")
        async def go(self) -> None: ...

    program.consumer._handlers.actions(Newer())
    assert await outbox.revive(resume_id)
    assert (await desk.ended(name_ref(name, NAMESPACE)))["status"] == "completed"
