"""The bodies of commands as they are sent: field names and types, checked while they are decoded.

What a type can't say (lengths, ranges, what goes with what) is checked in ``commands``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

NULL = msgspec.Raw(b"null")


class CommandBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What every body has."""

    v: int
    command_id: str


class KeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The key object: the four lineage parts, or a name with its namespace."""

    flow_id: str | None = None
    flow_version: str | None = None
    root_execution_id: str | None = None
    node_id: str | None = None
    name: str | None = None
    namespace: str | None = None


class EdgesBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``edges`` of a lineage timer."""

    start: str
    elapsed: str
    retry: str | None = None


class DueBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``due`` as sent: one of its three forms."""

    delay_ms: int | None = None
    at: str | None = None
    at_ms: int | None = None


class StartBody(CommandBody, frozen=True, kw_only=True):
    """The body of a start."""

    timer: KeyBody
    due: DueBody | None = None
    edges: msgspec.Raw = NULL
    max_retries: int | msgspec.UnsetType | None = msgspec.UNSET
    payload: msgspec.Raw = NULL
    payload_sha256: str | None = None
    runtime_sha256: str | None = None
    if_exists: Literal["reject", "replace"] | None = None


class ByRefBody(CommandBody, frozen=True, kw_only=True):
    """What the bodies about a timer that is there already have."""

    timer_ref: str


class CancelBody(ByRefBody, frozen=True, kw_only=True):
    """The body of a cancel."""

    generation: int | None = None
    reason: str | None = None
    wait_ms: int | None = None


class CompleteBody(ByRefBody, frozen=True, kw_only=True):
    """The body of a complete."""

    generation: int
    fence: int


class RetryBody(CompleteBody, frozen=True, kw_only=True):
    """The body of a retry."""

    due: DueBody | None = None


class FailBody(CompleteBody, frozen=True, kw_only=True):
    """The body of a fail."""

    failure_code: str
    message: str | None = None
