"""Between the outbox and the work: what is claimed when, kept leased, and given back at the end.

Two pools of slots: one for handlers, shared out fairly between flows, one for feedback on its way, so that a timer
service that is away does not keep handlers from working. Every claim is renewed while it is worked on; when one is
lost, the work on it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from notify_consumer import events
from notify_consumer.errors import OutboxUnavailable
from notify_consumer.fairness import Shares
from notify_consumer.feedback import FeedbackSender
from notify_consumer.handlers import Handlers
from notify_consumer.metrics import Metrics
from notify_consumer.outbox.base import FEEDBACK_LANE, Claim, Outbox, Survey
from notify_consumer.policy import Policy
from notify_consumer.work import RETRY_S, Run, Worker
from timer_service.logs import get_logger

POLL_S = 1.0
# Thousands of backoffs that end one after the other must not mean as many looks at the outbox.
LEAST_PAUSE_S = 0.02
# A full disk refuses what is new and takes the renewals of this relay: failures that come again and again, such as at
# each delivery of a resume, count as one.
UNAVAILABLE_S = 3.0
SENDING_LIMIT = 128
_CUT_OFF_S = 3.0


class Relay:
    """Works on what is in ``outbox`` until it is stopped. ``owner`` must be this process's alone."""

    def __init__(
        self,
        outbox: Outbox,
        handlers: Handlers,
        sender: FeedbackSender,
        *,
        owner: str,
        policy: Policy,
        metrics: Metrics | None = None,
    ) -> None:
        self._outbox = outbox
        self._owner = owner
        self._policy = policy
        self._metrics = metrics or Metrics()
        self._log = get_logger()
        self._runs: dict[str, Run] = {}
        self._leftover: list[Run] = []
        self._woken = asyncio.Event()
        self._stopping = False
        self._renewed_at = 0.0
        self._failures = 0
        self._failed_at = -UNAVAILABLE_S
        self._shares = Shares(policy.concurrency)
        self._worker = Worker(
            outbox,
            handlers,
            sender,
            policy=policy,
            metrics=self._metrics,
            may_send=lambda: self.sending <= SENDING_LIMIT,
            answered=self._freed,
            unavailable=self.say_unavailable,
        )
        self.unavailable: str | None = None
        """Why the outbox can't be used at present, None while it can."""

    def wake(self) -> None:
        """There may be something to claim: look at once."""
        self._woken.set()

    def say_unavailable(self, reason: str) -> None:
        """Somebody could not write to the outbox: so it stays ``unavailable`` until the relay can, in a later round,
        and nobody has said so again for three seconds."""
        self._failures += 1
        self._failed_at = asyncio.get_running_loop().time()
        self._report(reason)

    def stop(self) -> None:
        """Claim nothing more. ``run`` ends within the grace; what still runs then is handed back."""
        self._stopping = True
        self.wake()

    @property
    def handling(self) -> int:
        """How many handlers are at work."""
        return sum(not run.sending for run in self._runs.values())

    @property
    def longest_s(self) -> float:
        """For how long the oldest of them is, 0 without any."""
        now = asyncio.get_running_loop().time()
        return max((now - run.begun_at for run in self._runs.values() if not run.sending), default=0.0)

    @property
    def sending(self) -> int:
        """How many feedbacks are on their way."""
        return sum(run.sending for run in self._runs.values())

    @property
    def stuck(self) -> bool:
        """After ``run``: whether a handler goes on in the event loop although it was cancelled."""
        return any(run.call is not None and run.call.ignores_cancel for run in self._leftover)

    async def run(self) -> None:
        """Claim and work until ``stop``, then drain. Cancelling it is a crash: leases are left to run out."""
        renewing = asyncio.create_task(self._renew_forever(), name="relay.renew")
        try:
            while not self._stopping:
                await self._pause(await self._round())
            await self._drain()
        finally:
            renewing.cancel()
            for run in self._runs.values():
                run.abandon()

    # -- claiming -----------------------------------------------------------------------------------------

    async def _round(self) -> float:
        """Fill the free slots; returns for how many seconds there will be nothing to do unless woken."""
        self._woken.clear()
        if self.handling >= self._policy.concurrency and self.sending >= SENDING_LIMIT:
            return POLL_S
        failures = self._failures
        try:
            if self._overdue() or self.unavailable is not None:
                await self._renew()  # where writing failed: a look may work while a write does not
            survey = await self._outbox.survey(max(self._policy.concurrency, SENDING_LIMIT))
            wanted = self._wanted(survey)
            claims = await self._claim(wanted) if wanted else []
        except OutboxUnavailable as error:
            self._report(str(error))
            return RETRY_S
        if failures == self._failures and asyncio.get_running_loop().time() >= self._failed_at + UNAVAILABLE_S:
            self._report(None)
        for claim in claims:
            self._start(claim)
        if claims:
            return 0
        return _seconds(survey) if self.unavailable is None else RETRY_S

    def _wanted(self, survey: Survey) -> dict[str, int]:
        lanes = dict(survey.lanes)
        answered = lanes.pop(FEEDBACK_LANE, None)
        held = Counter(run.claim.lane for run in self._runs.values() if not run.sending)
        wanted = self._shares.allot(lanes, held, self._policy.concurrency - self.handling)
        room = SENDING_LIMIT - self.sending
        if answered is not None and room > 0:
            wanted[FEEDBACK_LANE] = min(answered.count, room)
        return wanted

    async def _claim(self, wanted: dict[str, int]) -> list[Claim]:
        claims = await self._outbox.claim(self._owner, wanted, self._policy.lease_ms)
        if not self._stopping:
            return claims
        await asyncio.gather(*(self._worker.hand_back(Run(claim)) for claim in claims))
        return []

    def _start(self, claim: Claim) -> None:
        if not self._runs:
            self._renewed_at = asyncio.get_running_loop().time()
        former = self._runs.get(claim.resume_id)
        run = self._runs[claim.resume_id] = Run(claim)
        run.begun_at = asyncio.get_running_loop().time()
        if not run.sending:
            self._shares.begun(run.lane)
        run.task = asyncio.create_task(self._work(run, former), name=f"relay.{claim.resume_id}")
        self._metrics.claimed(claim.waited_ms)

    async def _work(self, run: Run, former: Run | None) -> None:
        try:
            if former is not None and former.task is not None:
                # Our own lease ran out, and we took the row again: the work on the old claim ends first.
                former.lose()
                await asyncio.wait({former.task})
            await self._worker.work(run)
        finally:
            if self._runs.get(run.claim.resume_id) is run:
                del self._runs[run.claim.resume_id]
            if not run.ended:
                self._leftover = [each for each in (*self._leftover, run) if not each.ended]
            if run.sending:
                self.wake()
            else:
                self._freed(run)

    def _freed(self, run: Run) -> None:
        """The hand-off is over, and another may have its slot."""
        self._shares.ended(run.lane, asyncio.get_running_loop().time() - run.begun_at)
        self.wake()

    async def _pause(self, seconds: float) -> None:
        if seconds and not self._stopping:
            # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken.wait()

    def _report(self, unavailable: str | None) -> None:
        if unavailable != self.unavailable:
            event = events.OUTBOX_AVAILABLE if unavailable is None else events.OUTBOX_UNAVAILABLE
            self._log.warning(event, error=unavailable)
        self.unavailable = unavailable

    # -- leases -------------------------------------------------------------------------------------------

    async def _renew_forever(self) -> None:
        interval_s = self._policy.lease_ms / 3_000
        wait_s = interval_s
        while True:
            await asyncio.sleep(wait_s)
            try:
                await self._renew()
                wait_s = interval_s
            except OutboxUnavailable as error:
                self.say_unavailable(str(error))
                wait_s = min(interval_s, RETRY_S)

    def _overdue(self) -> bool:
        """Whether leases of our own may have run out: then they are renewed before anything is claimed, so that a
        process which was frozen, or whose store was, does not take its own rows away from itself."""
        since_s = asyncio.get_running_loop().time() - self._renewed_at
        return bool(self._runs) and since_s > self._policy.lease_ms / 2_000

    async def _renew(self) -> None:
        runs, begun_at = dict(self._runs), asyncio.get_running_loop().time()
        if not runs and self.unavailable is None:
            return
        lost = await self._outbox.renew([run.claim for run in runs.values()], self._policy.lease_ms)
        self._renewed_at = begun_at
        for resume_id in lost:
            if self._runs.get(resume_id) is runs[resume_id]:  # not one that has ended meanwhile
                runs[resume_id].lose()

    # -- the end ------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Let what is under way finish within the grace; end the rest."""
        for run in self._runs.values():
            run.deadline.stop(self._policy.grace_ms)
        if late := await _unfinished(self._runs, self._policy.grace_ms / 1000):
            for run in late:
                run.cut_off()
            await _unfinished(self._runs, _CUT_OFF_S)


async def _unfinished(runs: dict[str, Run], timeout_s: float) -> list[Run]:
    """Those of ``runs`` whose work has not ended after ``timeout_s``."""
    tasks = [run.task for run in runs.values() if run.task is not None]
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
    return [run for run in runs.values() if run.task is not None and not run.task.done()]


def _seconds(survey: Survey) -> float:
    return POLL_S if survey.next_in_ms is None else min(max(survey.next_in_ms / 1000, LEAST_PAUSE_S), POLL_S)
