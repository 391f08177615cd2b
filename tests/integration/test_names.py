"""One notify consumer at a time works under a name; the keys of names; and what an account must be allowed for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from notify_consumer.app import App
from notify_consumer.outbox.base import State
from tests.support.notify import until
from tests.support.notify_bench import Bench, codes, reaches
from timer_service.jetstream import topology

KEY = topology.name_lease(topology.NOTIFY_CONSUMER, "test")


def is_duplicate(app: App) -> bool:
    return codes(app.readiness()) == {"duplicate_instance"}


async def test_a_second_consumer_of_a_name_hands_off_nothing(bench: Bench) -> None:
    """It says `duplicate_instance`, pulls and claims nothing, and takes over when the first one stops."""
    calls: list[str] = []
    bench.handlers.default(lambda resume: calls.append(resume.resume_id))
    other = f"sqlite:{bench.folder / 'other.db'}"
    async with bench.running() as first, bench.running(ready=False, outbox=other) as second:
        await until(lambda: is_duplicate(second))
        [reason] = second.readiness().reasons
        assert (reason.resource, "'test'" in reason.message) == ("test", True)
        await bench.publish("order-1")
        await reaches(first, State.DONE)
        assert await second.outbox.browse(None, 10) == []
        first.stop()
        await until(lambda: second.readiness().ready)
        await bench.publish("order-2")
        await reaches(second, State.DONE, "order-2")
    assert len(calls) == 2


async def test_a_consumer_that_loses_its_name_stops_and_comes_back(bench: Bench) -> None:
    """Another process has it by a newer epoch: nothing is pulled or handed off until that one is gone."""
    bench.handlers.default(lambda resume: None)
    async with bench.running() as app:
        ask = await bench.nats.subscribe(topology.lease_ask_subject("other"))
        await take(bench, "other")
        await until(lambda: is_duplicate(app))
        await bench.publish("order-1")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await until(lambda: loop.time() - begun > 0.5)  # for as long as a pull takes a hundred times
        assert await bench.unread() == 1
        await ask.unsubscribe()
        await until(lambda: app.readiness().ready)
        await reaches(app, State.DONE)


async def take(bench: Bench, process: str) -> None:
    """Write as another process that takes over, whatever stands there."""
    record: dict[str, Any] = {
        "instance": "test",
        "process": process,
        "epoch": 1_000,
        "beat": 0,
        "ask": topology.lease_ask_subject(process),
    }
    await bench.nats.jetstream().publish(topology.lease_subject(KEY), json.dumps(record).encode())


async def test_a_consumer_that_crashes_is_followed_at_once(bench: Bench) -> None:
    """The next one under the name is not called a duplicate, and works."""
    bench.handlers.default(lambda resume: None)
    async with bench.crashing():
        pass
    async with bench.running(ready=False) as app:
        seen: set[str] = set()

        def ready() -> bool:
            seen.update(codes(app.readiness()))
            return app.readiness().ready

        await until(ready)
        assert "duplicate_instance" not in seen
        await bench.publish("order-1")
        await reaches(app, State.DONE)


def test_the_two_programs_do_not_share_names() -> None:
    """A host has one name, and one of each program."""
    keys = {topology.name_lease(program, "host") for program in (topology.TIMER_SERVICE, topology.NOTIFY_CONSUMER)}
    assert len(keys) == 2


@given(st.text(min_size=1, max_size=128), st.text(min_size=1, max_size=128))
def test_every_name_has_a_key_of_its_own(one: str, two: str) -> None:
    """Whatever is in a name, its key is one literal subject."""
    keys = [topology.name_lease(topology.TIMER_SERVICE, name) for name in (one, two)]
    assert (keys[0] == keys[1]) == (one == two)
    for key in keys:
        assert topology.is_literal_subject(topology.lease_subject(key)[:512])
        assert len(topology.lease_subject(key)) < 1_024
        assert key.count(".") == 2
