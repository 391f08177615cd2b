"""While nobody leads a stream nothing can be written; afterwards what is overdue fires within seconds."""

from __future__ import annotations

from tests.support.commands import REF, body_of
from tests.support.ring import Ring, play
from timer_service.errors import Unavailable

GONE = Unavailable("no stream takes this subject")


def test_an_outage_of_the_wakes_does_not_make_what_follows_late() -> None:
    """Wakes that never went out do not count: one that is lost afterwards comes again after 2 s, not after a minute."""

    async def story() -> None:
        async with Ring() as ring:
            ring.wakes.fail_next(GONE, times=8)
            ring.publish("durable_timer.commands.start.v1", body_of("start"))
            await ring.until(lambda: not ring.wakes._trouble, "eight failures")
            before_ms = ring.clock.now_ms()
            armed = ring.replicas[0].driver.get(REF)
            assert armed is not None
            assert armed.tries <= 1
            await ring.until(ring.resumes.standing, "the resume")
            assert ring.clock.now_ms() - before_ms < 3_000

    play(story())


def test_a_state_without_a_leader_is_tried_again_soon() -> None:
    """However often a wake could not be acted on, the next comes after 2 s."""

    async def story() -> None:
        async with Ring() as ring:
            first = ring.publish("durable_timer.commands.start.v1", body_of("start"))
            await ring.until(lambda: ring.outcomes(first), "an outcome")
            ring.state.fail_next(GONE, times=6)
            await ring.until(lambda: not ring.state._trouble, "six failures")
            before_ms = ring.clock.now_ms()
            await ring.until(ring.resumes.standing, "the resume")
            assert ring.clock.now_ms() - before_ms < 3_000

    play(story())
