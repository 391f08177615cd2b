"""Every stuck state, made by hand while the service runs, is found and mended without a restart; so is a broker that
comes back with an older copy of its data."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.cli import Cli
from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, now_ms, unique
from tests.support.stage import Stage
from tests.support.states import as_cancelled, as_elapsed, rewritten
from timer_service.jetstream import topology

SETTINGS: dict[str, object] = {
    "reconcile_interval_ms": 1_000,
    "resume_timeout_ms": 1_000,
    "policy_check_interval_ms": 500,
    "snapshot_grace_ms": 1_000,
}
HEALED_S = 30.0
HOUR_MS = 3_600_000
LARGE = {"text": "x" * 1_500}


@pytest.fixture
async def engine(desk: Desk) -> AsyncIterator[Engine]:
    async with Engine(desk, complete) as running:
        yield running


async def start(desk: Desk, delay_ms: int, **body: Any) -> str:
    """Start a fresh named timer; returns its ref."""
    name = unique()
    outcome = await desk.ask("start", timer={"name": name}, due={"delay_ms": delay_ms}, **body)
    assert outcome["status"] == "accepted"
    return name_ref(name)


async def repairs(service: Service) -> dict[str, float]:
    """Repairs so far, by kind."""
    return {labels[0]: value for (name, *labels), value in service.metrics().items()
            if name == "durable_timer_repairs_total"}  # fmt: skip


# -- stuck states, by hand --------------------------------------------------------------------------------------


async def test_a_waiting_state_from_nowhere_is_armed(desk: Desk, service: Service, engine: Engine) -> None:
    """Written by somebody else than this process: heard of, armed, and fired when it is due."""
    model = await start(desk, HOUR_MS)
    state = await desk.state(model)
    assert state is not None
    name = unique()
    timer = {"name": name, "namespace": "default"}
    due_ms = now_ms() + 1_000
    waiting = {**state, "timer": timer, "timer_ref": name_ref(name), "due_at_ms": due_ms, "receipts": []}
    waiting["timeline"] = [{**state["timeline"][0], "due_at_ms": due_ms}]
    await desk.js.publish(topology.state_subject(name_ref(name)), json.dumps(waiting).encode())
    record = await desk.ended(name_ref(name), HEALED_S)
    assert (record["status"], record["timeline"][0]["due_at_ms"]) == ("completed", due_ms)
    assert len(engine.of(name_ref(name))) == 1


async def test_an_elapsed_state_without_a_resume_is_handed_over(desk: Desk, service: Service) -> None:
    """ "elapsed" in the state, nothing in the stream: past the time-out the resume goes out, and is counted."""
    timer_ref = await start(desk, HOUR_MS, payload=LARGE)
    await rewritten(desk, timer_ref, lambda state: as_elapsed(state, now_ms()))
    async with Engine(desk, complete) as engine:
        assert (await engine.resume_of(timer_ref, within=HEALED_S))["payload"] == LARGE
        assert (await desk.ended(timer_ref, HEALED_S))["status"] == "completed"
        assert {received.resume_id for received in engine.of(timer_ref)} == {f"{timer_ref}.0"}
    assert (await repairs(service))["resume_repeated"] >= 1


async def test_a_resume_that_vanished_is_published_again(desk: Desk, service: Service) -> None:
    """Purged before anybody read it: the same resume comes again, with the same content."""
    timer_ref = await start(desk, 10)
    await eventually(lambda: _standing(desk), what="the resume in its stream")
    await desk.js.purge_stream(topology.RESUMES)
    async with Engine(desk, complete) as engine:
        await engine.resume_of(timer_ref, within=HEALED_S)
        assert (await desk.ended(timer_ref, HEALED_S))["status"] == "completed"
        assert len({received.data for received in engine.of(timer_ref)}) == 1


async def _standing(desk: Desk) -> bool:
    return await desk.count(topology.RESUMES) > 0


@pytest.mark.parametrize("archived", [False, True], ids=["receipt-only", "archived-not-removed"])
async def test_an_end_that_stopped_half_way_is_finished(desk: Desk, service: Service, archived: bool) -> None:
    """Receipt without archive, archive without removal: one record, no entry, no payload left, and it is counted."""
    timer_ref = await start(desk, HOUR_MS, payload=LARGE)
    before = (await repairs(service)).get("end_resumed", 0)
    if archived:  # first, as the service would: it finishes what it sees at once
        state = await desk.state(timer_ref)
        assert state is not None
        body = {**as_cancelled(state, now_ms()), "status": "cancelled"}
        body.pop("snapshot_seq")
        await desk.js.publish(topology.terminal_subject(timer_ref), json.dumps(body).encode())
    await rewritten(desk, timer_ref, lambda state: as_cancelled(state, now_ms()))
    assert (await desk.ended(timer_ref, HEALED_S))["status"] == "cancelled"
    assert await desk.records_of(timer_ref) == 1
    await eventually(partial(_no_snapshot, desk, timer_ref), HEALED_S)
    assert (await repairs(service))["end_resumed"] > before


async def _no_snapshot(desk: Desk, timer_ref: str) -> bool:
    return await desk.snapshots_of(timer_ref) == 0


async def test_only_what_nothing_refers_to_is_swept(desk: Desk, service: Service) -> None:
    """Payloads of losers go once their grace is over; those of waiting and elapsed timers, old or new, stay."""
    used = [await start(desk, HOUR_MS, payload=LARGE), await start(desk, 10, payload=LARGE)]
    orphans = [name_ref(unique()) for _ in range(70)]  # more than one batch
    for orphan in orphans:
        await desk.js.publish(topology.snapshot_subject(orphan, 0), b'{"lost":"race"}')
    await desk.js.publish(topology.snapshot_subject(used[0], 0), b'{"lost":"race of the same timer"}')

    async def swept() -> bool:
        return sum((await desk.subjects(topology.SNAPSHOTS, f"{topology.SNAPSHOT_PREFIX}>")).values()) == len(used)

    running: list[str] = []
    for _ in range(200):  # starts go on while it sweeps: theirs are younger than the grace, then referred to
        running.append(await start(desk, HOUR_MS, payload=LARGE))
        if await desk.snapshots_of(used[0]) == 1:
            break
        await asyncio.sleep(0.02)
    used += running
    await eventually(swept, HEALED_S, what="the sweep")
    for timer_ref in used:
        assert await desk.snapshots_of(timer_ref) == 1
    async with Engine(desk, complete) as engine:
        assert (await engine.resume_of(used[1], within=HEALED_S))["payload"] == LARGE


async def test_an_unreadable_entry_is_known_after_a_restart_too(stage: Stage, desk: Desk, service: Service) -> None:
    """Log, gauge, /readyz and `list --problems` tell of it; it stays as it is, and others fire beside it."""
    timer_ref = name_ref(unique())
    newer = b'{"v":99,"phase":"waiting"}'
    await desk.js.publish(topology.state_subject(timer_ref), newer)
    service.kill()
    service.start()
    await service.ready()
    assert service.details()["problems"] == 1
    assert service.metric("durable_timer_problems") == 1
    assert [line["timer_ref"] for line in service.events("state.unreadable")] == [timer_ref]
    (shown,) = Cli(stage.broker.url).lines("list", "--problems")
    assert (shown["timer_ref"], "99" in shown["problem"]) == (timer_ref, True)
    async with Engine(desk, complete):
        assert (await desk.ended(await start(desk, 10), HEALED_S))["status"] == "completed"
    entry = await desk.entry(timer_ref)
    assert entry is not None
    assert entry.data == newer
    await desk.js.purge_stream(topology.STATE_STREAM, subject=topology.state_subject(timer_ref))
    await eventually(lambda: service.details()["problems"] == 0, HEALED_S)


# -- an older copy ----------------------------------------------------------------------------------------------


class Copy:
    """What a broker has stored, kept and put back; the service on it is not told of either."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self._broker = broker
        self._stored = broker.data_dir / "jetstream"
        self._kept = folder / "copy"

    def take(self) -> None:
        """Keep what is stored now."""
        self._broker.stop()
        shutil.copytree(self._stored, self._kept)
        self._broker.start()

    def put_back(self) -> None:
        """The broker comes back with what was kept."""
        self._broker.kill()
        shutil.rmtree(self._stored)
        shutil.move(self._kept, self._stored)
        self._broker.start()


