"""One short visit to the broker, and how its errors reach people: one clear line and an exit code, no traceback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import typer

from timer_service.errors import DurableTimerError, Unavailable
from timer_service.jetstream.connection import Connection

CONNECT_TIMEOUT_S = 4.0
INTERRUPTED = 130

T = TypeVar("T")


def refuse(message: str, code: int = 1) -> NoReturn:
    """End with one line on standard error. ``code`` 1: it did not work out; 2: it was asked for wrongly."""
    typer.echo(f"durable-timer: {message}", err=True)
    raise typer.Exit(code)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end. What this project or the system raises on purpose becomes one line and exit code 1;
    Ctrl-C ends quietly with 130."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (DurableTimerError, OSError) as error:
        refuse(str(error))


@asynccontextmanager
async def connected(url: str, creds: str | None = None, *, timeout_ms: int = 5_000) -> AsyncIterator[Connection]:
    """A connection for the time of the block. Raises Unavailable when the broker is not there within seconds."""
    connection = Connection(url, name="durable-timer-cli", creds=creds, timeout_ms=timeout_ms)
    try:
        await asyncio.wait_for(connection.open(), CONNECT_TIMEOUT_S)
    except TimeoutError:
        why = connection.last_error or "no answer"
        raise Unavailable(f"no broker at {url} within {CONNECT_TIMEOUT_S:g} s: {why}") from None
    try:
        yield connection
    finally:
        await connection.close()
