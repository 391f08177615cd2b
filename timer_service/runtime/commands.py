"""The command service: read, decide, write, tell, settle; one command of a timer at a time.

A command is settled (acknowledged) only after what it changed, or that it was refused, is stored. Deciding twice is
harmless: the state keeps the ids of what it accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from timer_service import events
from timer_service.domain.codes import Code, Status
from timer_service.domain.identity import TimerRef
from timer_service.domain.machine import Refused, Settled, Write, decide
from timer_service.domain.model import ABSENT, MAX_DUE_MS, AnyCommand, Cancel, Order, Phase, Start, Timer
from timer_service.domain.summary import summary_of
from timer_service.errors import Ambiguous, BrokerError, StorageFull, UnreadableState, WrongRevision
from timer_service.fibers import start_fiber
from timer_service.ports import Archive, Snapshots, StateStore, Stored
from timer_service.runtime.admission import Admission
from timer_service.runtime.archived import Archived
from timer_service.runtime.driver import Driver
from timer_service.runtime.early import EarlyCancels
from timer_service.runtime.held import HOLD_MS, Held
from timer_service.runtime.lanes import Lanes
from timer_service.runtime.problems import Problems
from timer_service.runtime.recent import Recent
from timer_service.runtime.resumes import resumed_of
from timer_service.runtime.settling import AGAIN_MS, Delivery, Settling, Work
from timer_service.runtime.terminals import Terminals
from timer_service.wire.commands import BadCommand, Envelope, read_command
from timer_service.wire.records import encode, resume_of

_MAX_TRIES = 12
_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_AFTER_MISTAKE_MS = 10_000
_ENVELOPE_MARGIN = 512
_GROWTH = 16 * 512 + 2_048
"""What receipts and timeline can add to a state over its life, in bytes; a text that does not fit is refused."""
_LARGEST_KEY = 8_192
_STATE_OVERHEAD = 1_024
_BACK_AT_ONCE = 2_000
_PROBES = 50
"""So many of those held are asked back after a reading: with room, and while something seems full."""


class CommandService:
    """Settles commands; every one gets one outcome, and every refusal is recorded."""

    def __init__(
        self,
        store: StateStore,
        archive: Archive,
        snapshots: Snapshots,
        settling: Settling,
        terminals: Terminals,
        driver: Driver,
        lanes: Lanes,
        recent: Recent,
        archived: Archived,
        admission: Admission,
        problems: Problems,
        log: Any,
        *,
        offset_ms: Callable[[], int],
        max_payload: Callable[[], int],
        inline_payload_max_bytes: int,
    ) -> None:
        self._store = store
        self._archive = archive
        self._snapshots = snapshots
        self._settling = settling
        self._terminals = terminals
        self._driver = driver
        self._lanes = lanes
        self._recent = recent
        self._archived = archived
        self._admission = admission
        self._problems = problems
        self._log = log
        self._offset_ms = offset_ms
        self._max_payload = max_payload
        self._inline_max = inline_payload_max_bytes
        self._early = EarlyCancels(settling, self._enqueue)
        self._held = Held(lambda: asyncio.get_running_loop().time())

    # -- in ---------------------------------------------------------------------------------------------------

    def handle(self, delivery: Delivery) -> None:
        """Take one command; returns at once. A second delivery of one in hand is put off: the first settles it."""
        if not self._settling.take(delivery):
            start_fiber(delivery.nak(AGAIN_MS), self._on_stray_error)
            return
        self._held.arrived(delivery.seq)
        try:
            command = self._read(delivery)
        except BadCommand as bad:
            start_fiber(self._settling.refuse_unread(bad, delivery), self._on_stray_error)
        else:
            self._enqueue(Work(command, delivery, self._settling.reply_to(delivery)))

    def entry_arrived(self, timer_ref: TimerRef) -> None:
        """The feed shows a state for ``timer_ref``: cancels that wait for its start are decided again."""
        self._early.arrived(timer_ref)

    def room_read(self) -> None:
        """There is a new reading of the room: ask back, oldest first, what may find some."""
        most = _PROBES if self._admission.full else _BACK_AT_ONCE
        back = self._held.take(most, starts=False)
        if self._admission.open:
            back += self._held.take(_BACK_AT_ONCE, starts=True)
        for delivery in back:
            start_fiber(delivery.nak(), self._on_stray_error)

    @property
    def held(self) -> int:
        """About how many timers have a command that waits for room."""
        return len(self._held)

    async def stop(self) -> None:
        """Hand back the cancels that still wait."""
        await self._early.stop()

    def _read(self, delivery: Delivery) -> AnyCommand:
        stored_at_ms = delivery.stored_at_ms
        envelope = Envelope(Order(stored_at_ms, delivery.seq), stored_at_ms + self._offset_ms())
        try:
            return read_command(delivery.subject, delivery.data, envelope)
        except BadCommand:
            raise
        except Exception:  # a mistake of ours in reading must not leave a message that nobody settles
            self._log.exception(events.WORK_FAILED, subject=delivery.subject[:200])
            raise BadCommand(Code.MALFORMED, "the body can't be read") from None

    def _enqueue(self, work: Work) -> None:
        self._lanes.run(work.command.timer_ref, partial(self._settle, work))

    # -- deciding ---------------------------------------------------------------------------------------------

    async def _settle(self, work: Work) -> None:
        try:
            await self._settle_in_rounds(work)
        except Exception:  # whatever goes wrong with one command, it must not be stranded
            self._log.exception(events.WORK_FAILED, kind=work.kind, timer_ref=work.command.timer_ref)
            await self._settling.release(work, _AFTER_MISTAKE_MS)

    async def _settle_in_rounds(self, work: Work) -> None:
        for attempt in range(_MAX_TRIES):
            try:
                if await self._decide_and_write(work, fresh=attempt > 0):
                    return
            except StorageFull as error:
                await self._drop_snapshot(work)
                await self._hold(work, str(error))
                return
            except UnreadableState as error:
                self._problems.report(error)
                await self._settling.refuse(work, None, Refused(Code.STATE_UNREADABLE, error.message))
                return
            except WrongRevision:
                pass
            except BrokerError as error:
                work.unsure = work.unsure or isinstance(error, Ambiguous)
                await asyncio.sleep(min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S))
            self._recent.forget(work.command.timer_ref)
        self._log.warning(events.COMMAND_DEFERRED, kind=work.kind, timer_ref=work.command.timer_ref)
        await self._settling.release(work, AGAIN_MS)

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
        elif decision.code is Code.UNKNOWN_TIMER and isinstance(command, Cancel) and command.timer_ref in self._held:
            await self._early.wait(work, HOLD_MS)  # its start is queued for want of room
        elif decision.code is Code.UNKNOWN_TIMER and isinstance(command, Cancel) and not work.waited:
            await self._early.wait(work, command.wait_ms)
        else:
            await self._settling.refuse(work, timer, decision)
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
            if isinstance(command, Start) and self._surely_new(timer_ref):
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

    async def _settled(self, work: Work, timer: Timer | None, settled: Settled) -> None:
        status = settled.status
        if work.unsure and status is Status.DUPLICATE:
            status = Status.ACCEPTED  # the id in the state is our own write, whose reply was lost
            self._driver.waits.wrote(work.command.timer_ref, MAX_DUE_MS)
        await self._settling.accept(work, timer, status, settled.code)
        if timer is not None and timer.phase.ended and timer.status is None:
            stored = await self._store.get(timer.timer_ref)
            if stored.timer is not None and stored.timer.phase.ended:
                await self._terminals.finish(stored.timer, stored.revision)

    def _surely_new(self, timer_ref: TimerRef) -> bool:
        """No life that this process knows of: to be wrong costs a write that loses, and perhaps a stored payload."""
        known = self._driver.get(timer_ref) is not None or timer_ref in self._problems
        return not known and not self._archived.may_have(timer_ref)

    # -- writing ----------------------------------------------------------------------------------------------

    async def _write(self, work: Work, stored: Stored, write: Write) -> None:
        timer = write.timer
        if isinstance(work.command, Start):
            prepared = await self._prepare(work, work.command, stored, timer)
            if prepared is None:
                return
            timer = prepared
        elif timer.message and (size := len(encode(timer)) + _ENVELOPE_MARGIN) > self._max_payload():
            message = f"with this text its record would have {size} bytes; the broker takes {self._max_payload()}"
            await self._settling.refuse(work, stored.timer, Refused(Code.TOO_LARGE, message))
            return
        revision = await self._store.put(timer, stored.revision)
        timer_ref = timer.timer_ref
        self._recent.keep(timer_ref, Stored(timer, revision))
        self._problems.solved(timer_ref)  # a payload that was gone does not matter any more
        self._driver.observe(timer_ref, revision, summary_of(timer))
        self._driver.waits.wrote(timer_ref, _waited_until_ms(stored.timer))
        self._held.settled(timer_ref, work.delivery.seq)
        await self._settling.accept(work, timer, Status.ACCEPTED, write.code)
        self._early.arrived(timer_ref)
        if timer.phase.ended:
            await self._terminals.finish(timer, revision)
        elif stored.timer is not None and stored.timer.snapshot_seq not in (None, timer.snapshot_seq):
            await self._terminals.drop_snapshot(stored.timer)

    async def _prepare(self, work: Work, start: Start, stored: Stored, timer: Timer) -> Timer | None:
        """What a start needs before its state is written; None when it was settled otherwise."""
        if (size := self._envelope_bytes(timer, start)) > self._max_payload():
            message = f"its messages would have up to {size} bytes; the broker takes {self._max_payload()}"
            await self._settling.refuse(work, stored.timer, Refused(Code.TOO_LARGE, message))
            return None
        if self._held.older(timer.timer_ref, work.delivery.seq):
            await self._hold(work, "an earlier start of this timer waits for room")
            return None
        if not self._admission.admit(*self._room(start)):
            await self._hold(work, self._admission.reason)
            return None
        former = stored.timer
        if former is not None and former.phase.ended and former.status is None:
            timer = replace(timer, archive_seq=await self._terminals.archive(former))
        if _bytes(start) > self._inline_max:
            timer = replace(timer, payload=ABSENT, snapshot_seq=await self._snapshot(work, start, timer))
        return timer

    async def _snapshot(self, work: Work, start: Start, timer: Timer) -> int:
        if work.snapshot is None or work.snapshot[0] != timer.generation:
            seq = await self._snapshots.add(timer.timer_ref, timer.generation, start.payload)
            work.snapshot = (timer.generation, seq)
        return work.snapshot[1]

    async def _drop_snapshot(self, work: Work) -> None:
        """A start without room for its state leaves nothing behind; it stores its payload anew when it returns."""
        if work.snapshot is not None and not work.unsure:
            await self._terminals.delete_snapshot(work.snapshot[1])
            work.snapshot = None

    def _envelope_bytes(self, timer: Timer, start: Start) -> int:
        """The largest message that this timer can lead to; 0 where it is small beyond doubt."""
        size = _bytes(start)
        if size + _GROWTH + _LARGEST_KEY < self._max_payload():
            return 0
        resume = len(encode(resume_of(timer, start.payload))) + _ENVELOPE_MARGIN
        inline = timer if size <= self._inline_max else replace(timer, payload=ABSENT)
        return max(resume, len(encode(inline)) + _GROWTH)

    async def _hold(self, work: Work, reason: str) -> None:
        """No room: a start stays queued without an outcome; it is refused when the queue itself is short of room."""
        start = isinstance(work.command, Start)
        if start and self._admission.commands_short:
            message = f"{reason}; the command stream is more than half full"
            self._held.settled(work.command.timer_ref, work.delivery.seq)
            await self._settling.refuse(work, None, Refused(Code.STORAGE_FULL, message))
            return
        self._log.debug(events.COMMAND_HELD, kind=work.kind, timer_ref=work.command.timer_ref, reason=reason)
        await self._settling.release(work, self._held.note(work.command.timer_ref, work.delivery, start=start))

    def _room(self, start: Start) -> tuple[int, int]:
        """About how many bytes a start takes in the state, and among the snapshots."""
        size = _bytes(start)
        return (_STATE_OVERHEAD, size + _STATE_OVERHEAD) if size > self._inline_max else (_STATE_OVERHEAD + size, 0)

    def _on_stray_error(self, error: BaseException | None) -> None:
        if error is not None:
            self._log.error(events.WORK_FAILED, exc_info=error)


def _waited_until_ms(former: Timer | None) -> int:
    return former.due_at_ms if former is not None and former.phase is Phase.WAITING else 0


def _bytes(start: Start) -> int:
    return memoryview(start.payload).nbytes
