"""The service is killed at every step that can be reached from outside: each timer still ends once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
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
    ref_of,
    unique,
)
from tests.support.stage import Stage
from tests.support.states import as_cancelled, as_elapsed, rewritten
from timer_service.jetstream import topology

LARGE = {"text": "x" * 1_500}


SETTINGS = {"snapshot_grace_ms": 2_000, "reconcile_interval_ms": 1_000}


@pytest.fixture
async def desk(stage: Stage) -> AsyncIterator[Desk]:
    """The module's broker with its service running, whatever the test before left."""
    if not stage.service.running:
        stage.service.start()
    await stage.service.ready()
    async with Desk.at(stage.broker.url) as opened:
        yield opened


async def start(desk: Desk, delay_ms: int, **body: Any) -> str:
    """Start a fresh named timer; returns its ref."""
    name = unique()
    outcome = await desk.ask("start", timer={"name": name}, due={"delay_ms": delay_ms}, **body)
    assert outcome["status"] == "accepted"
    return name_ref(name)


async def test_after_a_kill_nothing_depends_on_new_traffic(desk: Desk, service: Service) -> None:
    """C05: overdue, +3 s, +1 h; killed and restarted: the first fires at once, the second on time, the third waits."""
    overdue, second, third = [await start(desk, delay_ms) for delay_ms in (400, 3_000, 3_600_000)]
    state = await desk.state(second)
    assert state is not None
    service.kill()
    await eventually(lambda: now_ms() > state["timeline"][0]["accepted_at_ms"] + 500)
    async with Engine(desk) as engine:
        restarted_ms = now_ms()
        service.start()
        await engine.resume_of(overdue)
        await engine.resume_of(second)
        late_ms = engine.of(overdue)[0].stored_at_ms - restarted_ms
        assert late_ms < 20_000, "the overdue one waited for something"
        assert engine.of(second)[0].stored_at_ms >= state["due_at_ms"]
        assert engine.of(second)[0].stored_at_ms - state["due_at_ms"] < 20_000
        assert [len(engine.of(ref)) for ref in (overdue, second, third)] == [1, 1, 0]
        waiting = await desk.state(third)
        assert waiting is not None
        assert waiting["phase"] == "waiting"


async def test_each_timer_fires_once_over_two_kills(desk: Desk, service: Service) -> None:
    """SIGKILL before and after the due times of 200 timers, under load: none lost, none doubled, none early."""
    names = [unique() for _ in range(200)]
    bodies = [
        {"timer": {"name": name}, "due": {"delay_ms": 300 + 20 * n}, "payload": LARGE if n % 4 == 0 else n}
        for n, name in enumerate(names)
    ]
    async with Engine(desk, complete) as engine:
        await desk.send_many("start", bodies)
        await eventually(lambda: len(engine.received) >= 20)
        service.kill()
        service.start()
        await eventually(lambda: len(engine.received) >= 80, 20)
        service.kill()
        await asyncio.sleep(1.0)  # an outage: due times pass
        service.start()
        for name in names:
            record = await desk.ended(name_ref(name), 30)
            assert record["status"] == "completed"
            assert record["timeline"][0]["lateness_ms"] >= 0
            assert await desk.records_of(name_ref(name)) == 1
        assert {r.resume_id for r in engine.received} >= {f"{name_ref(name)}.0" for name in names}
        assert all(r.stored_at_ms >= r.due_at_ms for r in engine.received)
        first: dict[str, bytes] = {}
        for r in engine.received:  # a second hand-off is legal under the same id with the same content only
            assert first.setdefault(r.resume_id, r.data) == r.data
        for name in names[::4]:
            await eventually(partial(_no_snapshot, desk, name_ref(name)), what="no snapshot left")
        await eventually(lambda: _all_settled(desk))


async def _all_settled(desk: Desk) -> bool:
    return await desk.count(topology.COMMANDS) == 0


# -- C03: the steps of a life, each as a crash right after it leaves the broker ---------------------------------


async def test_killed_with_the_command_stored_only(desk: Desk, service: Service) -> None:
    """Commands stored while nobody serves are carried out; their delay counts from when they were stored."""
    service.kill()
    name, before_ms = unique(), now_ms()
    await desk.send("start", timer={"name": name}, due={"delay_ms": 500})
    stored_ms = now_ms()
    await eventually(lambda: now_ms() > stored_ms + 800)
    async with Engine(desk, complete) as engine:
        service.start()
        record = await desk.ended(name_ref(name), 20)
        line = record["timeline"][0]
        assert before_ms <= line["accepted_at_ms"] <= stored_ms + 1
        assert line["due_at_ms"] == line["accepted_at_ms"] + 500
        assert len(engine.of(name_ref(name))) == 1


