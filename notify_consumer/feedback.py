"""Telling the timer service what a handler answered, and what to make of its reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from notify_consumer.outbox.base import Feedback, FeedbackKind
from timer_service.domain.codes import Code
from timer_service.errors import BrokerError, CommandRejected, NotStored, OutcomeUnknown
from timer_service.wire.records import Outcome

# The occurrence has been answered, replaced or ended: there is nothing to say any more.
HARMLESS = frozenset({Code.STALE_GENERATION, Code.STALE_FENCE, Code.ALREADY_TERMINAL, Code.UNKNOWN_TIMER})


class FeedbackSender(Protocol):
    """Publishes a command and awaits its outcome; ``timer_service.client.TimerClient`` is one."""

    async def send(
        self,
        kind: FeedbackKind,
        body: Mapping[str, Any],
        *,
        wait: bool = True,
        timeout_ms: int | None = None,
    ) -> Outcome | None:
        """Raises CommandRejected, OutcomeUnknown or NotStored. Repeating it with the same body is safe."""
        ...


class Settled(msgspec.Struct, frozen=True):
    """The timer service knows; ``how`` is the status or the harmless code."""

    how: str


class Refused(msgspec.Struct, frozen=True):
    """It will never take this answer."""

    reason: str


class Unheard(msgspec.Struct, frozen=True):
    """No word of it: to be repeated."""

    reason: str


Reply = Settled | Refused | Unheard


async def tell(sender: FeedbackSender, feedback: Feedback, timeout_ms: int) -> Reply:
    """Send ``feedback`` once and wait up to ``timeout_ms`` for what becomes of it."""
    try:
        outcome = await sender.send(feedback.kind, feedback.body, wait=True, timeout_ms=timeout_ms)
    except CommandRejected as rejected:
        return Settled(rejected.code) if rejected.code in HARMLESS else Refused(str(rejected))
    except (OutcomeUnknown, NotStored, BrokerError) as error:
        return Unheard(str(error))
    return Settled("accepted" if outcome is None else str(outcome.status))
