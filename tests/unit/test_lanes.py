"""Work for one timer runs one piece at a time and in order; other timers do not wait for it."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import pytest

from timer_service.domain.identity import TimerRef
from timer_service.fibers import Pending
from timer_service.runtime.lanes import Lanes, Work

A, B = TimerRef("a" * 26), TimerRef("b" * 26)


class Bench:
    """Lanes, what ran in them, and what went wrong."""

    def __init__(self) -> None:
        self.errors: list[tuple[TimerRef, BaseException]] = []
        self.lanes = Lanes(lambda key, error: self.errors.append((key, error)))
        self.log: list[str] = []

    def piece(self, name: str, wait_for: Awaitable[object] | None = None, error: BaseException | None = None) -> Work:
        """Work that notes its begin and its end, waits between them, and may end in an error."""

        async def work() -> None:
            self.log.append(f"{name}+")
            if wait_for is not None:
                await wait_for
            if error is not None:
                raise error
            self.log.append(f"{name}-")

        return work


def stack_depth() -> int:
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_an_idle_lane_runs_at_once(bench: Bench):
    """Work for a timer that has none starts in the stack of the caller, and the lane is gone after it."""
    bench.lanes.run(A, bench.piece("1"))
    assert bench.log == ["1+", "1-"]
    assert len(bench.lanes) == 0


async def test_one_at_a_time_in_order_of_arrival(bench: Bench):
    """While one piece waits the next of the same timer has not begun; then they follow without overlap."""
    waits: list[Pending[None]] = [Pending(), Pending(), Pending()]
    for number, wait in enumerate(waits):
        bench.lanes.run(A, bench.piece(str(number), wait))
    assert bench.log == ["0+"]
    waits[1].resolve(None)
    assert bench.log == ["0+"]
    waits[0].resolve(None)
    assert bench.log == ["0+", "0-", "1+", "1-", "2+"]
    waits[2].resolve(None)
    assert bench.log[-1] == "2-"
    assert len(bench.lanes) == 0


async def test_others_do_not_wait(bench: Bench):
    """A timer whose work waits holds up nobody else."""
    wait: Pending[None] = Pending()
    bench.lanes.run(A, bench.piece("a", wait))
    bench.lanes.run(B, bench.piece("b"))
    assert bench.log == ["a+", "b+", "b-"]
    assert len(bench.lanes) == 1
    wait.resolve(None)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "exit"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_piece_that_raises_does_not_stop_its_lane(bench: Bench, error: BaseException, at_once: bool):
    """It is reported with its timer, and the next piece runs."""
    wait: Pending[None] = Pending()
    bench.lanes.run(A, bench.piece("1", None if at_once else wait, error))
    bench.lanes.run(A, bench.piece("2"))
    wait.resolve(None)
    assert bench.errors == [(A, error)]
    assert bench.log == ["1+", "2+", "2-"]
    assert len(bench.lanes) == 0


async def test_work_may_add_work(bench: Bench):
    """For its own timer it comes after, in order; for another it starts at once."""

    async def adds() -> None:
        for name in ("2", "3", "4"):
            bench.lanes.run(A, bench.piece(name))
        bench.lanes.run(B, bench.piece("other"))
        bench.log.append("adds-")

    bench.lanes.run(A, adds)
    assert bench.log == ["other+", "other-", "adds-", "2+", "2-", "3+", "3-", "4+", "4-"]


@pytest.mark.parametrize("first_waits", [True, False])
async def test_ten_thousand_immediate_pieces_do_not_deepen_the_stack(bench: Bench, first_waits: bool):
    """Pieces that end without waiting follow one another in a loop, wherever they were queued from."""
    depths: list[int] = []
    wait: Pending[None] = Pending()

    async def measure() -> None:
        depths.append(stack_depth())

    def queue() -> None:
        for _ in range(10_000):
            bench.lanes.run(A, measure)

    async def first() -> None:
        queue()
        if first_waits:
            await wait

    bench.lanes.run(A, first)
    wait.resolve(None)
    assert len(depths) == 10_000
    assert len(set(depths)) == 1


async def test_pieces_that_wait_do_not_deepen_the_stack(bench: Bench):
    """Nor do ten thousand that each wait once and are resumed from the same place."""
    depths: list[int] = []
    waits: list[Pending[None]] = [Pending() for _ in range(1_000)]

    def measure(wait: Pending[None]) -> Work:
        async def work() -> None:
            await wait
            depths.append(stack_depth())

        return work

    for wait in waits:
        bench.lanes.run(A, measure(wait))
    for wait in waits:
        wait.resolve(None)
    assert len(set(depths)) == 1


@pytest.fixture
def idle() -> list[str]:
    return []


def note(calls: list[str]) -> Callable[[], None]:
    return lambda: calls.append("idle")


async def test_idle_now(bench: Bench, idle: list[str]):
    """With nothing under way the callback is called at once."""
    bench.lanes.on_idle(note(idle))
    assert idle == ["idle"]


async def test_idle_later(bench: Bench, idle: list[str]):
    """Else when the last lane has ended, and only once."""
    waits: list[Pending[None]] = [Pending(), Pending()]
    bench.lanes.run(A, bench.piece("a", waits[0]))
    bench.lanes.run(B, bench.piece("b", waits[1]))
    bench.lanes.run(A, bench.piece("a2"))
    bench.lanes.on_idle(note(idle))
    waits[0].resolve(None)
    assert idle == []
    waits[1].resolve(None)
    assert idle == ["idle"]
    bench.lanes.run(A, bench.piece("later"))
    assert idle == ["idle"]
