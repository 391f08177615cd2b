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
        self._arrivals: dict[TimerRef, list[asyncio.Future[None]]] = {}
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
            task = asyncio.get_running_loop().create_task(self._wait(work, wait_ms))
            self._waiters.add(task)
            task.add_done_callback(self._waiters.discard)
        else:
            if len(self._put_off) >= _MAX_PUT_OFF:
                self._put_off.clear()  # they wait once more
            self._put_off.add(seq)
            await self._settling.release(work, wait_ms)

    def arrived(self, timer_ref: TimerRef) -> None:
        """There is a state for ``timer_ref`` now. Costs nothing when nobody waits."""
        if self._arrivals:
            for future in self._arrivals.pop(timer_ref, ()):
                if not future.done():
                    future.set_result(None)

    async def stop(self) -> None:
        """Hand back what still waits."""
        for task in list(self._waiters):
            task.cancel()
        await asyncio.gather(*self._waiters, return_exceptions=True)

    async def _wait(self, work: Work, wait_ms: int) -> None:
        loop = asyncio.get_running_loop()
        timer_ref, arrived = work.command.timer_ref, loop.create_future()
        self._arrivals.setdefault(timer_ref, []).append(arrived)
        end = loop.time() + wait_ms / 1000
        try:
            while not arrived.done() and (left_s := end - loop.time()) > 0:
                await asyncio.wait([arrived], timeout=min(left_s, _KEEP_ALIVE_S))
                await work.delivery.in_progress()
        except asyncio.CancelledError:
            await self._settling.release(work, 0)
            raise
        finally:
            self._forget(timer_ref, arrived)
        self._again(work)

    def _forget(self, timer_ref: TimerRef, arrived: asyncio.Future[None]) -> None:
        waiting = self._arrivals.get(timer_ref, [])
        if arrived in waiting:
            waiting.remove(arrived)
        if not waiting:
            self._arrivals.pop(timer_ref, None)
