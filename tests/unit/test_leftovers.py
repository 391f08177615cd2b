"""Resumes that were answered before anybody read them leave the stream; what may still be needed stays."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.support.ring import Log, Ring, play
from timer_service.domain.identity import TimerRef
from timer_service.domain.model import JsonText
from timer_service.errors import Unavailable
from timer_service.runtime.leftovers import Leftovers
from timer_service.wire.records import resume_of

HOUR_MS = 3_600_000


def leftovers(ring: Ring, replica: int = 0) -> Leftovers:
    return Leftovers(
        ring.state, ring.archive, ring.resumes, ring.replicas[replica].driver, ring.replicas[replica].metrics, Log()
    )


async def elapsed(ring: Ring, name: str, **fields: Any) -> TimerRef:
    """A timer whose resume stands unread."""
    outcome = await ring.ask("start", timer={"name": name}, due={"delay_ms": 10}, **fields)
    ref = TimerRef(outcome.timer_ref or "")
    await ring.until(lambda: any(one.timer_ref == ref for one in ring.resumes.standing()), "the resume")
    return ref


def test_what_was_answered_is_dropped_and_the_rest_stays() -> None:
    """Completed, failed and replaced occurrences are over; one that nobody answered is not."""

    async def story() -> None:
        async with Ring(1) as ring:
            kept = await elapsed(ring, "kept")
            completed, failed, replaced = [await elapsed(ring, name) for name in ("completed", "failed", "replaced")]
            await ring.ask("complete", timer_ref=completed, generation=0, fence=2)
            await ring.ask("fail", timer_ref=failed, generation=0, fence=2, failure_code="no")
            await ring.ask("start", timer={"name": "replaced"}, due={"delay_ms": HOUR_MS})
            await leftovers(ring).sweep()
            assert [one.timer_ref for one in ring.resumes.standing()] == [kept]
            assert replaced != kept
            assert (
                ring.replicas[0].metrics.registry.get_sample_value(
                    "durable_timer_repairs_total", {"kind": "resume_dropped"}
                )
                == 3
            )
            await ring.settle()
            ring.sound()

    play(story())


def test_what_is_elapsed_stays_also_for_a_process_that_does_not_know_it() -> None:
    """The stored state decides, not what the process has armed."""

    async def story() -> None:
        async with Ring(1) as ring:
            ref = await elapsed(ring, "elapsed")
            ring.replicas[0].driver.disarm(ref, 2**60)
            await leftovers(ring).sweep()
            assert len(ring.resumes.standing()) == 1

    play(story())


def test_a_resume_whose_timer_is_not_known_stays() -> None:
    """Neither state nor record: then it may be the last word of that timer, as after the loss of the bucket."""

    async def story() -> None:
        async with Ring(1) as ring:
            ref = await elapsed(ring, "lost")
            timer = ring.state.peek(ref).timer
            assert timer is not None
            stranger = replace(resume_of(timer, JsonText(b"null")), resume_id=f"{'b' * 26}.0")
            await ring.resumes.publish(stranger, 0)
            await ring.resumes.publish(replace(stranger, resume_id="not one of ours"), 0)
            await ring.ask("complete", timer_ref=ref, generation=0, fence=2)
            await ring.settle()
            ring.archive.expire(ref)
            await leftovers(ring).sweep()
            assert len(ring.resumes.standing()) == 3

    play(story())


def test_an_unreadable_state_and_a_broker_that_is_away_change_nothing() -> None:
    """It is tried again at the next scan."""

    async def story() -> None:
        async with Ring(1) as ring:
            broken, done = await elapsed(ring, "broken"), await elapsed(ring, "done")
            await ring.ask("complete", timer_ref=done, generation=0, fence=2)
            await ring.settle()
            ring.state.overwrite(broken, b"{")
            ring.resumes.fail_next(Unavailable("away"))
            await leftovers(ring).sweep()
            assert len(ring.resumes.standing()) == 2
            await leftovers(ring).sweep()
            assert [one.timer_ref for one in ring.resumes.standing()] == [broken]

    play(story())
