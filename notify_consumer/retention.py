"""How long settled rows are kept."""

from __future__ import annotations

from timer_service.errors import BrokerError
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.topology import TERMINALS


async def kept_ms(connection: Connection, wanted_ms: int) -> int:
    """``wanted_ms``, but at most half as long as the archive remembers an ended timer.

    Once the archive has forgotten a timer, one of the same key begins with the same resume_ids again: a row that were
    still there would swallow its resumes. Where the archive can't be asked, ``wanted_ms`` stands.
    """
    try:
        found = await connection.api(f"STREAM.INFO.{TERMINALS}")
    except BrokerError:
        return wanted_ms
    max_age_ns = int(found["config"].get("max_age", 0))
    return min(wanted_ms, max_age_ns // 2_000_000) if max_age_ns else wanted_ms
