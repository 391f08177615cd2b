"""Settling a command: its publisher is told, a refusal is recorded, and only then is it acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.codes import Status
from timer_service.domain.machine import Refused
from timer_service.domain.model import AnyCommand, Cancel, Complete, Fail, Retry, Start, Timer
from timer_service.errors import BrokerError
from timer_service.jetstream.topology import REPLY_HEADER
from timer_service.metrics import Metrics
from timer_service.ports import Publicity
from timer_service.wire.commands import BadCommand, Kind, subject_kind
from timer_service.wire.records import Outcome, outcome_of, rejection_of

AGAIN_MS = 1_000
_KINDS: dict[type[AnyCommand], Kind] = {
    Start: "start",
    Cancel: "cancel",
    Complete: "complete",
    Retry: "retry",
    Fail: "fail",
}


class Delivery(Protocol):
    """A message to settle, as ``timer_service.jetstream.consume`` delivers it."""

    subject: str
    data: bytes
    headers: dict[str, str] | None
    seq: int

    @property
    def stored_at_ms(self) -> int: ...
    async def ack(self) -> None: ...
    async def nak(self, delay_ms: int = 0) -> None: ...
    async def park(self) -> None: ...
    async def in_progress(self) -> None: ...


class Work:
    """One command on its way through the service."""

    __slots__ = ("command", "delivery", "reply_to", "snapshot", "unsure", "waited")

    def __init__(self, command: AnyCommand, delivery: Delivery, reply_to: str | None) -> None:
        self.command = command
        self.delivery = delivery
        self.reply_to = reply_to
        self.snapshot: tuple[int, int] | None = None
        """Generation and sequence of the snapshot that this start has stored already."""
        self.unsure = False
        """A write of ours may have been stored without our knowing: then the id in the state is our own."""
        self.waited = False

    @property
    def kind(self) -> Kind:
        return _KINDS[type(self.command)]


class Settling:
    """Every command that is taken is settled or released exactly once."""

    def __init__(
        self,
        clock: Clock,
        publicity: Publicity,
        metrics: Metrics,
        log: Any,
        *,
        allowed_reply: Callable[[str], bool],
    ) -> None:
        self._clock = clock
        self._publicity = publicity
        self._metrics = metrics
        self._log = log
        self._allowed_reply = allowed_reply
        self._in_hand: set[int] = set()

    def take(self, delivery: Delivery) -> bool:
        """False when this command is in hand already, by an earlier delivery."""
        if delivery.seq in self._in_hand:
            return False
        self._in_hand.add(delivery.seq)
        return True

    def reply_to(self, delivery: Delivery) -> str | None:
        """Where the publisher wants to be told; None where it does not say, or names what only we may write to."""
        reply_to = (delivery.headers or {}).get(REPLY_HEADER)
        if reply_to is None or self._allowed_reply(reply_to):
            return reply_to
        self._metrics.replies_ignored += 1
        self._log.warning(events.REPLY_IGNORED, reply_to=reply_to[:200])
        return None

    async def accept(self, work: Work, timer: Timer | None, status: Status, code: str | None) -> None:
        """Accepted or a duplicate: ``timer`` is the timer as it is now."""
        if work.reply_to is not None:
            command = work.command
            outcome = outcome_of(
                timer, command_id=command.command_id, timer_ref=command.timer_ref, status=status, code=code
            )
            await self._publicity.outcome(work.reply_to, outcome)
        self._metrics.command(work.kind, status, code or "")
        await self._done(work.delivery)

    async def refuse(self, work: Work, timer: Timer | None, refused: Refused) -> None:
        """Rejected by what the state says."""
        outcome = outcome_of(
            timer,
            command_id=work.command.command_id,
            timer_ref=work.command.timer_ref,
            status=Status.REJECTED,
            code=refused.code,
            message=refused.message,
        )
        await self._reject(work.kind, outcome, work.delivery, work.reply_to)

    async def refuse_unread(self, bad: BadCommand, delivery: Delivery) -> None:
        """Rejected before it could be read as a command."""
        outcome = outcome_of(
            None,
            command_id=bad.command_id,
            timer_ref=bad.timer_ref,
            status=Status.REJECTED,
            code=bad.code,
            message=bad.message,
        )
        await self._reject(subject_kind(delivery.subject)[0], outcome, delivery, self.reply_to(delivery))

    async def release(self, work: Work, delay_ms: int) -> None:
        """Give it back undecided; it is delivered again after ``delay_ms``."""
        self._in_hand.discard(work.delivery.seq)
        await work.delivery.nak(delay_ms)

    async def _reject(self, kind: str | None, outcome: Outcome, delivery: Delivery, reply_to: str | None) -> None:
        """Where it can't be recorded the command stays queued, and is refused again."""
        rejection = rejection_of(kind, outcome, self._clock.now_ms(), delivery.data)
        try:
            await self._publicity.reject(rejection)
        except BrokerError as error:
            self._log.warning(events.COMMAND_DEFERRED, kind=rejection.kind, error=str(error))
            self._in_hand.discard(delivery.seq)
            await delivery.nak(AGAIN_MS)
            return
        if reply_to is not None:
            await self._publicity.outcome(reply_to, outcome)
        self._metrics.command(rejection.kind, Status.REJECTED, outcome.code or "")
        self._log.info(events.COMMAND_REJECTED, kind=rejection.kind, code=outcome.code, timer_ref=outcome.timer_ref)
        await self._done(delivery)

    async def _done(self, delivery: Delivery) -> None:
        self._in_hand.discard(delivery.seq)
        await delivery.ack()
