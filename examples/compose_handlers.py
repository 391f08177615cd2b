"""The handlers of docker-compose.yml: every resume is written to the log and completed.

A place to start from: name flows with ``@handlers.flow(flow_id)`` and timers with ``@handlers.name(prefix)``,
and return ``done()``, ``retry(delay_ms=...)`` or ``fail(code, message)``; nothing returned means done.
"""

from __future__ import annotations

import structlog

from notify_consumer import Handlers, Resume

log = structlog.get_logger()
handlers = Handlers()


@handlers.default
async def show(resume: Resume) -> None:
    """Tell that the timer fired, and be done."""
    late_ms = resume.elapsed_at_ms - resume.due_at_ms
    log.info("example.resumed", resume_id=resume.resume_id, late_ms=late_ms, payload=resume.payload)
