"""Cancels that came before their start: they wait outside the lane, so that the start can pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from timer_service.domain.identity import TimerRef
from timer_service.runtime.settling import Settling, Work

MAX_WAITING = 4_096
"""Beyond that a cancel is given back for as long as it is to wait: it then takes effect late on a start that came."""
_MAX_PUT_OFF = 200_000
_KEEP_ALIVE_S = 2.0


class EarlyCancels:
    """Each waits until a state of its timer shows up or its time is over; then ``again`` decides it for good.

    Those that wait take no room among the commands in hand: however many there are, others go on.
    """

    def __init__(self, settling: Settling, again: Callable[[Work], None]) -> None:
        self._settling = settling
        self._again = again
        self._arrivals: dict[TimerRef, list[tuple[asyncio.Future[None], Work]]] = {}
        self._waiters: set[asyncio.Task[None]] = set()
        self._put_off: set[int] = set()

    async def wait(self, work: Work, wait_ms: int) -> None:
        """Let ``work`` wait for at most ``wait_ms``; returns at once."""
        seq = work.delivery.seq
        if seq in self._put_off:
            self._put_off.discard(seq)  # it comes back when its time is over
            work.waited = True
            self._again(work)
        elif len(self._waiters) < MAX_WAITING:
            work.waited = True
            await work.delivery.park()
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()
            self._arrivals.setdefault(work.command.timer_ref, []).append((arrived, work))
            task = loop.create_task(self._wait(work, arrived, wait_ms))
            self._waiters.add(task)
            task.add_done_callback(self._waiters.discard)
        else:
            if len(self._put_off) >= _MAX_PUT_OFF:
                self._put_off.clear()  # they wait once more
            self._put_off.add(seq)
            await self._settling.release(work, wait_ms)

    def arrived(self, timer_ref: TimerRef) -> None:
        """There is a state for ``timer_ref`` now: decide again at once, before any wake. Free when nobody waits."""
        if self._arrivals:
            for future, work in self._arrivals.pop(timer_ref, ()):
                if not future.done():
                    future.set_result(None)
                    self._again(work)

    async def stop(self) -> None:
        """Hand back what still waits."""
        for task in list(self._waiters):
            task.cancel()
        await asyncio.gather(*self._waiters, return_exceptions=True)

    async def _wait(self, work: Work, arrived: asyncio.Future[None], wait_ms: int) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_ms / 1000
        try:
            while not arrived.done() and (left_s := end - loop.time()) > 0:
                await asyncio.wait([arrived], timeout=min(left_s, _KEEP_ALIVE_S))
                if not arrived.done():
                    await work.delivery.in_progress()
        except asyncio.CancelledError:
            if not arrived.done():
                await self._settling.release(work, 0)
            raise
        finally:
            self._forget(work.command.timer_ref, arrived)
        if not arrived.done():
            self._again(work)

    def _forget(self, timer_ref: TimerRef, arrived: asyncio.Future[None]) -> None:
        waiting = [one for one in self._arrivals.pop(timer_ref, ()) if one[0] is not arrived]
        if waiting:
            self._arrivals[timer_ref] = waiting
