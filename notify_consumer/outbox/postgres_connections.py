"""A few connections to PostgreSQL: none hangs, none is used again after an error, each is ready for work.

Not psycopg_pool: its error for a server that is away is that no connection was to be had, not why. And no statement is
cancelled, which is how a time-out works in psycopg: that waits for the server's answer, and a frozen one has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from notify_consumer.errors import OutboxUnavailable
from timer_service.urls import hide_secrets, shown_url

T = TypeVar("T")
Session = psycopg.AsyncConnection[Any]

SIZE = 4
DEADLINE_S = 6.0
"""An operation fails after this, whatever the server and the network do."""
_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": 3,
    "application_name": "notify-consumer",
    "keepalives_idle": 15,
    "tcp_user_timeout": 10_000,
}


class Connections:
    """Up to ``SIZE`` connections to ``url``, made when needed. ``prepare`` is run on each before its first use."""

    def __init__(self, url: str, prepare: Callable[[Session], Awaitable[None]]) -> None:
        given = conninfo_to_dict(url)
        self._conninfo = make_conninfo(
            url, client_encoding="UTF8", **{name: value for name, value in _DEFAULTS.items() if name not in given}
        )
        self._secrets = [str(given[name]) for name in ("password", "sslpassword") if given.get(name)]
        ports = str(given.get("port") or "").split(",")
        self.ports_are_numbers = all(port.isascii() and port.isdigit() for port in ports if port)
        self._prepare = prepare
        self._slots = asyncio.Semaphore(SIZE)
        self._idle: list[Session] = []
        self._cut_off: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.shown = shown_url(url)

    async def run(self, work: Callable[[Session], Awaitable[T]]) -> T:
        """What ``work`` returns, within the deadline. Raises OutboxUnavailable."""
        if self._closed:
            raise OutboxUnavailable(f"{self.shown}: the outbox is closed")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEADLINE_S
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise self._unavailable(f"no connection was free within {DEADLINE_S:g} s") from None
        try:
            return await self._within(deadline, work)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Finish what is under way, and close all connections. Repeating it does nothing."""
        if self._closed:
            return
        self._closed = True
        for _ in range(SIZE):
            await self._slots.acquire()
        if self._cut_off:
            await asyncio.wait(self._cut_off)
        while self._idle:
            await self._idle.pop().close()

    async def _within(self, deadline: float, work: Callable[[Session], Awaitable[T]]) -> T:
        try:
            session = self._reusable() or await self._connect(deadline)
            result = await self._watched(session, deadline, work)
        except TimeoutError:
            raise self._unavailable(f"no answer within {DEADLINE_S:g} s") from None
        except (psycopg.Error, OSError) as error:
            raise self._unavailable(str(error)) from None
        if self._closed:
            await session.close()
        else:
            self._idle.append(session)
        return result

    async def _connect(self, deadline: float) -> Session:
        async with asyncio.timeout_at(deadline):
            session = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        await self._watched(session, deadline, self._prepare)
        return session

    async def _watched(self, session: Session, deadline: float, work: Callable[[Session], Awaitable[T]]) -> T:
        """Run ``work`` in a task of its own: at the deadline, or when nobody waits any more, its connection is cut."""
        task = asyncio.create_task(_ended_by_errors(session, work))
        try:
            await asyncio.wait({task}, timeout=deadline - asyncio.get_running_loop().time())
        finally:
            if not task.done():
                _cut(session)
                self._cut_off.add(task)
                task.add_done_callback(self._forget)
        if not task.done():
            raise TimeoutError
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._cut_off.discard(task)
        if not task.cancelled():
            task.exception()  # the one who asked has been told

    def _reusable(self) -> Session | None:
        while self._idle:
            session = self._idle.pop()
            if not _has_ended(session):
                return session
            session.pgconn.finish()
        return None

    def _unavailable(self, text: str) -> OutboxUnavailable:
        line = " ".join(text.split()) or "unknown error"
        return OutboxUnavailable(f"{self.shown}: {hide_secrets(line, self._secrets)}")


async def _ended_by_errors(session: Session, work: Callable[[Session], Awaitable[T]]) -> T:
    try:
        return await work(session)
    except BaseException:
        await session.close()
        raise


def _has_ended(session: Session) -> bool:
    """Whether the server closed an idle connection (or says something unasked, such as that it will)."""
    if session.closed or session.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        return True
    looking = select.poll()
    looking.register(session.fileno(), select.POLLIN)
    return bool(looking.poll(0))


def _cut(session: Session) -> None:
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(session.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)
