"""A gate between a client and its broker that can swallow what the client publishes: lost acks, lost writes."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

_PUBLISH = re.compile(rb"(?:PUB ([^ ]+) +(?:[^ ]+ +)?(\d+)|HPUB ([^ ]+) +(?:[^ ]+ +)?\d+ +(\d+))\r\n")


class Toll:
    """Listens on ``url`` and passes everything on to the broker, except what ``swallow`` names."""

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self._prefix: bytes | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.swallowed = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def swallow(self, prefix: str) -> None:
        """From now on what is published below ``prefix`` does not reach the broker."""
        self._prefix = prefix.encode()

    def let_pass(self) -> None:
        """Swallow nothing more."""
        self._prefix = None

    async def __aenter__(self) -> Toll:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        broker_out: asyncio.StreamWriter | None = None
        try:
            broker_in, broker_out = await asyncio.open_connection("127.0.0.1", self._broker_port)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await _first_of(self._toll(client_in, broker_out), _copy(broker_in, client_out))
        except asyncio.CancelledError:
            pass  # the gate is closed
        finally:
            client_out.close()
            if broker_out is not None:
                broker_out.close()
                with contextlib.suppress(OSError):
                    await broker_out.wait_closed()
            self._tasks.discard(task)

    async def _toll(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Frame by frame: a line, and for a publication its payload."""
        while line := await source.readline():
            frame, match = line, _PUBLISH.fullmatch(line)
            if match is not None:
                frame += await source.readexactly(int(match[2] or match[4]) + 2)
            if match is not None and self._prefix and (match[1] or match[3]).startswith(self._prefix):
                self.swallowed += 1
            else:
                target.write(frame)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65_536):
        target.write(data)


async def _first_of(*sides: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(side) for side in sides]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
