"""The transition table: what each input does to a timer in each phase.

``decide(timer, command)`` answers with one of three values and changes nothing itself:

- ``Write``: the timer's next state, to be stored by compare-and-set;
- ``Settled``: accepted or duplicate, and nothing changes;
- ``Refused``: a code and a sentence for the publisher, and nothing changes.

``timer`` is the live state, or the archived record of a timer that has ended, or None where there is neither.
Checks come in the order of the contract: command id, superseded, unknown, ended, generation, phase, fence.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import msgspec
from msgspec.structs import replace

from timer_service.domain.codes import MAX_RETRIES_EXCEEDED, Code, Status
from timer_service.domain.model import (
    MAX_DUE_MS,
    MAX_RECEIPTS,
    MAX_TIMELINE,
    STATE_VERSION,
    Answer,
    AnyCommand,
    Cancel,
    Command,
    Complete,
    Fail,
    Feedback,
    Occurrence,
    Phase,
    Receipt,
    Resumed,
    Retry,
    Start,
    Timer,
    Wake,
)


class Write(msgspec.Struct, frozen=True):
    """Store ``timer``; the publisher is told ``accepted`` with ``code``."""

    timer: Timer
    code: Code | None = None


class Settled(msgspec.Struct, frozen=True):
    """Nothing to store: the command was known, or came too late to matter."""

    status: Status
    code: str | None = None


class Refused(msgspec.Struct, frozen=True):
    """The command is rejected."""

    code: Code
    message: str


Decision = Write | Settled | Refused


class Situation(Enum):
    """What a command can meet."""

    ABSENT = auto()
    WAITING = auto()
    ELAPSED = auto()
    ENDED = auto()


_SITUATIONS = {
    Phase.WAITING: Situation.WAITING,
    Phase.ELAPSED: Situation.ELAPSED,
    Phase.COMPLETED: Situation.ENDED,
    Phase.FAILED: Situation.ENDED,
    Phase.CANCELLED: Situation.ENDED,
}


def decide(timer: Timer | None, command: AnyCommand, resumed: Resumed | None = None) -> Decision:
    """Decide ``command``. ``resumed`` is what this process knows of the resumes of the present occurrence.

    Repeating a command that was accepted gives ``Settled(duplicate)`` with the code of then.
    """
    if timer is None:
        return _TABLE[type(command), Situation.ABSENT](timer, command, resumed)
    known = _known_command(timer, command)
    if known is not None:
        return known
    if _superseded(timer, command):
        return Settled(Status.ACCEPTED, Code.SUPERSEDED)
    return _TABLE[type(command), _SITUATIONS[timer.phase]](timer, command, resumed)


def elapse(timer: Timer | None, wake: Wake, now_ms: int) -> Write | None:
    """The wake's effect, or None where it is early or stale: then the state stands as it is."""
    if (
        timer is None
        or timer.phase is not Phase.WAITING
        or timer.generation != wake.generation
        or timer.due_at_ms > now_ms
    ):
        return None
    current = replace(
        timer.current,
        woken_at_ms=wake.woken_at_ms,
        elapsed_at_ms=now_ms,
        lateness_ms=now_ms - timer.due_at_ms,
    )
    return Write(
        replace(
            timer,
            phase=Phase.ELAPSED,
            fence=timer.fence + 1,
            timeline=(*timer.timeline[:-1], current),
        )
    )


def note_resumed(timer: Timer, resumed: Resumed) -> Timer:
    """Carry what is known of the resumes into the timeline. The fence does not move."""
    return replace(timer, timeline=(*timer.timeline[:-1], _with_resumes(timer.current, resumed)))


# -- checks that come before the table ----------------------------------------------------------------------


def _known_command(timer: Timer, command: Command) -> Settled | Refused | None:
    for receipt in timer.receipts:
        if receipt.command_id == command.command_id:
            if receipt.content == command.content:
                return Settled(Status.DUPLICATE, receipt.code)
            return Refused(Code.CONFLICT, "this command_id was used before with other content")
    return None


def _superseded(timer: Timer, command: AnyCommand) -> bool:
    """A newer start or cancel has been applied, and this one would undo it."""
    if command.order > timer.applied:
        return False
    if isinstance(command, Start):
        would_begin = command.replace or timer.phase.ended
        return would_begin and not (command.lineage and timer.phase.ended)
    return isinstance(command, Cancel) and command.generation is None


_BEYOND_THE_END = Refused(Code.INVALID_DUE, "the delay leads beyond 2200-01-01T00:00:00Z")


# -- starts -------------------------------------------------------------------------------------------------


