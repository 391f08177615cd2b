"""Commands that are delivered again, in any order, through any replica, long after they took effect."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.support.commands import LINEAGE, NAME, REF
from tests.support.ring import Ring, play

LATER = {"delay_ms": 86_400_000}
ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "the same order": list,
    "backwards": lambda seqs: seqs[::-1],
    "shuffled": lambda seqs: random.Random(7).sample(seqs, len(seqs)),
}


async def _delivered_again(ring: Ring, seqs: list[int]) -> None:
    for seq in seqs:
        ring.deliver(seq)
        await asyncio.sleep(0)
    await asyncio.sleep(1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_forty_replaces_delivered_again(replicas: int, order: str) -> None:
    """No replace takes effect twice, also those whose ids the timer no longer remembers."""

    async def story() -> None:
        async with Ring(replicas) as ring:
            ring.lose_acks = True
            seqs = []
            for n in range(40):
                seqs.append(ring.send("start", timer=NAME, due=LATER, payload=n))
                await ring.until(lambda: ring.outcomes(seqs[-1]), "its outcome")
            stands = ring.state.peek(REF)
            await _delivered_again(ring, ORDERS[order](seqs))
            assert ring.state.peek(REF) == stands
            assert stands.timer is not None
            assert (stands.timer.generation, stands.timer.fence) == (39, 40)
            told = [outcome for seq in seqs for outcome in ring.outcomes(seq)[1:]]
            assert len(told) >= 40
            assert {(outcome.status, outcome.code) for outcome in told} <= {
                ("duplicate", None), ("accepted", "superseded")
            }  # fmt: skip
            assert ring.publicity.rejections == []
            ring.sound()

    play(story())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("expired", [False, True], ids=["marker stands", "marker ran out"])
def test_a_start_delivered_again_after_a_later_cancel(order: str, expired: bool) -> None:
    """Name or lineage, remembered or not: what was cancelled stays so, with one record."""

    async def story() -> None:
        async with Ring(2) as ring:
            ring.lose_acks = True
            refs, seqs = [], []
            for key in (NAME, LINEAGE):
                for n in range(20 if key is NAME else 1):
                    seqs.append(ring.send("start", timer=key, due=LATER, payload=n))
                    await ring.until(lambda: ring.outcomes(seqs[-1]), "its outcome")
                timer_ref = ring.outcomes(seqs[-1])[0].timer_ref
                refs.append(timer_ref)
                seqs.append(ring.send("cancel", timer_ref=timer_ref))
                await ring.until(lambda: ring.outcomes(seqs[-1]), "its outcome")
            await asyncio.sleep(3)
            if expired:
                ring.state.expire_markers()
            await _delivered_again(ring, ORDERS[order](seqs))
            assert ring.state.refs() == []
            assert [len(records) for records in ring.archive._records.values()] == [1, 1]
            assert ring.resumes.standing() == []
            ring.sound()

    play(story())