async def test_killed_with_the_command_carried_out_but_not_settled(desk: Desk, service: Service) -> None:
    """A command that is delivered again after its state was written changes nothing; its outcome says duplicate."""
    key = {"name": unique()}
    body = encoded({"timer": key, "due": {"delay_ms": 60_000}, "payload": LARGE})
    assert (await desk.ask_raw("durable_timer.commands.start.v1", body))["status"] == "accepted"
    service.kill()
    asked = await desk.asked("durable_timer.commands.start.v1", body)  # as a redelivery finds it
    service.start()
    outcome = await asked.outcome(20)
    assert (outcome["status"], outcome["generation"], outcome["fence"]) == ("duplicate", 0, 1)
    assert await desk.snapshots_of(ref_of(key)) == 1


async def test_killed_with_a_snapshot_stored_but_no_state(desk: Desk, service: Service) -> None:
    """A snapshot that no state refers to is swept once its grace has passed; those in use stay."""
    orphan, used = name_ref(unique()), await start(desk, 60_000, payload=LARGE)
    await desk.js.publish(topology.snapshot_subject(orphan, 0), b'{"lost":"race"}')
    await eventually(lambda: _no_snapshot(desk, orphan), 30)
    assert await desk.snapshots_of(used) == 1
    assert service.metric("durable_timer_repairs_total", "snapshot_unreferenced") >= 1


async def _no_snapshot(desk: Desk, timer_ref: str) -> bool:
    return await desk.snapshots_of(timer_ref) == 0


async def test_killed_with_the_wake_published_only(desk: Desk, service: Service) -> None:
    """A wake that stands when the service comes back elapses its timer once, though the heap wakes it too."""
    timer_ref = await start(desk, 500)
    entry = await desk.entry(timer_ref)
    assert entry is not None
    service.kill()
    wake = {"v": 1, "timer_ref": timer_ref, "generation": 0, "woken_at_ms": now_ms(), "revision": entry.seq}
    for _ in range(3):
        await desk.js.publish(topology.wake_subject(timer_ref), json.dumps(wake).encode())
    due_ms = json.loads(entry.data or b"")["due_at_ms"]
    await eventually(lambda: now_ms() > due_ms)
    async with Engine(desk, complete) as engine:
        service.start()
        assert (await desk.ended(timer_ref, 20))["status"] == "completed"
        await eventually(lambda: _all_settled(desk))
        assert len(engine.of(timer_ref)) == 1


async def test_a_wake_that_is_lost_is_published_again(stage: Stage, desk: Desk, service: Service) -> None:
    """Wakes are disposable: purged before anybody read them, the heap sends another one by itself."""
    service.kill()
    wakes = await desk.js.consumer_info(topology.SCHEDULES, topology.WAKE_CONSUMER)
    with Service(stage.broker.url, stage.folder, "--no-provision") as other:
        await other.ready()
        await desk.js.delete_consumer(topology.SCHEDULES, topology.WAKE_CONSUMER)
        timer_ref = await start(desk, 200)
        await eventually(lambda: _any_wake(desk), what="the wake")
        await desk.js.purge_stream(topology.SCHEDULES)
        await desk.js.add_consumer(topology.SCHEDULES, wakes.config)
        async with Engine(desk, complete) as engine:
            await desk.ended(timer_ref)
            assert len(engine.of(timer_ref)) == 1


async def _any_wake(desk: Desk) -> bool:
    return await desk.count(topology.SCHEDULES) > 0


@pytest.mark.parametrize("ago_ms", [500, 200_000], ids=["just-now", "beyond-the-duplicate-window"])
async def test_killed_with_the_timer_elapsed_but_no_resume(desk: Desk, service: Service, ago_ms: int) -> None:
    """ "elapsed" in the state and nothing in the resume stream: the restarted service publishes it at once."""
    timer_ref = await start(desk, 60_000, payload=LARGE)
    service.kill()
    await rewritten(desk, timer_ref, lambda state: as_elapsed(state, now_ms() - ago_ms))
    async with Engine(desk, complete) as engine:
        service.start()
        record = await desk.ended(timer_ref, 20)
        assert record["status"] == "completed"
        (received,) = engine.of(timer_ref)
        assert (received.resume["fence"], received.resume["payload"]) == (2, LARGE)


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
async def test_killed_with_the_resume_published(desk: Desk, service: Service, read: bool) -> None:
    """A resume that was published before the crash is not added again within the broker's window."""
    before = await desk.last_seq(topology.RESUMES)
    timer_ref = await start(desk, 50)
    engine = Engine(desk)
    if read:
        async with engine:
            await engine.resume_of(timer_ref)
    else:
        await eventually(lambda: _standing(desk, 1), what="the resume")
    service.kill()
    service.start()
    await service.ready()
    assert (await desk.ask("cancel", timer_ref=timer_ref))["code"] == "too_late"  # the lane has passed the repair
    assert await desk.count(topology.RESUMES) == (0 if read else 1)
    assert await desk.last_seq(topology.RESUMES) == before + 1
    async with Engine(desk, complete) as again:
        if read:
            await again.give(engine.of(timer_ref)[0].resume, "complete")
        assert (await desk.ended(timer_ref))["status"] == "completed"


