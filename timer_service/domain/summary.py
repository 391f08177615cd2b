"""What the heap needs to know of a timer."""

from __future__ import annotations

import msgspec

from timer_service.domain.model import Phase, Timer


class Summary(msgspec.Struct, frozen=True, gc=False):
    """Phase and generation, and the instant that matters: due while waiting, then elapsed, then ended."""

    phase: Phase
    generation: int
    at_ms: int
    snapshot_seq: int = 0


def summary_of(timer: Timer) -> Summary:
    """The summary of a timer as it stands."""
    match timer.phase:
        case Phase.WAITING:
            at_ms = timer.due_at_ms
        case Phase.ELAPSED:
            at_ms = timer.current.elapsed_at_ms or timer.due_at_ms
        case _:
            at_ms = timer.ended_at_ms or timer.due_at_ms
    return Summary(timer.phase, timer.generation, at_ms, timer.snapshot_seq or 0)
