"""One short visit to the broker, and how its errors reach people: one clear line and an exit code, no traceback."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer

from timer_service.client import DEFAULT_REPLY_PREFIX, TimerClient
from timer_service.embedded import EmbeddedServerError
from timer_service.errors import DurableTimerError, Unavailable
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.publish import Publisher
from timer_service.urls import shown_url

CONNECT_TIMEOUT_S = 3.0
INTERRUPTED = 130
TERMINATED = 143

T = TypeVar("T")


def refuse(message: str, code: int = 1) -> NoReturn:
    """End with one line on standard error. ``code`` 1: it did not work out; 2: it was asked for wrongly."""
    typer.echo(f"durable-timer: {message}", err=True)
    raise typer.Exit(code)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, as ``guarded`` does."""
    return guarded(lambda: asyncio.run(work))


def guarded(work: Callable[[], T]) -> T:
    """Do ``work``. What this project or the system raises on purpose becomes one line and exit code 1; Ctrl-C ends
    quietly with 130, SIGTERM with 143, and a reader of our output that has gone (``| head``) with 1."""
    try:
        result = work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to complain at the end
        raise typer.Exit(1) from None
    except (DurableTimerError, EmbeddedServerError, OSError) as error:
        refuse(str(error))
    return result


@asynccontextmanager
async def connected(url: str, creds: str | None = None, *, timeout_ms: int = 5_000) -> AsyncIterator[Connection]:
    """A connection for the time of the block. Raises Unavailable when the broker is not there within seconds."""
    _check_file(creds)
    connection = Connection(url, name="durable-timer-cli", creds=creds, timeout_ms=timeout_ms)
    try:
        await asyncio.wait_for(connection.open(), CONNECT_TIMEOUT_S)
    except TimeoutError:
        why = connection.last_error or "no answer"
        raise Unavailable(f"no broker at {shown_url(url)} within {CONNECT_TIMEOUT_S:g} s: {why}") from None
    try:
        yield connection
    finally:
        await connection.close()


def _reply_prefix() -> str:
    """As the service has it, by the same variable."""
    return os.environ.get("DURABLE_TIMER_REPLY_PREFIX") or DEFAULT_REPLY_PREFIX


def _check_file(creds: str | None) -> None:
    if creds is not None and not Path(creds).is_file():
        refuse(f"--creds: {creds} is not a file", 2)


@asynccontextmanager
async def client(url: str, creds: str | None = None) -> AsyncIterator[TimerClient]:
    """A client for the time of the block. Raises Unavailable when the broker is not there within seconds."""
    async with connected(url, creds) as connection:
        timers = TimerClient(connection, reply_prefix=_reply_prefix())
        await timers.open()
        try:
            yield timers
        finally:
            await timers.close()


@asynccontextmanager
async def publisher(connection: Connection) -> AsyncIterator[Publisher]:
    """The pipelined publisher of ``connection`` for the time of the block."""
    pipelined = Publisher(connection)
    await pipelined.start()
    try:
        yield pipelined
    finally:
        await pipelined.stop()
