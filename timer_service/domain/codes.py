"""The codes that a publisher can be told, and the three ways in which a command can be settled."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How a command was settled."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"


class Code(StrEnum):
    """Why, where there is something to say. The text is part of the contract."""

    MALFORMED = "malformed"
    UNSUPPORTED_VERSION = "unsupported_version"
    TOO_LARGE = "too_large"
    INVALID_DUE = "invalid_due"
    HASH_MISMATCH = "hash_mismatch"
    CONFLICT = "conflict"
    ALREADY_TERMINAL = "already_terminal"
    UNKNOWN_TIMER = "unknown_timer"
    STALE_GENERATION = "stale_generation"
    STALE_FENCE = "stale_fence"
    NOT_ELAPSED = "not_elapsed"
    TOO_LATE = "too_late"
    SUPERSEDED = "superseded"
    STORAGE_FULL = "storage_full"
    STATE_UNREADABLE = "state_unreadable"


MAX_RETRIES_EXCEEDED = "max_retries_exceeded"
