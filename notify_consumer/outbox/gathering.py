"""Writes that wait for the store at the same time go to it together: one statement, one commit for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from notify_consumer.errors import OutboxUnavailable

T = TypeVar("T")

LIMIT = 128
"""So many go together at most."""


class Gathered(Generic[T]):
    """Writes of one kind. The first one goes at once, and what comes while it is under way goes as one.

    ``carry_out`` gets some of them and returns for each whether it was done. When it raises OutboxUnavailable none of
    them need have been.
    """

    def __init__(self, carry_out: Callable[[Sequence[T]], Awaitable[Sequence[bool]]]) -> None:
        self._carry_out = carry_out
        self._waiting: list[tuple[T, asyncio.Future[bool]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def write(self, item: T) -> bool:
        """Whether it was done. Raises OutboxUnavailable. Cancelling it does not undo it."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="outbox.writes")
        return await future

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:LIMIT], self._waiting[LIMIT:]
                await self._together(batch)
        finally:
            self._worker = None

    async def _together(self, batch: list[tuple[T, asyncio.Future[bool]]]) -> None:
        done: Sequence[bool] = []
        told: str | None = None
        try:
            done = await self._carry_out([item for item, _ in batch])
        except OutboxUnavailable as error:
            told = str(error)
        except BaseException as error:  # not foreseen, or this task's end: nobody may wait for ever
            told = repr(error)
            raise
        finally:
            for at, (_, future) in enumerate(batch):
                if future.done():
                    continue  # whoever waited has been cancelled
                if told is None:
                    future.set_result(done[at])
                else:
                    future.set_exception(OutboxUnavailable(told))