def _begin(timer: Timer | None, start: Start, resumed: Resumed | None) -> Decision:
    """The first generation, or the next one after an end or over a living one."""
    due_at_ms = start.due.instant(start.accepted_at_ms)
    if due_at_ms > MAX_DUE_MS:
        return _BEYOND_THE_END
    generation = 0 if timer is None else timer.generation + 1
    past = () if timer is None else timer.timeline
    return Write(
        Timer(
            v=STATE_VERSION,
            timer_ref=start.timer_ref,
            timer=start.timer,
            phase=Phase.WAITING,
            generation=generation,
            fence=1 if timer is None else timer.fence + 1,
            due_at_ms=due_at_ms,
            delay_ms=start.due.delay_ms,
            retries_used=0,
            max_retries=start.max_retries,
            payload=start.payload,
            payload_sha256=start.payload_sha256,
            edges=start.edges,
            runtime_sha256=start.runtime_sha256,
            timeline=_next_occurrence(past, generation, start, due_at_ms),
            receipts=_receipts(timer, start),
            applied=start.order,
            start_content=start.content,
            archive_seq=0 if timer is None else timer.archive_seq,
        )
    )


def _begin_again(timer: Timer, start: Start, resumed: Resumed | None) -> Decision:
    if start.lineage:
        return Refused(Code.ALREADY_TERMINAL, f"this timer has ended ({timer.phase}); a lineage starts once")
    return _begin(timer, start, resumed)


def _start_over_living(timer: Timer, start: Start, resumed: Resumed | None) -> Decision:
    if start.replace:
        return _begin(_answered(timer, "replace", start, resumed), start, resumed)
    if start.content == timer.start_content:
        return Settled(Status.DUPLICATE)
    return Refused(Code.CONFLICT, "the timer lives and was started with other content")


# -- cancel -------------------------------------------------------------------------------------------------


def _other_generation(timer: Timer, generation: int) -> Refused | None:
    if generation == timer.generation:
        return None
    return Refused(
        Code.STALE_GENERATION,
        f"the present generation is {timer.generation}, not the one that was named",
    )


def _cancel_waiting(timer: Timer, cancel: Cancel, resumed: Resumed | None) -> Decision:
    if cancel.generation is not None and (stale := _other_generation(timer, cancel.generation)):
        return stale
    answered = replace(_answered(timer, "cancel", cancel, None), applied=max(timer.applied, cancel.order))
    return Write(_ended(answered, Phase.CANCELLED, cancel, message=cancel.reason))


def _cancel_elapsed(timer: Timer, cancel: Cancel, resumed: Resumed | None) -> Decision:
    """The resume stands; a retry of this generation will end the timer instead of arming it again."""
    if cancel.generation is not None and (stale := _other_generation(timer, cancel.generation)):
        return stale
    marked = replace(
        timer,
        cancel_requested=True,
        applied=max(timer.applied, cancel.order),
        receipts=_receipts(timer, cancel, Code.TOO_LATE),
    )
    return Write(note_resumed(marked, resumed) if resumed else marked, Code.TOO_LATE)


# -- feedback -----------------------------------------------------------------------------------------------


def _misses_waiting(timer: Timer, feedback: Feedback, resumed: Resumed | None) -> Refused:
    return _other_generation(timer, feedback.generation) or Refused(
        Code.NOT_ELAPSED, f"generation {timer.generation} is still waiting"
    )


def _misses_elapsed(timer: Timer, feedback: Feedback) -> Refused | None:
    stale = _other_generation(timer, feedback.generation)
    if stale is None and feedback.fence != timer.fence:
        return Refused(Code.STALE_FENCE, f"the present fence is {timer.fence}, not the one that was named")
    return stale


def _complete(timer: Timer, complete: Complete, resumed: Resumed | None) -> Decision:
    answered = _answered(timer, "complete", complete, resumed)
    return _misses_elapsed(timer, complete) or Write(_ended(answered, Phase.COMPLETED, complete))


def _fail(timer: Timer, fail: Fail, resumed: Resumed | None) -> Decision:
    answered = _answered(timer, "fail", fail, resumed)
    return _misses_elapsed(timer, fail) or Write(
        _ended(answered, Phase.FAILED, fail, failure_code=fail.failure_code, message=fail.message)
    )


def _retry(timer: Timer, retry: Retry, resumed: Resumed | None) -> Decision:
    stale = _misses_elapsed(timer, retry)
    if stale is not None:
        return stale
    answered = _answered(timer, "retry", retry, resumed)
    if timer.cancel_requested:
        return Write(_ended(answered, Phase.CANCELLED, retry))
    if timer.max_retries is not None and timer.retries_used >= timer.max_retries:
        return Write(_ended(answered, Phase.FAILED, retry, failure_code=MAX_RETRIES_EXCEEDED))
    return _arm_again(answered, retry)


