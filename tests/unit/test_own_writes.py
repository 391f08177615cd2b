"""Our own writes under every single fault: the reply lost, the write lost, the comparison lost. Nothing counts twice.

One life of a timer passes through every kind of write: start, wake, resume, retry, replace, late cancel, fail,
archive, removal, next start, cancel, complete, with a payload in the state and with one beside it. It is played once
for each call of each port and each fault at that call, and must come out the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.commands import NAME, REF
from tests.support.ring import Ring, fail_nth, play
from timer_service.domain.model import Timer
from timer_service.errors import Ambiguous, BrokerError, StorageFull, Unavailable, WrongRevision
from timer_service.wire.records import Outcome, Resume

LATER = {"delay_ms": 60_000}
LARGE = "x" * 2_000
FAULTS: dict[str, tuple[BrokerError, bool, int]] = {
    "reply lost": (Ambiguous("no reply"), True, 1),
    "write lost": (Ambiguous("no reply"), False, 1),
    "nobody there": (Unavailable("nobody"), False, 3),
    "storm": (WrongRevision("another was first"), False, 6),
}


class Life:
    """One life of a timer: what was told, what was resumed, what is remembered."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.outcomes: list[Outcome] = []
        self.resumes: list[Resume] = []

    async def ask(self, kind: str, **body: Any) -> None:
        self.outcomes.append(await self.ring.ask(kind, **body))

    async def answer(self, kind: str, generation: int, **body: Any) -> None:
        resume = await self.ring.resume(REF, generation)
        self.resumes.append(resume)
        await self.ask(kind, timer_ref=REF, generation=generation, fence=resume.fence, **body)

    async def run(self) -> None:
        await self.ask("start", timer=NAME, due=LATER, max_retries=2, payload=1)
        await self.answer("retry", 0)
        await self.ask("start", timer=NAME, due=LATER, payload=LARGE)
        await self.ring.resume(REF, 2)
        await self.ask("cancel", timer_ref=REF)
        await self.ask("start", timer=NAME, due=LATER, payload=LARGE, max_retries=1)
        await self.answer("fail", 3, failure_code="no")
        await self.ring.settle()
        await self.ask("start", timer=NAME, due=LATER, payload=LARGE)
        await self.ask("cancel", timer_ref=REF)
        await self.ring.settle()
        await self.ask("start", timer=NAME, due=LATER, payload=LARGE)
        await self.answer("complete", 5)
        await self.ring.settle()

    def told(self) -> list[tuple[Any, ...]]:
        return [(one.status, one.code, one.generation, one.fence, one.phase) for one in self.outcomes]

    def remembered(self) -> list[tuple[Any, ...]]:
        return [_told_by(record) for record in self.ring.archive.records(REF)]


def _told_by(record: Timer) -> tuple[Any, ...]:
    line = [(one.generation, one.answer, one.elapsed_at_ms is not None) for one in record.timeline]
    return record.status, record.generation, record.fence, record.retries_used, line, len(record.receipts)


async def _live(port: str | None = None, number: int = 0, fault: str = "") -> tuple[Life, int]:
    async with Ring() as ring:
        life = Life(ring)
        if port is not None:
            error, stored, times = FAULTS[fault]
            fail_nth(getattr(ring, port), number, error, stored=stored, times=times)
        await life.run()
        ring.sound()
        assert not ring.state.refs(), "an entry was left"
        calls = 0 if port is None else getattr(ring, port).calls
    return life, calls


@pytest.fixture(scope="module")
def usual() -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The life without a fault."""
    life, _ = play(_live())
    return life.told(), life.remembered()


def test_the_life_without_a_fault(usual: tuple[list[Any], list[Any]]) -> None:
    """The life that the faults are measured by is the one that the contract tells."""
    told, remembered = usual
    assert [one[:4] for one in told] == [
        ("accepted", None, 0, 1), ("accepted", None, 1, 3), ("accepted", None, 2, 4), ("accepted", "too_late", 2, 5),
        ("accepted", None, 3, 6), ("accepted", None, 3, 8), ("accepted", None, 4, 9), ("accepted", None, 4, 10),
        ("accepted", None, 5, 11), ("accepted", None, 5, 13),
    ]  # fmt: skip
    assert [one[:3] for one in remembered] == [("failed", 3, 8), ("cancelled", 4, 10), ("completed", 5, 13)]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("port", ["state", "archive", "snapshots", "resumes", "wakes"])
def test_a_fault_at_any_call_changes_nothing(usual: tuple[list[Any], list[Any]], port: str, fault: str) -> None:
    """Whichever call fails: the same outcomes, accepted once each, and the same records, one for each end."""
    number, calls = 0, 1
    while number < calls:
        life, calls = play(_live(port, number, fault))
        assert (life.told(), life.remembered()) == usual, f"call {number} of {port}"
        assert {resume.resume_id for resume in life.resumes} == {f"{REF}.0", f"{REF}.3", f"{REF}.5"}
        assert [bytes(resume.payload) for resume in life.resumes] == [b"1", *[f'"{LARGE}"'.encode()] * 2]
        if fault != "storm":  # which lasts longer than the window in which a second try is told from a second copy
            timelines = [record.timeline for record in life.ring.archive.records(REF)]
            assert max(one.resumes for timeline in timelines for one in timeline) == 1, "a resume was counted twice"
        number += 1
    assert number > 3, "no calls were made to fail"


@pytest.mark.parametrize("error", [StorageFull("full"), Unavailable("nobody"), Ambiguous("no reply")])
def test_a_refusal_that_cannot_be_recorded_is_refused_again(error: BrokerError) -> None:
    """The command stays queued until its rejection is stored; then its publisher is told, once."""

    async def story() -> None:
        async with Ring() as ring:
            ring.publicity.fail_next(error, times=3)
            seq = ring.send("complete", timer_ref=REF, generation=0, fence=1)
            await ring.settle()
            ring.sound()
            assert [outcome.code for outcome in ring.outcomes(seq)] == ["unknown_timer"]
            assert [rejection.code for rejection in ring.publicity.rejections] == ["unknown_timer"]
            assert ring.deliveries[seq] == 4

    play(story())


def test_a_broker_that_takes_nothing_for_a_minute_strands_nobody() -> None:
    """Every write fails far longer than one round of tries: commands, wake, resume and end go on afterwards."""

    async def story() -> None:
        async with Ring() as ring:
            for kind, body in (
                ("start", {"timer": NAME, "due": {"delay_ms": 3_600_000}}),
                ("cancel", {"timer_ref": REF}),
            ):
                ring.state.fail_next(Unavailable("away"), times=60)
                outcome = await ring.ask(kind, **body)
                assert outcome.status == "accepted"
                await ring.settle()
            ring.state.fail_next(Unavailable("away"), times=60)
            ring.archive.fail_next(Unavailable("away"), times=5)
            assert (await ring.ask("start", timer=NAME, due=LATER)).generation == 1
            ring.resumes.fail_next(Unavailable("away"), times=20)
            ring.wakes.fail_next(Unavailable("away"), times=20)
            resume = await ring.resume(REF, 1)
            ring.archive.fail_next(Unavailable("away"), times=5)
            await ring.ask("complete", timer_ref=REF, generation=1, fence=resume.fence)
            await ring.settle(600)
            ring.sound()
            assert [record.status for record in ring.archive.records(REF)] == ["cancelled", "completed"]
            assert not ring.state.refs()

    play(story())
