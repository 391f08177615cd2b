"""Handing over: a resume comes again while nobody answers, and never stands twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from tests.support.service import Desk, Engine, Service, eventually, name_ref, now_ms, unique
from timer_service.jetstream import topology

SETTINGS = {"resume_timeout_ms": 500, "reconcile_interval_ms": 1_000}


@pytest.fixture
async def quiet(desk: Desk) -> AsyncIterator[Desk]:
    """Nothing of another test is left to resume."""
    yield desk
    async with Engine(desk, lambda _: ("complete", {})):
        await eventually(lambda: _nothing_armed(desk))


async def _nothing_armed(desk: Desk) -> bool:
    info = await desk.js.stream_info(topology.STATE_STREAM, subjects_filter=topology.STATE_FILTER)
    return all([await desk.state(s.removeprefix(topology.STATE_PREFIX)) is None for s in info.state.subjects or {}])


async def test_a_resume_without_an_answer_comes_again(quiet: Desk, service: Service) -> None:
    """The same id and the same content under another Nats-Msg-Id, at growing distances, until it is answered."""
    name = unique()
    async with Engine(quiet) as engine:
        await quiet.ask("start", timer={"name": name}, due={"delay_ms": 50}, payload={"large": "x" * 2_000})
        await eventually(lambda: len(engine.of(name_ref(name))) >= 3)
        received = engine.of(name_ref(name))
        assert len({one.data for one in received}) == 1
        assert len({one.msg_id for one in received}) == len(received)
        assert all(one.resume_id == f"{name_ref(name)}.0" for one in received)
        gaps = [b.stored_at_ms - a.stored_at_ms for a, b in pairwise(received)]
        assert gaps[0] >= 450
        assert gaps[1] >= 900
        assert (await engine.reply(received[0].resume, "complete"))["status"] == "accepted"
        record = await quiet.ended(name_ref(name))
        assert record["timeline"][0]["resumes"] == len(engine.of(name_ref(name)))
        count, ended_ms = len(received), now_ms()
        await eventually(lambda: now_ms() > ended_ms + 1_200)
        assert len(engine.of(name_ref(name))) == count
    assert service.metric("durable_timer_repairs_total", "resume_repeated") >= 2


async def test_no_copy_is_added_while_the_resume_stands_unread(quiet: Desk, service: Service) -> None:
    """An engine that is away finds one message for each timer, however long it was away."""
    names = [unique() for _ in range(3)]
    for name in names:
        await quiet.ask("start", timer={"name": name}, due={"delay_ms": 50})
    await eventually(lambda: _stand(quiet, 3))
    stood_ms = now_ms()
    await eventually(lambda: now_ms() > stood_ms + 2_500)
    assert await quiet.count(topology.RESUMES) == 3
    service.kill()  # who comes after a crash does not know where they stand
    service.start()
    await service.ready()
    ready_ms = now_ms()
    await eventually(lambda: now_ms() > ready_ms + 1_500)
    assert await quiet.count(topology.RESUMES) == 3


async def _stand(desk: Desk, count: int) -> bool:
    return await desk.count(topology.RESUMES) == count


async def test_a_resume_that_was_lost_is_published_again(quiet: Desk) -> None:
    """Deleted from the stream before anybody read it: it comes again by itself."""
    name = unique()
    await quiet.ask("start", timer={"name": name}, due={"delay_ms": 50})
    await eventually(lambda: _stand(quiet, 1))
    lost = await quiet.js.get_msg(topology.RESUMES, subject=topology.RESUME_SUBJECT)
    await quiet.js.purge_stream(topology.RESUMES)
    async with Engine(quiet) as engine:
        again = await engine.resume_of(name_ref(name))
        assert again == json.loads(lost.data or b"")


async def test_an_answer_that_comes_again_is_told_what_it_did(quiet: Desk) -> None:
    """A receiver that sends its stored answer for a duplicate of the resume heals a lost complete."""
    name = unique()
    async with Engine(quiet) as engine:
        await quiet.ask("start", timer={"name": name}, due={"delay_ms": 50})
        resume = await engine.resume_of(name_ref(name))
        await eventually(lambda: len(engine.of(name_ref(name))) == 2)
        first = await engine.reply(resume, "complete", command_id="once")
        second = await engine.reply(resume, "complete", command_id="once")
        assert (first["status"], second["status"], second["phase"]) == ("accepted", "duplicate", "completed")


async def test_a_payload_that_is_gone_is_reported_and_blocks_nobody(quiet: Desk, service: Service) -> None:
    """A snapshot deleted by hand: no resume with a wrong payload, a problem to see, others go on."""
    name, other = unique(), unique()
    await quiet.ask("start", timer={"name": name}, due={"delay_ms": 400}, payload="x" * 2_000)
    await quiet.js.purge_stream(topology.SNAPSHOTS, subject=f"{topology.SNAPSHOT_PREFIX}{name_ref(name)}.*")
    async with Engine(quiet) as engine:
        await quiet.ask("start", timer={"name": other}, due={"delay_ms": 400})
        await engine.resume_of(name_ref(other))
        await eventually(lambda: service.details()["problems"] == 1)
        assert engine.of(name_ref(name)) == []
        state = await quiet.state(name_ref(name))
        assert state is not None
        assert state["phase"] == "elapsed"
        outcome = await quiet.ask("start", timer={"name": name}, due={"delay_ms": 50}, payload="here")
        assert outcome["generation"] == 1
        assert (await engine.resume_of(name_ref(name), 1))["payload"] == "here"
        await eventually(lambda: service.details()["problems"] == 0)
