"""Time out of joint, seen from outside: far due times, shifts, frozen processes, restarts (C26, C34, C35)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.chaos.test_cycles import IDLE_SHARE
from tests.support.cpu import rests
from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, now_ms, unique
from timer_service.clock import MAX_OFFSET_MS

FLAGS = ("--test-clock",)
DAY_MS = 86_400_000
TEN_YEARS_MS = 3_653 * DAY_MS


async def started(desk: Desk, *delays_ms: int) -> list[str]:
    """Timers of a name each; returns their timer_refs."""
    names = [unique() for _ in delays_ms]
    for name, delay_ms in zip(names, delays_ms, strict=True):
        await desk.ask("start", timer={"name": name}, due={"delay_ms": delay_ms}, max_retries=3)
    return [name_ref(name) for name in names]


def shift(service: Service, by_ms: int) -> tuple[int, dict[str, Any]]:
    code, answer = service.http("/debug/clock", b'{"offset_ms": %d}' % by_ms)
    return code, json.loads(answer)


def offset(service: Service) -> int:
    return int(json.loads(service.http("/debug/clock")[1])["offset_ms"])


async def counts(engine: Engine, refs: list[str]) -> list[int]:
    return [len(engine.of(ref)) for ref in refs]


def order(engine: Engine, refs: list[str]) -> list[str]:
    """Which of them were resumed, in order, repetitions included."""
    return [one.resume["timer_ref"] for one in engine.received if one.resume["timer_ref"] in refs]


# -- C26 ------------------------------------------------------------------------------------------------------


async def test_c26_far_due_times_wait_and_cost_nothing(desk: Desk, service: Service) -> None:
    """+3 s, +25 days, +400 days: the first fires alone, the processor rests, and 25 days on the second fires alone."""
    async with Engine(desk, complete) as engine:
        refs = await started(desk, 3_000, 25 * DAY_MS, 400 * DAY_MS)
        await engine.resume_of(refs[0], within=20)
        await rests(service.pid, IDLE_SHARE)
        assert await counts(engine, refs) == [1, 0, 0]
        assert shift(service, 25 * DAY_MS)[0] == 200
        await engine.resume_of(refs[1], within=20)
        await desk.ended(refs[1], 20)
        assert await counts(engine, refs) == [1, 1, 0]
        await rests(service.pid, IDLE_SHARE)
        waiting = await desk.state(refs[2])
        assert waiting is not None
        assert waiting["phase"] == "waiting"


# -- C34 ------------------------------------------------------------------------------------------------------


async def frozen_before_due(desk: Desk, service: Service) -> tuple[list[str], int]:
    """Freeze the service while three timers wait, the last started the first due; where that takes long, once more with
    more time. Returns them, and when the last one is due by our own clock."""
    ahead_ms = offset(service)
    for margin_ms in (800, 5_000, 20_000):
        first_ms = now_ms() + margin_ms
        dues_ms = [first_ms + more_ms for more_ms in (400, 200, 0)]
        names = [unique() for _ in dues_ms]
        for name, due_ms in zip(names, dues_ms, strict=True):
            await desk.ask("start", timer={"name": name}, due={"at_ms": due_ms + ahead_ms})
        service.pause()
        if now_ms() < first_ms:
            return [name_ref(name) for name in names], dues_ms[0]
        service.resume()
    raise AssertionError("three starts took more than 20 s")


async def test_c34_frozen_over_the_deadline_the_rest_goes_on(desk: Desk, service: Service) -> None:
    """SIGSTOP across the due times, SIGCONT: each once, none early, in due order; what is due later waits for its time,
    and the service is ready again, with its lease, and takes commands."""
    async with Engine(desk, complete) as engine:
        (later,) = await started(desk, DAY_MS)
        refs, last_due_ms = await frozen_before_due(desk, service)
        await eventually(lambda: now_ms() > last_due_ms + 1_000, 40)
        assert await counts(engine, refs) == [0, 0, 0]
        service.resume()
        records = [await desk.ended(ref, 30) for ref in refs]
        await service.ready()
        await eventually(lambda: service.details()["role"] == "driver", 30)
        soon = (await started(desk, 200))[0]
        await desk.ended(soon, 30)
        assert await counts(engine, [*refs, later, soon]) == [1, 1, 1, 0, 1]
        assert order(engine, refs) == [refs[2], refs[1], refs[0]]
    assert all(record["timeline"][0]["lateness_ms"] >= 1_000 for record in records)


# -- C35 ------------------------------------------------------------------------------------------------------


async def test_c35_ten_years_on_in_the_middle_of_a_backoff(desk: Desk, service: Service) -> None:
    """An unanswered resume waits to be repeated, timers wait to be due: after the shift each of them once, in due
    order; what lies beyond waits on, and no due time is made up for twice."""
    async with Engine(desk) as engine:
        (unanswered,) = await started(desk, 50)
        await engine.resume_of(unanswered, within=20)
        refs = await started(desk, 8 * 365 * DAY_MS, DAY_MS, 9 * 365 * DAY_MS, 11 * 365 * DAY_MS)
        scans = len(service.events("reconcile.scanned"))
        assert shift(service, TEN_YEARS_MS)[0] == 200
        await eventually(lambda: len(engine.of(unanswered)) == 2, 20, what="the repeated resume")
        for ref in refs[:3]:
            await engine.resume_of(ref, within=20)
        await eventually(lambda: len(service.events("reconcile.scanned")) > scans, 20, what="the scan that is due")
        await asyncio.sleep(3)  # two looks of the reconciler, and whatever would come again too soon
        assert await counts(engine, [*refs, unanswered]) == [1, 1, 1, 0, 2]
        assert len(service.events("reconcile.scanned")) == scans + 1
        assert order(engine, refs) == [refs[1], refs[0], refs[2]]
        assert len({one.data for one in engine.of(unanswered)}) == 1
        assert service.details()["role"] == "driver"
        assert service.readyz()[0] == 200
        answers = [await engine.reply(engine.of(ref)[0].resume, "complete") for ref in (*refs[:3], unanswered)]
        assert {answer["status"] for answer in answers} == {"accepted"}


async def test_c35_the_offset_is_gone_after_a_restart(desk: Desk, service: Service) -> None:
    """What was due by the shifted clock and fired stays fired; what was started under it waits for its due time."""
    async with Engine(desk, complete) as engine:
        (before,) = await started(desk, DAY_MS)
        shift(service, DAY_MS)
        await desk.ended(before, 20)
        (under,) = await started(desk, 1_000 + 30 * DAY_MS)
        service.kill()
        service.start()
        await service.ready()
        assert offset(service) == 0
        (fresh,) = await started(desk, 300)
        await desk.ended(fresh, 20)
        assert await counts(engine, [before, under, fresh]) == [1, 0, 1]
        state = await desk.state(under)
        assert state is not None
        assert shift(service, state["due_at_ms"] - now_ms())[0] == 200
        await desk.ended(under, 20)
        assert await counts(engine, [before, under, fresh]) == [1, 1, 1]


async def test_c35_senseless_shifts_among_good_ones(desk: Desk, service: Service) -> None:
    """Twenty good and twenty bad at the same time: the good add up, the bad are 400 and change nothing."""
    before = offset(service)
    bodies = [*[b'{"offset_ms": 10}'] * 20]
    for bad in (b'{"offset_ms": -10}', b'{"offset_ms": 0.5}', b'{"offset_ms": %d}' % (MAX_OFFSET_MS + 1), b"{", b"nan"):
        bodies += [bad] * 4
    async with Engine(desk, complete) as engine:
        (due,) = await started(desk, 30 * DAY_MS)
        codes = [code for code, _ in await asyncio.gather(
            *(asyncio.to_thread(service.http, "/debug/clock", body) for body in bodies)
        )]  # fmt: skip
        assert codes == [200] * 20 + [400] * 20
        assert offset(service) == before + 200
        assert shift(service, MAX_OFFSET_MS - offset(service) + 1)[0] == 400  # each alone is fine, both are absurd
        assert service.http("/debug/clock", method="PUT")[0] == 405
        assert shift(service, 0) == (200, {"offset_ms": before + 200})
        assert engine.of(due) == []


# -- restarts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_two_restarts_with_three_pending_timers(desk: Desk, service: Service, how: str) -> None:
    """Started last due first; restarted twice while all wait: once each, in deadline order."""
    async with Engine(desk, complete) as engine:
        refs = await started(desk, 30 * DAY_MS, 20 * DAY_MS, 10 * DAY_MS)
        last = await desk.state(refs[0])
        assert last is not None
        for _ in range(2):
            getattr(service, how)()
            service.start()
            await service.ready()
            assert await counts(engine, refs) == [0, 0, 0]
        assert shift(service, last["due_at_ms"] - now_ms())[0] == 200
        for ref in refs:
            await desk.ended(ref, 20)
        assert order(engine, refs) == refs[::-1]
