"""Due times on a running service: never early, each once, in bursts too, and nobody starves."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import pytest

from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, now_ms, unique
from tests.support.stage import Stage
from timer_service.jetstream import topology

SETTINGS = {"reconcile_interval_ms": 1_000}
HOUR_MS = 3_600_000


async def test_three_hundred_timers_fire_once_and_never_early(
    desk: Desk, service: Service, record_property: Any
) -> None:
    """By the broker's own clock no resume is stored before its timer is due; lateness stays small."""
    rng = random.Random(20261130)
    names = [unique() for _ in range(300)]
    async with Engine(desk, complete) as engine:
        await desk.send_many(
            "start", [{"timer": {"name": name}, "due": {"delay_ms": rng.randrange(200, 6_000)}} for name in names]
        )
        refs = {name_ref(name) for name in names}
        await eventually(lambda: all(engine.of(ref) for ref in refs), 40, every=0.1)
        for ref in refs:
            (received,) = engine.of(ref)
            record = await desk.ended(ref)
            line = record["timeline"][0]
            assert line["due_at_ms"] == received.due_at_ms
            assert received.stored_at_ms >= received.due_at_ms
            assert line["elapsed_at_ms"] >= line["due_at_ms"]
        late = [engine.of(ref)[0].stored_at_ms - engine.of(ref)[0].due_at_ms for ref in refs]
    p50, p99 = statistics.median(late), statistics.quantiles(late, n=100)[98]
    record_property("lateness_p50_ms", round(p50, 2))
    record_property("lateness_p99_ms", round(p99, 2))
    print(f"lateness of 300 timers: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {max(late):.1f} ms")
    assert p50 < 1_500, "it was the second wake that counted"  # how late at the most: benchmarks/


async def test_later_timers_overtake_earlier_ones_while_a_scan_runs(desk: Desk, service: Service) -> None:
    """C37: +6 h, then +2 s, then one past due, between thousands of others: the second on time, the third at once."""
    many = [{"timer": {"name": unique()}, "due": {"delay_ms": HOUR_MS + n}} for n in range(3_000)]
    await desk.send_many("start", many)
    await eventually(lambda: service.details()["armed"] >= len(many))
    scans = len(service.events("reconcile.scanned"))
    await eventually(lambda: len(service.events("reconcile.scanned")) > scans, 30)
    far, near, past = unique(), unique(), unique()
    async with Engine(desk, complete) as engine:
        await desk.ask("start", timer={"name": far}, due={"delay_ms": 6 * HOUR_MS})
        await desk.ask("start", timer={"name": near}, due={"delay_ms": 2_000})
        asked_ms = now_ms()
        await desk.ask("start", timer={"name": past}, due={"at_ms": asked_ms - 60_000})
        await engine.resume_of(name_ref(past))
        await engine.resume_of(name_ref(near))
        (received,) = engine.of(name_ref(past))
        assert received.stored_at_ms - asked_ms < 10_000
        (received,) = engine.of(name_ref(near))
        assert 0 <= received.stored_at_ms - received.due_at_ms < 10_000
        scans = len(service.events("reconcile.scanned"))
        await eventually(lambda: len(service.events("reconcile.scanned")) > scans, 30)
        assert engine.of(name_ref(far)) == []
        assert len(engine.of(name_ref(near))) == len(engine.of(name_ref(past))) == 1
    kinds = {key[1]: value for key, value in service.metrics().items() if key[0] == "durable_timer_repairs_total"}
    assert not kinds, f"a scan of what is in order found something to mend: {kinds}"


@pytest.mark.parametrize("delay_ms", [25 * 24 * HOUR_MS, 400 * 24 * HOUR_MS, 3_155_760_000_000])
async def test_far_deadlines_wait_and_cost_nothing(desk: Desk, service: Service, delay_ms: int) -> None:
    """C26: 25 days, 400 days, 100 years: they wait exactly, beside one that fires."""
    far, near = unique(), unique()
    async with Engine(desk, complete) as engine:
        outcome = await desk.ask("start", timer={"name": far}, due={"delay_ms": delay_ms})
        await desk.ask("start", timer={"name": near}, due={"delay_ms": 200})
        assert (await desk.ended(name_ref(near)))["status"] == "completed"
        state = await desk.state(name_ref(far))
        assert state is not None
        assert (state["phase"], state["due_at_ms"]) == ("waiting", outcome["due_at_ms"])
        assert outcome["due_at_ms"] - state["timeline"][0]["accepted_at_ms"] == delay_ms
        assert engine.of(name_ref(far)) == []


@pytest.mark.parametrize(
    ("due", "at_ms"),
    [
        ({"at": "1970-01-01T00:00:00Z"}, 0),
        ({"at_ms": 0}, 0),
        ({"at": "2001-09-09T01:46:40.000000001Z"}, 1_000_000_000_001),
        ({"at": "2001-09-09T03:46:40.123+02:00"}, 1_000_000_000_123),
    ],
)
async def test_an_instant_in_the_past_is_due_at_once(desk: Desk, due: dict[str, Any], at_ms: int) -> None:
    """It fires at once, with the instant as it was meant, rounded up to a millisecond."""
    name = unique()
    async with Engine(desk, complete) as engine:
        await desk.ask("start", timer={"name": name}, due=due)
        assert (await engine.resume_of(name_ref(name)))["due_at_ms"] == at_ms
        assert (await desk.ended(name_ref(name)))["timeline"][0]["due_at_ms"] == at_ms


# -- the same start again and again ---------------------------------------------------------------------------


async def test_one_start_published_at_every_wrong_moment(stage: Stage, desk: Desk, service: Service) -> None:
    """C17: three times at once, after completion, after the duplicate window, after a broker restart: one timer."""
    config = (await desk.js.stream_info(topology.COMMANDS)).config
    config.duplicate_window = 0.2
    await desk.js.update_stream(config)
    name = unique()
    start: dict[str, Any] = {"command_id": unique("c"), "timer": {"name": name}, "due": {"delay_ms": 300}}
    async with Engine(desk, complete) as engine:
        outcomes = await asyncio.gather(*(desk.ask("start", **start) for _ in range(3)))
        assert sorted(outcome["status"] for outcome in outcomes) == ["accepted", "duplicate", "duplicate"]
        record = await desk.ended(name_ref(name))
        await eventually(lambda: now_ms() > record["ended_at_ms"] + 300)  # the duplicate window has passed
        again = await desk.ask("start", **start)
        assert (again["status"], again["phase"]) == ("duplicate", "completed")
        stage.broker.restart(hard=True)
        once_more = await desk.ask("start", **start, within=20)
        assert (once_more["status"], once_more["generation"]) == ("duplicate", 0)
        assert await desk.records_of(name_ref(name)) == 1
        assert await desk.state(name_ref(name)) is None
        assert len(engine.of(name_ref(name))) == 1
