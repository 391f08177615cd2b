"""May this account do what the ring does? Asked by messages that change nothing, whatever the broker makes of them.

The broker does not answer who may not publish; it complains on the connection, in the order of what was sent. So
everything is sent at once, and when the flush behind it returns all complaints are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from timer_service.jetstream import topology
from timer_service.jetstream.connection import SUBSCRIBE, Connection, Denial
from timer_service.jetstream.provision import Finding

_PROBE = "probe"
_NEVER = {"Nats-Expected-Last-Sequence": str(2**53)}
"""No stream reaches it: what carries it is refused, not stored."""
_UNREADABLE = b"{"
"""No request of the API can be read from it."""

WRITES = (
    topology.state_subject(_PROBE),
    topology.snapshot_subject(_PROBE, 0),
    topology.terminal_subject(_PROBE),
    topology.wake_subject(_PROBE),
    topology.RESUME_SUBJECT,
    topology.rejected_subject(_PROBE),
    topology.lease_subject(_PROBE),
)
"""A subject of every kind of write of the ring."""

_CONSUMED = (topology.COMMAND_SERVICE, topology.WAKE_SERVICE)
REQUESTS = (
    *(f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.name}" for spec in _CONSUMED),
    *(f"$JS.ACK.{spec.stream}.{spec.name}.0.0.0.0.0" for spec in _CONSUMED),
    *(f"$JS.API.CONSUMER.CREATE.{stream}.{_PROBE}" for stream in (topology.STATE_STREAM, topology.TERMINALS)),
    *(
        f"$JS.API.DIRECT.GET.{stream}.{subject}"
        for stream, subject in (
            (topology.STATE_STREAM, topology.state_subject(_PROBE)),
            (topology.TERMINALS, topology.terminal_subject(_PROBE)),
        )
    ),
    f"$JS.API.DIRECT.GET.{topology.SNAPSHOTS}",
    f"$JS.API.DIRECT.GET.{topology.RESUMES}",
    f"$JS.API.STREAM.MSG.GET.{topology.LEASE_STREAM}",
    f"$JS.API.STREAM.MSG.DELETE.{topology.SNAPSHOTS}",
    f"$JS.API.STREAM.MSG.DELETE.{topology.RESUMES}",
)
"""What it reads, settles and deletes by."""

_OF_SCHEDULES = (
    f"$JS.API.CONSUMER.CREATE.{topology.SCHEDULES}.{_PROBE}",
    f"$JS.API.DIRECT.GET.{topology.SCHEDULES}.{topology.schedule_subject(_PROBE)}",
    f"$JS.API.STREAM.MSG.DELETE.{topology.SCHEDULES}",
)
"""What the native driver reads and drops schedules by; it writes ``topology.schedule_subject``."""


async def missing_permissions(connection: Connection, *, native: bool = False) -> list[Finding]:
    """A finding for each subject that may not be used; also tries again what the broker would not let us hear.

    Raises BrokerError when the broker does not answer at all.
    """
    since_s = time.monotonic()
    for subject in (*WRITES, *((topology.schedule_subject(_PROBE),) if native else ())):
        await connection.publish(subject, headers=_NEVER)
    for subject in (*REQUESTS, *(_OF_SCHEDULES if native else ())):
        await connection.publish(subject, _UNREADABLE)
    await connection.subscribe_again()
    await connection.flush()
    _forget_mended(connection, since_s)
    return findings(connection.denied_since(since_s))


_TRIED = frozenset(
    topology.as_granted(subject) for subject in (*WRITES, *REQUESTS, topology.schedule_subject(_PROBE), *_OF_SCHEDULES)
)


def _forget_mended(connection: Connection, since_s: float) -> None:
    """What was tried since, and not refused, is allowed again."""
    for denial, at_s in list(connection.denials.items()):
        if at_s < since_s and (denial.subject in _TRIED or denial.verb == SUBSCRIBE):
            del connection.denials[denial]


def findings(denials: Iterable[Denial]) -> list[Finding]:
    """What was refused, as findings, each about the stream that it belongs to."""
    return [
        Finding("permission_denied", topology.stream_of(denial.subject) or denial.subject, str(denial))
        for denial in denials
    ]
