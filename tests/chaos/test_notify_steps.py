"""Case C03, the notify consumer's part: it ends, or stands still, at each step of a hand-off. With a real service.

Every handler answers Retry, so a second transition for one resume would show as a second generation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from notify_consumer.outbox.base import State
from tests.support.notify import resume_body, until
from tests.support.notify_crew import Crew
from tests.support.notify_steps import STEPS
from tests.support.outbox_urls import on_all_stores, on_two_stores, outbox_url
from tests.support.service import Desk, Service, unique
from tests.support.stage import Stage

__all__ = ["outbox_url"]

# Step at which the process is killed: how often the handler runs in the end, and how often the feedback may be sent.
KILLED = {
    "acked": (1, {1}),
    "claimed": (1, {1}),
    "handling": (2, {1}),
    "handled": (2, {1}),
    "answered": (1, {1}),
    "published": (1, {2}),
    "settled": (1, {2}),
    "done": (1, {1}),
    # Not acknowledged, so delivered again, which takes a while: these two come last. By then the row may be done.
    "inserted": (1, {1, 2}),
    "stored": (1, {1}),
}


@pytest.fixture
async def crew(stage: Stage, tmp_path: Path, outbox_url: str) -> AsyncIterator[Crew]:
    async with Crew.at(stage.broker.url, tmp_path, outbox_url) as made:
        made.answer = None  # the service answers
        yield made


def sent(crew: Crew, name: str) -> list[str]:
    """What was sent to the timer service for a timer."""
    timer_ref = resume_body(name)["timer_ref"]
    return [str(command) for command in crew.commands if command[1].get("timer_ref") == timer_ref]


async def transitions(desk: Desk, name: str) -> tuple[int, int]:
    """How often the timer has gone into a next generation, by both of its counts."""
    state = await desk.state(resume_body(name)["timer_ref"])
    assert state is not None
    return state["generation"], state["retries_used"]


async def start(desk: Desk, name: str) -> None:
    """A timer that elapses at once, and may be retried."""
    await desk.ask("start", timer={"name": name}, due={"delay_ms": 1}, max_retries=None)


@on_two_stores
async def test_c03_killed_at_every_step_of_a_hand_off(crew: Crew, desk: Desk, service: Service) -> None:
    """SIGKILL at each step, the next process finishes: the handler runs again only if its answer was not stored."""
    assert sorted(KILLED) == sorted(STEPS)
    before = service.metric("durable_timer_commands_total", "", "retry", "accepted")
    names = {step: unique(f"step-{step}") for step in KILLED}
    former: str | None = None
    for step, name in names.items():
        consumer = await crew.held_consumer(step, name)
        if former is not None:
            await crew.reaches(State.DONE, former)
        await start(desk, name)
        await crew.holds(step)
        if step not in ("stored", "inserted"):
            await crew.all_read()
        await consumer.killed()
        former = name
    await crew.consumer("last")
    assert former is not None
    await crew.reaches(State.DONE, former)
    await crew.all_read()
    for step, (calls, sends) in KILLED.items():
        name = names[step]
        assert crew.begun().count(name) == calls, step
        assert len(sent(crew, name)) in sends, step
        assert len(set(sent(crew, name))) == 1, step
        assert await transitions(desk, name) == (1, 1), step
    accepted = service.metric("durable_timer_commands_total", "", "retry", "accepted")
    assert accepted - before == len(STEPS)


@on_all_stores
async def test_frozen_with_an_answer_that_is_not_stored(crew: Crew, desk: Desk) -> None:
    """SIGSTOP past the lease just after the handler: another hands the same resume off; the frozen one is refused."""
    name = unique("step-frozen")
    frozen = await crew.held_consumer("handled", name, HOLD_FREEZE="yes")
    await start(desk, name)
    await crew.holds("handled")
    await crew.consumer("second", lease_ms=60_000)
    row = await crew.reaches(State.DONE, name)
    frozen.thaw()
    await until(frozen.lost, "the frozen one is refused")
    assert await crew.row(name) == row
    assert (row.attempts, row.settled) == (2, "accepted")
    assert crew.begun() == [name] * 2
    assert (len(sent(crew, name)), await transitions(desk, name)) == (1, (1, 1))


@on_two_stores
async def test_frozen_with_an_answer_that_is_stored(crew: Crew, desk: Desk) -> None:
    """SIGSTOP past the lease just before the feedback: another sends it; the frozen one's copy changes nothing."""
    name = unique("step-frozen")
    frozen = await crew.held_consumer("answered", name, HOLD_FREEZE="yes")
    await start(desk, name)
    await crew.holds("answered")
    await crew.consumer("second", lease_ms=60_000)
    row = await crew.reaches(State.DONE, name)
    frozen.thaw()
    await until(frozen.lost, "the frozen one is refused")
    assert await crew.row(name) == row
    assert (row.attempts, row.settled) == (1, "accepted")
    assert crew.begun() == [name]
    assert len(set(sent(crew, name))) == 1
    assert await transitions(desk, name) == (1, 1)
