"""Hypothesis strategy: timers as they really come about, by commands and wakes."""

from __future__ import annotations

from typing import Any, Literal

import hypothesis.strategies as st

from tests.support.bodies import bodies, integers, starts
from tests.support.commands import command
from timer_service.domain.machine import Write, decide, elapse, note_resumed
from timer_service.domain.model import Phase, Resumed, Timer, Wake
from timer_service.wire.commands import Kind

_T0 = 1_700_000_000_000
_STEPS: list[Kind | Literal["wake", "noted"]] = [
    *("wake", "wake", "wake", "noted", "start", "cancel", "retry", "retry", "complete", "fail"),
]


@st.composite
def lives(draw: st.DrawFn, *, most: int = 24) -> Timer:
    """A timer after a start and up to ``most`` further steps, in any phase; payload, edges and texts vary."""
    fields = draw(starts())
    decision = decide(None, command("start", _T0, command_id="c0", **fields))
    assert isinstance(decision, Write)
    timer = decision.timer
    for step in range(1, draw(st.integers(0, most)) + 1):
        timer = _step(draw, timer, step, fields)
    return timer


def _step(draw: st.DrawFn, timer: Timer, step: int, fields: dict[str, Any]) -> Timer:
    """One more thing that happens to ``timer``; what is refused leaves it as it is."""
    at_ms = _T0 + step * 1_000
    what = draw(st.sampled_from(_STEPS))
    match what:
        case "wake":
            now_ms = max(at_ms, timer.due_at_ms)
            write: object = elapse(timer, Wake(timer.timer_ref, timer.generation, now_ms), now_ms)
        case "noted":
            resumed = Resumed(at_ms, step)
            return note_resumed(timer, resumed) if timer.phase is Phase.ELAPSED else timer
        case _:
            write = decide(timer, _given(draw, what, timer, at_ms, f"c{step}", fields))
    return write.timer if isinstance(write, Write) else timer


def _given(draw: st.DrawFn, kind: Kind, timer: Timer, at_ms: int, command_id: str, fields: dict[str, Any]) -> Any:
    if kind == "start":
        return command("start", at_ms, **{**fields, "command_id": command_id, "max_retries": draw(integers(0, 3))})
    same = {
        "timer_ref": timer.timer_ref,
        "generation": timer.generation,
        "fence": timer.fence,
        "command_id": command_id,
    }
    if kind == "cancel":
        del same["fence"]
    others = draw(bodies(kind))[1]
    return command(kind, at_ms, **{**others, **same})
