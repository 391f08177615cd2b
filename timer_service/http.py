"""The operator's HTTP side: ``/healthz``, ``/readyz``, ``/metrics``, and routes that a process adds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a process is not ready: a code, the resource it is about, and a sentence with what to do."""

    code: str
    resource: str
    message: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """What ``/readyz`` answers; it is ready when there is no reason against it."""

    ready: bool
    reasons: list[Reason] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the application drains on signals itself


class HttpServer:
    """Serves on ``host:port`` (0: any free port, see ``port``) inside the running event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        ready: Callable[[], Readiness],
        registry: CollectorRegistry,
        extra_routes: Sequence[BaseRoute] = (),
    ) -> None:
        self._host, self.port = host, port
        self._ready = ready
        self._registry = registry
        routes = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            *extra_routes,
        ]
        app = Starlette(routes=routes)
        self._server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError when the address can't be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self.port))
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"{self._host}:{self.port}: {error.strerror}") from None
        self.port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name="http")

    async def stop(self) -> None:
        """Finish what is being answered and close. Repeating it does nothing."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None

    async def _healthz(self, _: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def _readyz(self, _: Request) -> Response:
        readiness = self._ready()
        if readiness.ready:
            return JSONResponse({"ready": True, "details": readiness.details})
        reasons = [asdict(reason) for reason in readiness.reasons]
        return JSONResponse({"ready": False, "reasons": reasons, "details": readiness.details}, status_code=503)

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
