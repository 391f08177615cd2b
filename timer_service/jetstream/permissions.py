"""May this account write where the ring writes? Asked by writes that can't succeed, so that nothing is stored.

Each carries an expected last sequence that no stream reaches: who may write is told "wrong last sequence", who may
not is told nothing (the broker only logs the violation, and tells the connection out of band).
"""

from __future__ import annotations

import asyncio

from timer_service.errors import Ambiguous, BrokerError, WrongRevision
from timer_service.jetstream import topology
from timer_service.jetstream.provision import Finding
from timer_service.jetstream.publish import Publisher

_NEVER = {"Nats-Expected-Last-Sequence": str(2**53)}
_PROBE = "probe"

WRITES = (
    (topology.STATE_STREAM, topology.state_subject(_PROBE)),
    (topology.SNAPSHOTS, topology.snapshot_subject(_PROBE, 0)),
    (topology.TERMINALS, topology.terminal_subject(_PROBE)),
    (topology.SCHEDULES, topology.wake_subject(_PROBE)),
    (topology.RESUMES, topology.RESUME_SUBJECT),
    (topology.REJECTIONS, topology.rejected_subject(_PROBE)),
)
"""Stream and subject of every kind of write of the ring."""


async def missing_permissions(publisher: Publisher) -> list[Finding]:
    """A finding for each subject that may not be written; costs one message out and one in each."""
    answers = await asyncio.gather(*(_may_write(publisher, subject) for _, subject in WRITES))
    return [
        Finding("permission_denied", stream, f"no permission to publish on {_wide(subject)}; grant it to this account")
        for (stream, subject), allowed in zip(WRITES, answers, strict=True)
        if not allowed
    ]


async def _may_write(publisher: Publisher, subject: str) -> bool:
    try:
        await publisher.publish(subject, b"", _NEVER)
    except WrongRevision:
        return True
    except Ambiguous:
        return False
    except BrokerError:
        return True  # the stream is missing or full, which is told elsewhere
    return True


def _wide(subject: str) -> str:
    """The subject as it would be granted."""
    return subject.replace(f".{_PROBE}.0", ".>").replace(f".{_PROBE}", ".>")