async def _standing(desk: Desk, count: int) -> bool:
    return await desk.count(topology.RESUMES) == count


@pytest.mark.parametrize("step", ["receipt", "archived"])
async def test_killed_in_the_middle_of_an_end(desk: Desk, service: Service, step: str) -> None:
    """Receipt without archive, archive without removal: the restarted service finishes, with one record."""
    timer_ref, sibling = await start(desk, 60_000, payload=LARGE), await start(desk, 60_000, payload=LARGE)
    assert (await desk.ask("cancel", timer_ref=sibling))["status"] == "accepted"
    record = await desk.ended(sibling)
    service.kill()
    ended = await rewritten(desk, timer_ref, lambda state: as_cancelled(state, now_ms()))
    if step == "archived":
        body = {**ended, "status": "cancelled"}
        body.pop("snapshot_seq")
        missing = set(record) - set(body) - {"failure_code", "message"}
        assert not missing, "the record made here by hand is not as the service makes it"
        await desk.js.publish(topology.terminal_subject(timer_ref), json.dumps(body).encode())
    service.start()
    assert (await desk.ended(timer_ref, 20))["status"] == "cancelled"
    assert await desk.records_of(timer_ref) == 1
    await eventually(lambda: _no_snapshot(desk, timer_ref))
    assert service.metric("durable_timer_repairs_total", "end_resumed") >= 1


async def test_a_start_finishes_the_end_that_it_meets(desk: Desk, service: Service) -> None:
    """A start of a name whose end was cut short archives it first, and then begins the next generation."""
    key = {"name": unique()}
    timer_ref = ref_of(key)
    await desk.ask("start", timer=key, due={"delay_ms": 60_000})
    service.kill()
    await rewritten(desk, timer_ref, lambda state: as_cancelled(state, now_ms()))
    asked = await desk.asked(
        "durable_timer.commands.start.v1", encoded({"timer": key, "due": {"delay_ms": 50}, "payload": "again"})
    )
    async with Engine(desk, complete) as engine:
        service.start()
        outcome = await asked.outcome(20)
        assert (outcome["status"], outcome["generation"], outcome["fence"]) == ("accepted", 1, 3)
        assert (await engine.resume_of(timer_ref, 1))["payload"] == "again"
        record = await desk.ended(timer_ref)
        assert await desk.records_of(timer_ref) == 2
        assert [line["answer"] for line in record["timeline"]] == ["cancel", "complete"]


async def test_killed_with_the_feedback_stored_only(desk: Desk, service: Service) -> None:
    """A complete that nobody has read yet is carried out after the restart, before the resume is sent again."""
    timer_ref = await start(desk, 50)
    async with Engine(desk) as engine:
        resume = await engine.resume_of(timer_ref)
        service.kill()
        await engine.give(resume, "complete")
        service.start()
        assert (await desk.ended(timer_ref, 20))["status"] == "completed"
        assert len(engine.of(timer_ref)) == 1


async def _frozen_before_due(desk: Desk, service: Service, delay_ms: int) -> tuple[str, int]:
    """Freeze the service while a timer waits; where that takes longer than the timer, once more with a longer one."""
    timer_ref = await start(desk, delay_ms)
    state = await desk.state(timer_ref)
    assert state is not None
    service.pause()
    if now_ms() < state["due_at_ms"]:
        return timer_ref, state["due_at_ms"]
    service.resume()
    assert delay_ms < 20_000, "freezing it takes too long"
    return await _frozen_before_due(desk, service, 5 * delay_ms)


async def test_a_service_frozen_over_a_due_time_fires_it_once(desk: Desk, service: Service) -> None:
    """C34: SIGSTOP across the deadline, SIGCONT: never early, once, promptly."""
    timer_ref, due_ms = await _frozen_before_due(desk, service, 800)
    await eventually(lambda: now_ms() > due_ms + 1_500, 60)
    service.resume()
    async with Engine(desk, complete) as engine:
        record = await desk.ended(timer_ref)
        assert record["timeline"][0]["lateness_ms"] >= 1_500
        assert len(engine.of(timer_ref)) == 1
    key = lineage_key()
    assert (await desk.ask("start", timer=key, due={"delay_ms": 60_000}))["status"] == "accepted"
