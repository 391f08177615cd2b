"""``/debug/clock``: reading and shifting the test clock. Only there with ``--test-clock``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from timer_service.clock import OffsetClock
from timer_service.wire.canonical import MalformedJson, strict_loads

_MAX_BODY = 1024


def clock_routes(clock: OffsetClock) -> list[Route]:
    """GET reads the offset; POST ``{"offset_ms": N}`` adds N and answers the total."""

    async def debug_clock(request: Request) -> Response:
        if request.method == "POST":
            try:
                clock.shift(_offset(await request.body()))
            except ValueError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse({"offset_ms": clock.offset_ms})

    return [Route("/debug/clock", debug_clock, methods=["GET", "POST"])]


def _offset(body: bytes) -> int:
    """The shift in a request body. Raises ValueError."""
    if len(body) > _MAX_BODY:
        raise ValueError("the body is too large")
    try:
        value = strict_loads(body)
    except MalformedJson as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict) or set(value) != {"offset_ms"} or type(value["offset_ms"]) is not int:
        raise ValueError('the body must be {"offset_ms": N} with an integer N')
    return int(value["offset_ms"])
