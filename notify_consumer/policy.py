"""How the relay works: leases, backoff, how much at a time."""

from __future__ import annotations

import msgspec

MAX_DOUBLINGS = 40


class Policy(msgspec.Struct, frozen=True):
    """Durations in milliseconds. ``max_attempts`` None is without end."""

    lease_ms: int = 30_000
    backoff_initial_ms: int = 3_000
    backoff_max_ms: int = 30_000
    max_attempts: int | None = None
    concurrency: int = 32
    feedback_timeout_ms: int = 5_000
    grace_ms: int = 10_000

    def delay_ms(self, attempts: int) -> int:
        """The pause after try number ``attempts``: doubling from the initial one up to the maximum."""
        doublings = min(max(attempts - 1, 0), MAX_DOUBLINGS)
        return min(self.backoff_initial_ms << doublings, self.backoff_max_ms)

    def allows(self, attempt: int) -> bool:
        """Whether there may be an attempt of this number, counted from 1."""
        return self.max_attempts is None or attempt <= self.max_attempts
