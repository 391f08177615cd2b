"""The work on one claim: hand off, store the answer, send it, settle.

Each step is written down before the next one begins, and every write is fenced by the claim. So a process that dies
anywhere leaves a row that the next owner takes up at the right place; what can happen twice is the handler (died
after it, before its answer was stored) and the sending of one feedback, which the timer service recognises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, assert_never

from notify_consumer import events
from notify_consumer.answers import Answer, feedback_of
from notify_consumer.calls import Call
from notify_consumer.context import Context, Deadline
from notify_consumer.errors import (
    HandlerFailed,
    HandoffRefused,
    LeaseLost,
    OutboxError,
    OutboxUnavailable,
    UnreadableResume,
)
from notify_consumer.feedback import FeedbackSender, Refused, Settled, Unheard, tell
from notify_consumer.handlers import Handlers
from notify_consumer.metrics import Metrics
from notify_consumer.outbox.base import Claim, Outbox
from notify_consumer.policy import Policy
from notify_consumer.resume import Resume, read_resume
from timer_service.logs import get_logger

T = TypeVar("T")

RETRY_S = 0.5
_ERROR_CHARS = 2_000


class Run:
    """A claim that is being worked on."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.lane = claim.lane
        self.begun_at = 0.0
        self.sending = claim.feedback is not None
        self.call: Call | None = None
        self.deadline = Deadline()
        self.lost = False
        self.stopping = False
        self.task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether no code of a handler is running for it."""
        return self.call is None or self.call.ended

    def lose(self) -> None:
        """The claim is somebody else's: end the work on it, and write nothing."""
        self.lost = True
        self._cancel()

    def cut_off(self) -> None:
        """The grace is over: end the work, and give the row back if that is safe."""
        self.stopping = True
        self._cancel()

    def abandon(self) -> None:
        """End as a crash would: write nothing, the lease runs out."""
        self._cancel()

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Worker:
    """Does the work on claims; any number at a time. ``may_send`` says whether a slot for sending is free;
    ``answered`` hears of each answer that is stored, ``unavailable`` why a write to the outbox failed."""

    def __init__(
        self,
        outbox: Outbox,
        handlers: Handlers,
        sender: FeedbackSender,
        *,
        policy: Policy,
        metrics: Metrics,
        may_send: Callable[[], bool],
        answered: Callable[[Run], None],
        unavailable: Callable[[str], None],
    ) -> None:
        self._outbox = outbox
        self._handlers = handlers
        self._sender = sender
        self._policy = policy
        self._metrics = metrics
        self._may_send = may_send
        self._answered = answered
        self._unavailable = unavailable
        self._log = get_logger()

    async def work(self, run: Run) -> None:
        """Take one row as far as it goes now. Nothing is raised: what fails is in the row, or logged."""
        try:
            if run.sending or await self._hand_off(run):
                await self._feed_back(run)
        except LeaseLost:
            self._lost(run)
        except asyncio.CancelledError:
            await self._interrupted(run)
        except Exception:
            # Not foreseen. The lease runs out, and then the row is taken up again.
            self._log.exception(events.WORK_FAILED, resume_id=run.claim.resume_id)

    # -- handing off --------------------------------------------------------------------------------------

    async def _hand_off(self, run: Run) -> bool:
        """Have the handler answer, and store that. False: it did not, and the row has been given back."""
        claim = run.claim
        if not self._policy.allows(claim.attempts):
            await self._kill(claim, f"attempt {claim.attempts - 1}, the last one, ended without an answer")
            return False
        try:
            resume = read_resume(claim.body)
            answer = await self._call(run, resume)
        except UnreadableResume as error:
            await self._kill(claim, f"unreadable: {error}")
            return False
        except HandoffRefused as error:
            self._metrics.handoff("refused")
            await self._kill(claim, str(error)[:_ERROR_CHARS])
            return False
        except HandlerFailed as failure:
            await self._failed(claim, failure)
            return False
        await self._store(run, resume, answer)
        return True

    async def _call(self, run: Run, resume: Resume) -> Answer:
        claim = run.claim
        handler = self._handlers.find(resume)
        if handler is None:
            raise HandlerFailed(f"no handler for {claim.flow}: register one, or a default")
        context = Context(resume, flow=claim.flow, attempt=claim.attempts, deadline=run.deadline)
        run.call = Call(handler, context)
        with self._metrics.running():
            return await run.call.run()

    async def _store(self, run: Run, resume: Resume, answer: Answer) -> None:
        claim, feedback = run.claim, feedback_of(resume, answer)
        run.claim = await self._persist(lambda: self._outbox.store_outcome(claim, feedback))
        run.sending = True
        self._answered(run)
        self._metrics.handoff(feedback.kind)
        self._log.info(
            events.HANDOFF_FINISHED,
            resume_id=claim.resume_id,
            flow=claim.flow,
            answer=feedback.kind,
            attempt=claim.attempts,
        )

    async def _failed(self, claim: Claim, failure: HandlerFailed) -> None:
        self._metrics.handoff("error")
        error = str(failure)[:_ERROR_CHARS]
        if not self._policy.allows(claim.attempts + 1):
            await self._kill(claim, f"attempt {claim.attempts}, the last one: {error}")
            return
        delay_ms = self._policy.delay_ms(claim.attempts)
        await self._persist(lambda: self._outbox.back_off(claim, delay_ms, error))
        self._log.warning(
            events.HANDOFF_FAILED,
            resume_id=claim.resume_id,
            flow=claim.flow,
            attempt=claim.attempts,
            again_in_ms=delay_ms,
            error=error,
            exc_info=failure.__cause__,
        )

    # -- feeding back -------------------------------------------------------------------------------------

    async def _feed_back(self, run: Run) -> None:
        claim, feedback = run.claim, run.claim.feedback
        assert feedback is not None
        if not self._may_send():
            await self._persist(lambda: self._outbox.release(claim))
            return
        reply = await tell(self._sender, feedback, self._policy.feedback_timeout_ms)
        self._metrics.feedback(feedback.kind, type(reply).__name__.lower())
        match reply:
            case Settled(how=how):
                await self._persist(lambda: self._outbox.finish(claim, how))
                self._log.info(events.FEEDBACK_SETTLED, resume_id=claim.resume_id, kind=feedback.kind, how=how)
            case Refused(reason=reason):
                await self._kill(claim, f"{feedback.kind} was rejected: {reason}")
            case Unheard(reason=reason):
                await self._unheard(claim, reason)
            case _:
                assert_never(reply)

    async def _unheard(self, claim: Claim, reason: str) -> None:
        delay_ms = self._policy.delay_ms(claim.sends)
        await self._persist(lambda: self._outbox.back_off(claim, delay_ms, reason[:_ERROR_CHARS]))
        self._log.warning(
            events.FEEDBACK_DELAYED,
            resume_id=claim.resume_id,
            send=claim.sends,
            again_in_ms=delay_ms,
            reason=reason,
        )

    # -- ends ---------------------------------------------------------------------------------------------

    async def _kill(self, claim: Claim, reason: str) -> None:
        await self._persist(lambda: self._outbox.kill(claim, reason))
        self._metrics.dead()
        self._log.error(events.RESUME_DEAD, resume_id=claim.resume_id, flow=claim.flow, reason=reason)

    def _lost(self, run: Run) -> None:
        self._metrics.lease_lost()
        self._log.warning(events.LEASE_LOST, resume_id=run.claim.resume_id, owner=run.claim.owner)

    async def _interrupted(self, run: Run) -> None:
        if run.lost:
            self._lost(run)
        elif run.stopping:
            await self.hand_back(run)

    async def hand_back(self, run: Run) -> None:
        """Give the row back at the end of the process, as if it had not been claimed: being cut off is no failure.

        Where a handler may still run the lease is left alone.
        """
        claim = run.claim
        if not run.ended:
            self._log.warning(events.HANDOFF_CUT_OFF, resume_id=claim.resume_id, flow=claim.flow)
            return
        try:
            await self._outbox.release(claim)
        except OutboxError as error:
            self._log.warning(events.HANDOFF_CUT_OFF, resume_id=claim.resume_id, error=str(error))

    async def _persist(self, write: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``write`` until the store takes it; only LeaseLost and the end of the process end that."""
        while True:
            try:
                return await write()
            except OutboxUnavailable as error:
                self._unavailable(str(error))
                await asyncio.sleep(RETRY_S)
