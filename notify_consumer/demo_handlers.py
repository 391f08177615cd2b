"""The handlers of ``durable-timer demo``, and those of ``durable-timer dev`` when it is given none.

Every resume is completed, or first retried as often as its payload asks: ``{"retries": 1, "retry_delay_ms": 5000}``.
What was seen goes into the log and, when ``DURABLE_TIMER_DEMO_SEEN`` names a file, into that as one JSON line each.
"""

from __future__ import annotations

import os
from typing import Any

from notify_consumer.answers import Answer, done, retry
from notify_consumer.handlers import Handlers
from notify_consumer.resume import Resume
from timer_service.clock import SystemClock
from timer_service.logs import get_logger
from timer_service.wire.canonical import exact_json

SEEN_FILE = "DURABLE_TIMER_DEMO_SEEN"
SEEN = "demo.seen"

handlers = Handlers()
_clock = SystemClock()


@handlers.default
async def see(resume: Resume) -> Answer:
    """Note the resume with the time at which it was seen, and answer as its payload asks."""
    seen_at_ms = _clock.now_ms()
    seen = {
        "resume_id": resume.resume_id,
        "timer_ref": resume.timer_ref,
        "generation": resume.generation,
        "due_at_ms": resume.due_at_ms,
        "seen_at_ms": seen_at_ms,
    }
    _append(seen)
    get_logger().info(SEEN, timer=resume.timer, late_ms=seen_at_ms - resume.due_at_ms, payload=resume.payload)
    wish: dict[str, Any] = resume.payload if isinstance(resume.payload, dict) else {}
    again = wish.get("retries", 0)
    if isinstance(again, int) and resume.retries_used < again:
        return retry(delay_ms=wish.get("retry_delay_ms"))
    return done()


def _append(seen: dict[str, Any]) -> None:
    path = os.environ.get(SEEN_FILE)
    if path:
        with open(path, "ab") as file:
            file.write(exact_json(seen) + b"\n")
