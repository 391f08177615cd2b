"""What clocks do to a whole service, in a time that takes no time: steps back (C34) and shifts (C35)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support import ring as rings
from tests.support.ring import T0_MS, Ring, play
from timer_service.clock import Clock, OffsetClock, SystemClock
from timer_service.domain.identity import TimerRef
from timer_service.errors import Unavailable

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS


class Wall:
    """A machine whose wall clock can be set while time goes on."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.step_s = 0.0
        self.clock = SystemClock(lambda: T0_MS / 1000 + loop.time() + self.step_s, loop.time)


def ring_with(clock: Clock, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Ring:
    """A ring whose one clock is ``clock``."""
    monkeypatch.setattr(rings, "LoopClock", lambda: clock)
    made = Ring(1, **settings)
    if isinstance(clock, OffsetClock):
        clock.on_shift(made.replicas[0].driver.wake)
    return made


async def start(ring: Ring, name: str, delay_ms: int) -> TimerRef:
    outcome = await ring.ask("start", timer={"name": name}, due={"delay_ms": delay_ms})
    return TimerRef(outcome.timer_ref or "")


async def elapsed(ring: Ring, ref: TimerRef) -> Any:
    """Wait until a timer has elapsed; returns its state."""

    def look() -> Any:
        timer = ring.state.peek(ref).timer
        return timer if timer is not None and timer.phase == "elapsed" else None

    return await ring.until(look, f"{ref} to elapse", 3 * YEAR_MS / 1000)


async def scans_within(ring: Ring, ms: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many scans the reconciler makes while so much time passes."""
    feed, scans = ring.replicas[0].feed, 0
    usual = feed.rescan

    async def counted(*, distrust: bool) -> Any:
        nonlocal scans
        scans += 1
        return await usual(distrust=distrust)

    with monkeypatch.context() as patch:
        patch.setattr(feed, "rescan", counted)
        await asyncio.sleep(ms / 1000)
    return scans


@pytest.mark.parametrize("step_s", [-3_600.0, -5.0, -1e6])
def test_c34_a_wall_clock_that_steps_back_stops_nothing(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After arming +10 s: it fires when ten seconds have passed, not before and not when the wall clock has caught up.
    Resumes are repeated and scans are made as if nothing had been."""

    async def story() -> None:
        wall, loop = Wall(), asyncio.get_running_loop()
        async with ring_with(wall.clock, monkeypatch) as ring:
            armed_s = loop.time()
            ref = await start(ring, "a", 10_000)
            wall.step_s = step_s
            timer = await elapsed(ring, ref)
            assert 10.0 <= loop.time() - armed_s < 11.0
            assert 0 <= timer.current.lateness_ms < 100
            await ring.resume(ref, 0)
            await ring.resume(ref, 0)
            assert 70.0 <= loop.time() - armed_s < 71.0
            assert await scans_within(ring, HOUR_MS, monkeypatch) == 1
            ring.sound()

    play(story())


def test_c34_a_wall_clock_that_steps_forward_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was suspended, or a clock that is set: what became due fires within the driver's longest sleep."""

    async def story() -> None:
        wall, loop = Wall(), asyncio.get_running_loop()
        async with ring_with(wall.clock, monkeypatch) as ring:
            ref = await start(ring, "a", 2 * HOUR_MS)
            await asyncio.sleep(1)
            wall.step_s = 3 * HOUR_MS / 1000
            began_s = loop.time()
            await elapsed(ring, ref)
            assert loop.time() - began_s <= 30.0

    play(story())


def test_c35_a_shift_in_every_kind_of_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """+10 years: a timer that waits elapses, an unanswered resume is repeated, each once and at once; a wake that
    fails then is not put off by it; the next repetition is at most an hour of shifted time away."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        clock = OffsetClock(SystemClock(lambda: T0_MS / 1000 + loop.time(), loop.time))
        async with ring_with(clock, monkeypatch) as ring:
            unanswered, waiting = await start(ring, "unanswered", 10), await start(ring, "waiting", 9 * YEAR_MS)
            beyond = await start(ring, "beyond", 11 * YEAR_MS)
            await ring.resume(unanswered, 0)
            began_s = loop.time()
            ring.wakes.fail_next(Unavailable("away"))
            clock.shift(10 * YEAR_MS)
            await ring.resume(unanswered, 0)
            await elapsed(ring, waiting)
            await ring.resume(waiting, 0)
            assert loop.time() - began_s < 1.5  # the wake that failed comes again after a second
            timer = ring.state.peek(beyond).timer
            assert timer is not None
            assert timer.phase == "waiting"
            assert ring.resumes.read() is None
            await asyncio.sleep(50)
            assert ring.resumes.read() is None
            await ring.resume(waiting, 0)
            assert loop.time() - began_s < 65  # 60 s after it elapsed by the shifted clock
            await ring.resume(unanswered, 0)
            assert loop.time() - began_s < HOUR_MS / 1000 + 5
            ring.sound()

    play(story())


def test_c35_a_shift_over_many_intervals_makes_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan that is due by then is made once, not once for every interval that was skipped."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        clock = OffsetClock(SystemClock(lambda: T0_MS / 1000 + loop.time(), loop.time))
        async with ring_with(clock, monkeypatch) as ring:
            await asyncio.sleep(10)
            clock.shift(10 * YEAR_MS)
            assert await scans_within(ring, HOUR_MS - 10_000, monkeypatch) == 1
            assert await scans_within(ring, 20_000, monkeypatch) == 1

    play(story())