def _arm_again(timer: Timer, retry: Retry) -> Decision:
    if retry.due is not None:
        due_at_ms, delay_ms = retry.due.instant(retry.accepted_at_ms), retry.due.delay_ms or timer.delay_ms
    elif timer.delay_ms is not None:
        due_at_ms, delay_ms = retry.accepted_at_ms + timer.delay_ms, timer.delay_ms
    else:
        return Refused(Code.INVALID_DUE, "due is absent, and no start or retry of this timer gave a delay to repeat")
    if due_at_ms > MAX_DUE_MS:
        return _BEYOND_THE_END
    generation = timer.generation + 1
    return Write(
        replace(
            timer,
            phase=Phase.WAITING,
            generation=generation,
            fence=timer.fence + 1,
            due_at_ms=due_at_ms,
            delay_ms=delay_ms,
            retries_used=timer.retries_used + 1,
            receipts=_receipts(timer, retry),
            timeline=_next_occurrence(timer.timeline, generation, retry, due_at_ms),
        )
    )


# -- refusals of the state ----------------------------------------------------------------------------------


def _unknown(timer: None, command: Command, resumed: Resumed | None) -> Refused:
    return Refused(Code.UNKNOWN_TIMER, "no timer with this timer_ref is known")


def _terminal(timer: Timer, command: Command, resumed: Resumed | None) -> Refused:
    return Refused(Code.ALREADY_TERMINAL, f"this timer has ended ({timer.phase})")


_TABLE: dict[tuple[type[Any], Situation], Callable[[Any, Any, Resumed | None], Decision]] = {
    (Start, Situation.ABSENT): _begin,
    (Start, Situation.WAITING): _start_over_living,
    (Start, Situation.ELAPSED): _start_over_living,
    (Start, Situation.ENDED): _begin_again,
    (Cancel, Situation.ABSENT): _unknown,
    (Cancel, Situation.WAITING): _cancel_waiting,
    (Cancel, Situation.ELAPSED): _cancel_elapsed,
    (Cancel, Situation.ENDED): _terminal,
    (Complete, Situation.ABSENT): _unknown,
    (Complete, Situation.WAITING): _misses_waiting,
    (Complete, Situation.ELAPSED): _complete,
    (Complete, Situation.ENDED): _terminal,
    (Retry, Situation.ABSENT): _unknown,
    (Retry, Situation.WAITING): _misses_waiting,
    (Retry, Situation.ELAPSED): _retry,
    (Retry, Situation.ENDED): _terminal,
    (Fail, Situation.ABSENT): _unknown,
    (Fail, Situation.WAITING): _misses_waiting,
    (Fail, Situation.ELAPSED): _fail,
    (Fail, Situation.ENDED): _terminal,
}


# -- pieces of a next state ---------------------------------------------------------------------------------


def _receipts(timer: Timer | None, command: Command, code: Code | None = None) -> tuple[Receipt, ...]:
    past = () if timer is None else timer.receipts[-(MAX_RECEIPTS - 1) :]
    return (*past, Receipt(command.command_id, command.content, code))


def _next_occurrence(
    past: tuple[Occurrence, ...], generation: int, command: Command, due_at_ms: int
) -> tuple[Occurrence, ...]:
    return (*past[-(MAX_TIMELINE - 1) :], Occurrence(generation, command.accepted_at_ms, due_at_ms))


def _with_resumes(occurrence: Occurrence, resumed: Resumed) -> Occurrence:
    return replace(occurrence, resumed_at_ms=resumed.at_ms, resumes=max(resumed.count, occurrence.resumes))


def _answered(timer: Timer, answer: Answer, command: Command, resumed: Resumed | None) -> Timer:
    current = timer.current
    if resumed is not None:
        current = _with_resumes(current, resumed)
    elif current.elapsed_at_ms is not None and current.resumes == 0 and answer != "replace":
        current = replace(current, resumes=1)  # an answer proves that a resume was read
    current = replace(current, answer=answer, answered_at_ms=command.accepted_at_ms)
    return replace(timer, timeline=(*timer.timeline[:-1], current))


def _ended(
    timer: Timer,
    phase: Phase,
    command: Command,
    *,
    failure_code: str | None = None,
    message: str | None = None,
) -> Timer:
    return replace(
        timer,
        phase=phase,
        fence=timer.fence + 1,
        receipts=_receipts(timer, command),
        failure_code=failure_code,
        message=message,
        ended_at_ms=command.accepted_at_ms,
    )
