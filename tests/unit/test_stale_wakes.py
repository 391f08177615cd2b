"""What comes after the end of a timer, whoever remembers it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.commands import LINEAGE, NAME, REF
from tests.support.ring import Ring, play
from timer_service.domain.identity import LineageKey, TimerRef, derive_timer_ref


def wake(timer_ref: TimerRef, generation: int = 0) -> bytes:
    return json.dumps({"v": 1, "timer_ref": timer_ref, "generation": generation, "woken_at_ms": 1}).encode()


@pytest.mark.parametrize("expired", [False, True], ids=["marker stands", "marker ran out"])
def test_a_wake_after_the_end_does_not_make_the_end_forgotten(expired: bool) -> None:
    """A start after such a wake takes the next generation, and a lineage stays ended."""

    async def story() -> None:
        async with Ring() as ring:
            for key in (NAME, LINEAGE):
                await ring.ask("start", timer=key, due={"delay_ms": 60_000})
            lineage = derive_timer_ref(LineageKey(**LINEAGE))
            for timer_ref in (REF, lineage):
                await ring.ask("cancel", timer_ref=timer_ref)
            await ring.settle()
            if expired:
                ring.state.expire_markers()
            for timer_ref in (REF, lineage):
                ring.wake(wake(timer_ref))
            await ring.settle()
            again = await ring.ask("start", timer=NAME, due={"delay_ms": 60_000})
            assert (again.status, again.generation, again.fence) == ("accepted", 1, 3)
            refused = await ring.ask("start", timer=LINEAGE, due={"delay_ms": 60_000})
            assert refused.code == "already_terminal"
            ring.sound()

    play(story())


def test_a_replica_that_missed_the_marker_asks_the_archive() -> None:
    """Another replica ended the timer, and its short marker ran out before this one looked: generation 1, not 0."""

    async def story() -> None:
        async with Ring(2, markers_ms=1_000) as ring:
            busy, calm = ring.replicas
            await ring.until(lambda: calm.feed.quiet, "a quiet feed")
            ring.replicas = [busy]
            await ring.ask("start", timer=NAME, due={"delay_ms": 60_000})
            await ring.ask("cancel", timer_ref=REF)
            await ring.settle()
            ring.state.expire_markers()
            ring.replicas = [calm]
            again = await ring.ask("start", timer=NAME, due={"delay_ms": 60_000})
            assert (again.status, again.generation, again.fence) == ("accepted", 1, 3)
            ring.replicas = [busy, calm]
            await asyncio.sleep(0)
            ring.sound()

    play(story())