@pytest.mark.parametrize("traffic", ["none", "overtaking"])
async def test_an_older_copy_is_believed(broker: Broker, tmp_path: Path, traffic: str) -> None:
    """What the copy says waits, fires; what it does not know, does not; each once by state, and without a restart.

    Overtaking: new writes come at once, more than were lost, so that the stream's sequences alone tell nothing.
    """
    copy = Copy(broker, tmp_path)
    settings = {**SETTINGS, "reconcile_interval_ms": 24 * HOUR_MS}
    with Service(broker.url, tmp_path, "--test-clock", **settings) as service:
        pid = (await service.ready()).pid
        async with Desk.at(broker.url) as desk, Engine(desk) as engine:
            elapsed, done, cancelled, put_off, sooner, later = [
                await start(desk, delay_ms)
                for delay_ms in (10, HOUR_MS, 2 * HOUR_MS, 2 * HOUR_MS, 50 * HOUR_MS, 50 * HOUR_MS)
            ]
            resume = await engine.resume_of(elapsed)
            copy.take()
            await service.ready()
            assert (await engine.reply(resume, "complete"))["status"] == "accepted"
            an_hour_passes(service)
            await engine.reply(await engine.resume_of(done), "complete")
            assert (await desk.ask("cancel", timer_ref=cancelled))["status"] == "accepted"
            for timer_ref in (elapsed, done, cancelled):
                await desk.ended(timer_ref)
            unknown = await start(desk, HOUR_MS // 2)
            await replaced(desk, sooner, HOUR_MS // 2)
            await replaced(desk, put_off, 50 * HOUR_MS)
            last_seq = await desk.last_seq(topology.STATE_STREAM)
            copy.put_back()
            an_hour_passes(service)
            fresh: list[str] = []
            if traffic == "overtaking":
                await eventually(partial(_starts_answered, desk, fresh, 20))
                assert await desk.last_seq(topology.STATE_STREAM) > last_seq, "nothing was overtaken"
            for timer_ref in (elapsed, done, cancelled, put_off):
                again = await _resume_after(engine, timer_ref, 1 if timer_ref in (elapsed, done) else 0)
                assert (await engine.reply(again, "complete"))["status"] == "accepted"
                assert (await desk.ended(timer_ref, HEALED_S))["status"] == "completed"
                assert await desk.records_of(timer_ref) == 1
            await eventually(lambda: service.details()["armed"] == 2 + len(fresh), HEALED_S, what="the heap")
            assert engine.of(unknown) == engine.of(sooner) == engine.of(later) == []
            assert await desk.state(unknown) is None
            await service.ready()
            assert service.pid == pid
            assert service.running


def an_hour_passes(service: Service) -> None:
    assert service.http("/debug/clock", b'{"offset_ms": %d}' % HOUR_MS)[0] == 200


async def replaced(desk: Desk, timer_ref: str, delay_ms: int) -> None:
    """Begin the next generation of a waiting timer."""
    state = await desk.state(timer_ref)
    assert state is not None
    moved = await desk.ask("start", timer=state["timer"], due={"delay_ms": delay_ms})
    assert (moved["status"], moved["generation"]) == ("accepted", 1)


async def _starts_answered(desk: Desk, started: list[str], count: int) -> bool:
    while len(started) < count:
        started.append(await start(desk, HOUR_MS))
    return True


async def _resume_after(engine: Engine, timer_ref: str, known: int) -> dict[str, Any]:
    """A resume of a timer beyond those that were read already."""
    await eventually(lambda: len(engine.of(timer_ref)) > known, HEALED_S, what=f"another resume of {timer_ref}")
    (resume_id,) = {received.resume_id for received in engine.of(timer_ref)}
    assert resume_id == f"{timer_ref}.0"
    return engine.of(timer_ref)[-1].resume


async def test_deleted_consumers_come_back_under_load(desk: Desk, service: Service) -> None:
    """Both consumers deleted while hundreds of timers come and go: made anew, and each timer ends once."""
    names = [unique() for _ in range(300)]
    async with Engine(desk, complete) as engine:
        await desk.send_many(
            "start", [{"timer": {"name": name}, "due": {"delay_ms": 100 + 5 * n}} for n, name in enumerate(names)]
        )
        await eventually(lambda: len(engine.received) > 20)
        await desk.js.delete_consumer(topology.COMMANDS, topology.COMMAND_CONSUMER)
        await desk.js.delete_consumer(topology.SCHEDULES, topology.WAKE_CONSUMER)
        for name in names:
            assert (await desk.ended(name_ref(name), 30))["status"] == "completed"
            assert await desk.records_of(name_ref(name)) == 1
            assert len({received.data for received in engine.of(name_ref(name))}) == 1
    await service.ready()


async def test_a_state_bucket_made_anew_with_its_entries_is_followed(desk: Desk, service: Service) -> None:
    """Deleted, and filled again from a backup at other sequences: the heap follows what stands there now."""
    kept, gone = await start(desk, 4_000), await start(desk, 3_000)
    entry = await desk.entry(kept)
    assert entry is not None
    await desk.js.delete_stream(topology.STATE_STREAM)

    async def restored() -> bool:
        try:
            await desk.js.publish(topology.state_subject(kept), entry.data or b"", timeout=1)
        except Exception:
            return False
        return True

    await eventually(restored, HEALED_S, what="the bucket to be there again")
    async with Engine(desk, complete) as engine:
        assert (await desk.ended(kept, HEALED_S))["status"] == "completed"
        assert len(engine.of(kept)) == 1
        await eventually(lambda: service.details()["armed"] == 0, HEALED_S)
        assert engine.of(gone) == []
