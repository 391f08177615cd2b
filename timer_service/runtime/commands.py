"""The command service: read, decide, write, tell, settle; one command of a timer at a time.

A command is settled (acknowledged) only after what it changed, or that it was refused, is stored. Deciding twice is
harmless: the state keeps the ids of what it accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from timer_service import events
from timer_service.clock import Clock
from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import TimerRef
from timer_service.domain.machine import Refused, Settled, Write, decide
from timer_service.domain.model import ABSENT, AnyCommand, Cancel, Order, Start, Timer
from timer_service.domain.summary import summary_of
from timer_service.errors import Ambiguous, BrokerError, StorageFull, UnreadableState, WrongRevision
from timer_service.fibers import start_fiber
from timer_service.metrics import Metrics
from timer_service.ports import Archive, Publicity, Snapshots, StateStore, Stored
from timer_service.runtime.admission import Admission
from timer_service.runtime.archived import Archived
from timer_service.runtime.driver import Driver
from timer_service.runtime.lanes import Lanes
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.runtime.resumes import resumed_of
from timer_service.runtime.terminals import Terminals
from timer_service.runtime.wakes import Delivery
from timer_service.wire.commands import BadCommand, Envelope, read_command, subject_kind
from timer_service.wire.records import Outcome, encode, outcome_of, rejection_of, resume_of

REPLY_HEADER = "Durable-Timer-Reply"
_MAX_TRIES = 12
_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_HOLD_MS = 1_000
_MAX_HOLD_MS = 10_000
_KEEP_ALIVE_S = 2.0
_ENVELOPE_MARGIN = 512
_GROWTH = 16 * 512 + 2_048  # what receipts, timeline and a message can add to a state over its life


class Work:
    """One command on its way through the service."""

    __slots__ = ("command", "delivery", "kind", "reply_to", "snapshot", "unsure", "waited")

    def __init__(self, command: AnyCommand, delivery: Delivery, kind: str, reply_to: str | None) -> None:
        self.command = command
        self.delivery = delivery
        self.kind = kind
        self.reply_to = reply_to
        self.snapshot: tuple[int, int] | None = None
        """Generation and sequence of the snapshot that this start has stored already."""
        self.unsure = False
        """A write of ours may have been stored without our knowing: then the id in the state is our own."""
        self.waited = False


class CommandService:
    """Settles commands; every one gets one outcome, and every refusal is recorded."""

    def __init__(
        self,
        clock: Clock,
        store: StateStore,
        archive: Archive,
        snapshots: Snapshots,
        publicity: Publicity,
        terminals: Terminals,
        driver: Driver,
        lanes: Lanes,
        recent: Recent,
        archived: Archived,
        admission: Admission,
        problems: Problems,
        metrics: Metrics,
        log: Any,
        *,
        offset_ms: Callable[[], int],
        allowed_reply: Callable[[str], bool],
        max_payload: Callable[[], int],
        inline_payload_max_bytes: int,
    ) -> None:
        self._clock = clock
        self._store = store
        self._archive = archive
        self._snapshots = snapshots
        self._publicity = publicity
        self._terminals = terminals
        self._driver = driver
        self._lanes = lanes
        self._recent = recent
        self._archived = archived
        self._admission = admission
        self._problems = problems
        self._metrics = metrics
        self._log = log
        self._offset_ms = offset_ms
        self._allowed_reply = allowed_reply
        self._max_payload = max_payload
        self._inline_max = inline_payload_max_bytes
        self._in_hand: set[int] = set()
        self._arrivals: dict[TimerRef, list[asyncio.Future[None]]] = {}
        self._waiters: set[asyncio.Task[None]] = set()

    # -- in ---------------------------------------------------------------------------------------------------

    def handle(self, delivery: Delivery) -> None:
        """Take one command; returns at once. A second delivery of one in hand is dropped: the first settles it."""
        if delivery.seq in self._in_hand:
            start_fiber(delivery.nak(_HOLD_MS), self._on_stray_error)
            return
        self._in_hand.add(delivery.seq)
        stored_at_ms = delivery.stored_at_ms
        envelope = Envelope(Order(stored_at_ms, delivery.seq), stored_at_ms + self._offset_ms())
        try:
            command = read_command(delivery.subject, delivery.data, envelope)
        except BadCommand as bad:
            start_fiber(self._refuse_unread(bad, delivery), self._on_stray_error)
            return
        work = Work(command, delivery, type(command).__name__.lower(), self._reply_to(delivery))
        self._lanes.run(command.timer_ref, lambda: self._settle(work))

    def entry_arrived(self, timer_ref: TimerRef) -> None:
        """The feed shows a state for ``timer_ref``: cancels that wait for its start are decided again."""
        for future in self._arrivals.pop(timer_ref, ()):
            if not future.done():
                future.set_result(None)

    async def stop(self) -> None:
        """Hand back the cancels that still wait."""
        for task in list(self._waiters):
            task.cancel()
        await asyncio.gather(*self._waiters, return_exceptions=True)

    def _reply_to(self, delivery: Delivery) -> str | None:
        reply_to = (delivery.headers or {}).get(REPLY_HEADER)
        if reply_to is None or self._allowed_reply(reply_to):
            return reply_to
        self._metrics.reply_ignored()
        self._log.warning(events.REPLY_IGNORED, reply_to=reply_to[:200])
        return None

    # -- deciding ---------------------------------------------------------------------------------------------

    async def _settle(self, work: Work) -> None:
        for attempt in range(_MAX_TRIES):
            try:
                if await self._decide_and_write(work, fresh=attempt > 0):
                    return
            except StorageFull as error:
                await self._hold(work, str(error))
                return
            except UnreadableState as error:
                self._problems.report(error)
                await self._refuse(work, None, Refused(Code.STATE_UNREADABLE, error.message))
                return
            except WrongRevision:
                pass
            except BrokerError as error:
                work.unsure = work.unsure or isinstance(error, Ambiguous)
                await asyncio.sleep(min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S))
            self._recent.forget(work.command.timer_ref)
        self._log.warning(events.COMMAND_DEFERRED, kind=work.kind, timer_ref=work.command.timer_ref)
        await self._release(work, _HOLD_MS)

    async def _decide_and_write(self, work: Work, *, fresh: bool) -> bool:
        """One round; False when it has to be decided again on a fresh reading."""
        command = work.command
        stored, sure = await self._load(command, fresh)
        timer = stored.timer
        decision = decide(timer, command, None if timer is None else resumed_of(self._driver, timer))
        if isinstance(decision, Write):
            await self._write(work, stored, decision)
            return True
        if not sure:
            self._recent.forget(command.timer_ref)
            return False
        if isinstance(decision, Settled):
            await self._settled(work, timer, decision)
        elif decision.code is Code.UNKNOWN_TIMER and isinstance(command, Cancel) and not work.waited:
            self._wait_for_start(work, command)
        else:
            await self._refuse(work, timer, decision)
        return True

    async def _load(self, command: AnyCommand, fresh: bool) -> tuple[Stored, bool]:
        """What stands, and whether that is sure enough for a refusal.

        A start of a timer that surely has no former life reads nothing: its create fails where that is wrong.
        """
        timer_ref = command.timer_ref
        if not fresh:
            known = self._recent.get(timer_ref)
            if known is not None:
                return known, False
            if isinstance(command, Start) and not self._archived.may_have(timer_ref):
                return Stored(None, 0), False
        stored = await self._store.get(timer_ref)
        self._problems.solved(timer_ref)
        if stored.timer is not None:
            self._driver.observe(timer_ref, stored.revision, summary_of(stored.timer))
            return stored, True
        former = await self._archive.last(timer_ref)
        if former.timer is None:
            return stored, True
        self._archived.add(timer_ref)
        return Stored(replace(former.timer, archive_seq=former.revision), stored.revision), True

    # -- writing ----------------------------------------------------------------------------------------------

    async def _write(self, work: Work, stored: Stored, write: Write) -> None:
        timer = write.timer
        if isinstance(work.command, Start):
            prepared = await self._prepare(work, work.command, stored, timer)
            if prepared is None:
                return
            timer = prepared
        revision = await self._store.put(timer, stored.revision)
        timer_ref = timer.timer_ref
        self._recent.keep(timer_ref, Stored(timer, revision))
        self._driver.observe(timer_ref, revision, summary_of(timer))
        await self._accepted(work, timer, Status.ACCEPTED, write.code)
        if self._arrivals:
            self.entry_arrived(timer_ref)
        if timer.phase.ended:
            await self._terminals.finish(timer, revision)
        elif stored.timer is not None and stored.timer.snapshot_seq not in (None, timer.snapshot_seq):
            await self._terminals.drop_snapshot(stored.timer)

    async def _prepare(self, work: Work, start: Start, stored: Stored, timer: Timer) -> Timer | None:
        """What a start needs before its state is written; None when it was settled otherwise."""
        if (size := self._envelope_bytes(timer, start)) > self._max_payload():
            message = f"its messages would have up to {size} bytes; the broker takes {self._max_payload()}"
            await self._refuse(work, stored.timer, Refused(Code.TOO_LARGE, message))
            return None
        if not self._admission.open:
            await self._hold(work, self._admission.reason)
            return None
        former = stored.timer
        if former is not None and former.phase.ended and former.status is None:
            timer = replace(timer, archive_seq=await self._terminals.archive(former))
        if memoryview(start.payload).nbytes > self._inline_max:
            timer = replace(timer, payload=ABSENT, snapshot_seq=await self._snapshot(work, start, timer))
        return timer

    async def _snapshot(self, work: Work, start: Start, timer: Timer) -> int:
        if work.snapshot is None or work.snapshot[0] != timer.generation:
            seq = await self._snapshots.add(timer.timer_ref, timer.generation, start.payload)
            work.snapshot = (timer.generation, seq)
        return work.snapshot[1]

    def _envelope_bytes(self, timer: Timer, start: Start) -> int:
        """The largest message that this timer can lead to; cheap for the small ones, which nearly all are."""
        size = memoryview(start.payload).nbytes
        if size + _GROWTH + 8_192 < self._max_payload():
            return 0
        resume = len(encode(resume_of(timer, start.payload))) + _ENVELOPE_MARGIN
        inline = timer if size <= self._inline_max else replace(timer, payload=ABSENT)
        return max(resume, len(encode(inline)) + _GROWTH)

    async def _hold(self, work: Work, reason: str) -> None:
        """No room: a start stays queued without an outcome; it is refused when the queue itself is short of room."""
        if isinstance(work.command, Start) and self._admission.commands_short:
            message = f"{reason}; the command stream is more than half full"
            await self._refuse(work, None, Refused(Code.STORAGE_FULL, message))
            return
        self._log.info(events.COMMAND_HELD, kind=work.kind, timer_ref=work.command.timer_ref, reason=reason)
        await self._release(work, self._admission.hold_ms())

    # -- cancel before start ----------------------------------------------------------------------------------

    def _wait_for_start(self, work: Work, cancel: Cancel) -> None:
        """Outside the lane, so that the start can pass; then the cancel is decided again, for good."""
        work.waited = True
        task = asyncio.get_running_loop().create_task(self._wait(work, cancel))
        self._waiters.add(task)
        task.add_done_callback(self._waiters.discard)

    async def _wait(self, work: Work, cancel: Cancel) -> None:
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.setdefault(cancel.timer_ref, []).append(arrived)
        end = asyncio.get_running_loop().time() + cancel.wait_ms / 1000
        try:
            while not arrived.done() and (left_s := end - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait([arrived], timeout=min(left_s, _KEEP_ALIVE_S))
                await work.delivery.in_progress()
        except asyncio.CancelledError:
            await self._release(work, 0)
            raise
        finally:
            self._forget_arrival(cancel.timer_ref, arrived)
        self._lanes.run(cancel.timer_ref, lambda: self._settle(work))

    def _forget_arrival(self, timer_ref: TimerRef, arrived: asyncio.Future[None]) -> None:
        waiting = self._arrivals.get(timer_ref, [])
        if arrived in waiting:
            waiting.remove(arrived)
        if not waiting:
            self._arrivals.pop(timer_ref, None)

    # -- settling ---------------------------------------------------------------------------------------------

    async def _settled(self, work: Work, timer: Timer | None, settled: Settled) -> None:
        status = settled.status
        if work.unsure and status is Status.DUPLICATE:
            status = Status.ACCEPTED  # the id in the state is our own write, whose reply was lost
        live = timer is not None and timer.status is None
        if live and timer is not None and timer.phase.ended:
            await self._accepted(work, timer, status, settled.code)
            stored = await self._store.get(timer.timer_ref)
            if stored.timer is not None and stored.timer.phase.ended:
                await self._terminals.finish(stored.timer, stored.revision)
            return
        await self._accepted(work, timer, status, settled.code)

    async def _accepted(self, work: Work, timer: Timer | None, status: Status, code: str | None) -> None:
        if work.reply_to is not None:
            command = work.command
            outcome = outcome_of(
                timer, command_id=command.command_id, timer_ref=command.timer_ref, status=status, code=code
            )
            await self._publicity.outcome(work.reply_to, outcome)
        self._metrics.command(work.kind, status, code or "")
        await self._done(work.delivery)

    async def _refuse(self, work: Work, timer: Timer | None, refused: Refused) -> None:
        command = work.command
        outcome = outcome_of(
            timer,
            command_id=command.command_id,
            timer_ref=command.timer_ref,
            status=Status.REJECTED,
            code=refused.code,
            message=refused.message,
        )
        await self._reject(work.kind, outcome, work.delivery, work.reply_to)

    async def _refuse_unread(self, bad: BadCommand, delivery: Delivery) -> None:
        outcome = outcome_of(
            None,
            command_id=bad.command_id,
            timer_ref=bad.timer_ref,
            status=Status.REJECTED,
            code=bad.code,
            message=bad.message,
        )
        await self._reject(subject_kind(delivery.subject)[0], outcome, delivery, self._reply_to(delivery))

    async def _reject(self, kind: str | None, outcome: Outcome, delivery: Delivery, reply_to: str | None) -> None:
        """Record, tell, settle. Where it can't be recorded the command stays queued and is refused again."""
        rejection = rejection_of(kind, outcome, self._clock.now_ms(), delivery.data)
        try:
            await self._publicity.reject(rejection)
        except BrokerError as error:
            self._log.warning(events.COMMAND_DEFERRED, kind=rejection.kind, error=str(error))
            self._in_hand.discard(delivery.seq)
            await delivery.nak(_HOLD_MS)
            return
        if reply_to is not None:
            await self._publicity.outcome(reply_to, outcome)
        self._metrics.command(rejection.kind, Status.REJECTED, outcome.code or "")
        self._log.info(events.COMMAND_REJECTED, kind=rejection.kind, code=outcome.code, timer_ref=outcome.timer_ref)
        await self._done(delivery)

    async def _done(self, delivery: Delivery) -> None:
        self._in_hand.discard(delivery.seq)
        await delivery.ack()

    async def _release(self, work: Work, delay_ms: int) -> None:
        self._in_hand.discard(work.delivery.seq)
        await work.delivery.nak(delay_ms)

    def _on_stray_error(self, error: BaseException | None) -> None:
        if error is not None:
            self._log.error(events.WORK_FAILED, exc_info=error)
