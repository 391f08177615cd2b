"""The test kit is no imitation: the same commands, on it and on a real service, end alike."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.support.service import Desk, Service, eventually, unique
from tests.support.stage import Stage
from timer_service.client import TimerClient
from timer_service.errors import CommandRejected
from timer_service.testkit import MemoryService

FLAGS = ("--test-clock",)
HOUR_MS, MINUTE_MS = 3_600_000, 60_000
Key = dict[str, str]
Step = tuple[str, Any]
SEEDS = range(12)
STEPS = 30
OUTCOME = ("command_id", "status", "code", "message", "generation", "fence", "phase")
RECORD = ("phase", "status", "generation", "fence", "retries_used", "max_retries", "payload", "failure_code", "message")
"""What does not depend on the hour. Due times follow it: they are compared as distances."""


class Side:
    """One of the two: a client, and a way to let hours pass."""

    def __init__(self, client: TimerClient, keys: list[Key]) -> None:
        self._client = client
        self._keys = keys

    async def pass_hours(self, hours: int) -> None:
        raise NotImplementedError

    async def do(self, kind: str, timer: int, **fields: Any) -> list[Any]:
        """Send a command and return what was said about it, without what differs by nature."""
        try:
            outcome = await getattr(self._client, kind)(self._keys[timer], **fields)
        except CommandRejected as rejected:
            outcome = rejected.outcome
        if isinstance(outcome, bool):
            return [outcome]
        return [getattr(outcome, field) for field in OUTCOME]

    async def stands(self, timer: int) -> dict[str, Any] | None:
        """How a timer stands; the times in it are minutes from its first acceptance, rounded."""
        record = await self._client.get(self._keys[timer])
        if record is None:
            return None
        timeline, first_ms = record["timeline"], record["timeline"][0]["accepted_at_ms"]
        lives = [
            (one["generation"], one["answer"], round((one["due_at_ms"] - first_ms) / MINUTE_MS), one["resumes"])
            for one in timeline
        ]
        return {field: record.get(field) for field in RECORD} | {"timeline": lives}


class Memory(Side):
    """The test kit."""

    def __init__(self, service: MemoryService, keys: list[Key]) -> None:
        super().__init__(service.client, keys)
        self._service = service

    async def pass_hours(self, hours: int) -> None:
        await self._service.advance(hours * HOUR_MS)


class Real(Side):
    """A service on a broker, with a test clock. Nobody reads the resumes."""

    def __init__(self, client: TimerClient, keys: list[Key], service: Service) -> None:
        super().__init__(client, keys)
        self._service = service

    async def pass_hours(self, hours: int) -> None:
        body = b'{"offset_ms": %d}' % (hours * HOUR_MS)
        code, answer = await asyncio.to_thread(self._service.http, "/debug/clock", body)
        assert code == 200, json.loads(answer)


def keys(run: str) -> list[Key]:
    """Two names, one of them in a namespace, and a lineage."""
    lineage = {"flow_id": "f", "flow_version": "1", "root_execution_id": run, "node_id": "n"}
    return [{"name": run}, {"name": run, "namespace": "other"}, lineage]


def story(chance: random.Random) -> list[Step]:
    """Steps as a careless user might take them; feedback mostly fits, so that something comes of it."""
    return [_step(chance, f"c{number}") for number in range(STEPS)]


def _step(chance: random.Random, command_id: str) -> Step:
    if chance.random() < 0.2:
        return "pass", chance.choice([1, 2, 5])
    kind = chance.choice(["start", "start", "start", "cancel", "delete", "complete", "retry", "retry", "fail"])
    fields: dict[str, Any] = {"timer": chance.randrange(3)}
    if kind != "delete":
        fields["command_id"] = command_id if chance.random() < 0.9 else f"c{chance.randrange(5)}"
    fields |= _FIELDS[kind](chance)
    return kind, fields


def _start(chance: random.Random) -> dict[str, Any]:
    return {
        "delay_ms": chance.choice([0, 1, 2, 3]) * HOUR_MS + chance.choice([0, HOUR_MS // 2]),
        "max_retries": chance.choice([0, 1, None]),
        "payload": chance.choice([None, {"n": 1}, "x" * 2_000]),
        "if_exists": chance.choice([None, None, "reject", "replace"]),
    }


def _cancel(chance: random.Random) -> dict[str, Any]:
    return {"generation": chance.choice([None, None, 0, 1]), "wait_ms": 0, "reason": chance.choice([None, "why"])}


def _feedback(chance: random.Random) -> dict[str, Any]:
    return {"off": chance.choice([(0, 0)] * 5 + [(1, 0), (0, 1)])}


def _retry(chance: random.Random) -> dict[str, Any]:
    return _feedback(chance) | {"delay_ms": chance.choice([None, HOUR_MS, HOUR_MS * 2 + HOUR_MS // 2])}


def _fail(chance: random.Random) -> dict[str, Any]:
    return _feedback(chance) | {"failure_code": "no", "message": chance.choice([None, "because"])}


_FIELDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "start": _start, "cancel": _cancel, "delete": lambda _: {}, "complete": _feedback, "retry": _retry, "fail": _fail,
}  # fmt: skip


async def _fitted(side: Side, fields: dict[str, Any]) -> dict[str, Any]:
    """Feedback as the resume of the present occurrence would have it, or off by what was chosen."""
    if "off" not in fields:
        return fields
    stands = await side.stands(fields["timer"]) or {"generation": 0, "fence": 1}
    given = {name: value for name, value in fields.items() if name != "off"}
    generation, fence = fields["off"]
    return given | {"generation": stands["generation"] + generation, "fence": stands["fence"] + fence}


@pytest.fixture
async def timers(desk: Desk, stage: Stage) -> AsyncIterator[TimerClient]:
    async with await TimerClient.connect(stage.broker.url) as client:
        yield client


@pytest.mark.parametrize("seed", SEEDS)
async def test_any_story_ends_alike(service: Service, timers: TimerClient, seed: int) -> None:
    """Outcome by outcome, and state by state after each: answers, generations, fences, retries, payloads, timelines."""
    named, told = keys(unique()), list[str]()
    async with MemoryService() as memory:
        kit, real = Memory(memory, named), Real(timers, named, service)
        for kind, fields in story(random.Random(seed)):
            told.append(f"{kind} {str(fields)[:200]}")
            if kind == "pass":
                await asyncio.gather(kit.pass_hours(fields), real.pass_hours(fields))
            else:
                fitted = await _fitted(kit, fields)
                expected, seen = await kit.do(kind, **fitted), await real.do(kind, **fitted)
                assert seen == expected, "\n".join(told)
            for timer in range(3):
                await _agree(kit, real, timer, told)


async def _agree(kit: Side, real: Side, timer: int, told: list[str]) -> None:
    """The kit has come to rest; the real one gets there."""
    expected = await kit.stands(timer)
    seen = None

    async def alike() -> bool:
        nonlocal seen
        seen = await real.stands(timer)
        return seen == expected

    try:
        await eventually(alike, 20, every=0.005)
    except AssertionError:
        assert seen == expected, "\n".join(told)
        raise
