"""Command bodies, and the reader as tests call it."""

from __future__ import annotations

import json
from typing import Any

from timer_service.domain.identity import NameKey, TimerRef, derive_timer_ref
from timer_service.domain.model import AnyCommand, Order
from timer_service.wire.commands import Envelope, Kind, read_command

NAME = {"name": "order-42"}
LINEAGE = {"flow_id": "flow", "flow_version": "7", "root_execution_id": "run-1", "node_id": "wait"}
REF: TimerRef = derive_timer_ref(NameKey("order-42"))
ENVELOPE = Envelope(Order(1_700_000_000_000, 5), 1_700_000_000_000)

_REQUIRED: dict[Kind, dict[str, Any]] = {
    "start": {"timer": NAME, "due": {"delay_ms": 1_000}},
    "retry": {"timer_ref": REF, "generation": 0, "fence": 2},
    "complete": {"timer_ref": REF, "generation": 0, "fence": 2},
    "fail": {"timer_ref": REF, "generation": 0, "fence": 2, "failure_code": "no_stock"},
    "cancel": {"timer_ref": REF},
}


def fields_of(kind: Kind, **changes: Any) -> dict[str, Any]:
    """The fields of a valid command with ``changes`` made; a field set to ``...`` is left out."""
    fields = {"v": 1, "command_id": "c-1", **_REQUIRED[kind], **changes}
    return {name: value for name, value in fields.items() if value is not ...}


def body_of(kind: Kind, **changes: Any) -> bytes:
    """The same as JSON."""
    return json.dumps(fields_of(kind, **changes)).encode()


def command(kind: Kind, at_ms: int, *, seq: int = 1, **changes: Any) -> AnyCommand:
    """The command that the broker stored at ``at_ms``; equal instants are told apart by ``seq``."""
    envelope = Envelope(Order(at_ms, seq), at_ms)
    return read_command(f"durable_timer.commands.{kind}.v1", body_of(kind, **changes), envelope)


def read(kind: str, body: bytes) -> AnyCommand:
    """Read ``body`` as if the broker had just stored it. Raises BadCommand."""
    return read_command(f"durable_timer.commands.{kind}.v1", body, ENVELOPE)
