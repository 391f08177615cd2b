"""What a scan of the state needs to know of a timer, small enough for one message header."""

from __future__ import annotations

import msgspec

from timer_service.domain.model import Phase, Timer

_LETTERS = {
    Phase.WAITING: "w",
    Phase.ELAPSED: "e",
    Phase.COMPLETED: "c",
    Phase.FAILED: "f",
    Phase.CANCELLED: "x",
}
_PHASES = {letter: phase for phase, letter in _LETTERS.items()}


class Summary(msgspec.Struct, frozen=True, gc=False):
    """Phase, generation, fence, and the instant that matters: due while waiting, elapsed or ended after."""

    phase: Phase
    generation: int
    fence: int
    at_ms: int
    snapshot_seq: int = 0


def summary_of(timer: Timer) -> Summary:
    match timer.phase:
        case Phase.WAITING:
            at_ms = timer.due_at_ms
        case Phase.ELAPSED:
            at_ms = timer.current.elapsed_at_ms or timer.due_at_ms
        case _:
            at_ms = timer.ended_at_ms or timer.due_at_ms
    return Summary(timer.phase, timer.generation, timer.fence, at_ms, timer.snapshot_seq or 0)


def write_summary(summary: Summary) -> str:
    """The header value: ``w 3 7 1700000000000 0``."""
    letter = _LETTERS[summary.phase]
    return f"{letter} {summary.generation} {summary.fence} {summary.at_ms} {summary.snapshot_seq}"


def read_summary(text: str) -> Summary | None:
    """The summary in a header value, None when it is not one (then the state itself must be read)."""
    parts = text.split(" ")
    if len(parts) != 5 or parts[0] not in _PHASES or not all(part.isdigit() for part in parts[1:]):
        return None
    generation, fence, at_ms, snapshot_seq = (int(part) for part in parts[1:])
    return Summary(_PHASES[parts[0]], generation, fence, at_ms, snapshot_seq)
