"""A lease: one of several processes holds it and keeps saying so; what each of them knows of it, and does next.

Times are seconds of each process's own monotonic clock: no wall clock plays a part, and no clock is compared with
another. The holder counts from before it sent a renewal, all others from when they heard it, and they wait longer: so
a holder that can't renew has stopped before anybody else begins.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

RENEW_S = 0.75
HOLD_S = 2.0
"""So long after a renewal was sent the holder may rely on it."""
EXPIRY_S = 2.25
"""So long after the last sign of life all others leave a lease alone."""
OVERDUE_S = 1.25
"""After so long without a sign of life the holder is asked whether it is still connected."""
PAUSE_S = 0.05
RETRY_S = 0.25


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stands under a lease's key. ``epoch`` grows with every take-over, ``beat`` with every renewal."""

    instance: str
    process: str
    epoch: int
    beat: int
    ask: str
    """A subject that the holder listens on as long as it is connected."""
    given_up: bool = False

    def outlives(self, other: Record) -> bool:
        """Whether this comes from another holder, or from the same one later."""
        return (self.process, self.epoch) != (other.process, other.epoch) or self.beat > other.beat


UNREADABLE = Record("?", "", 0, 0, "")
"""Stands for what nobody can read: it is left alone until it has been silent for as long as a holder may be."""


class Step(Enum):
    """What a process does next about a lease."""

    WAIT = "wait"
    READ = "read"
    ASK = "ask"
    WRITE = "write"


class Contender:
    """What one process knows of one lease. Tell it what happened, then ask for the next ``step``."""

    def __init__(self, instance: str, process: str, ask: str) -> None:
        self._first = Record(instance, process, 0, 0, ask)
        self._epoch = 0
        self._beat = 0
        self.revision = 0
        """Of what was last read or written, 0 for nothing: a write is refused unless that still stands."""
        self.mine: Record | None = None
        """What this process last wrote, as long as nobody else is known to have taken over."""
        self.holder: Record | None = None
        """The other process that holds it, as far as known."""
        self.holder_lives = False
        """A sign of life of that holder has come, or it was found to be connected."""
        self._stored = False
        self._free = False
        self._unread = True
        self._confirmed = False
        self._held_until_s = -math.inf
        self._renew_s = -math.inf
        self._expires_s = math.inf
        self._ask_s = math.inf
        self._not_before_s = -math.inf

    def holds(self, now_s: float) -> bool:
        """Whether this process may rely on the lease at this instant."""
        return self.mine is not None and now_s < self._held_until_s

    def step(self, now_s: float) -> Step:
        """What to do now; WAIT until ``due_s``, or until something is heard."""
        if now_s < self._not_before_s:
            return Step.WAIT
        if self._unread:
            return Step.READ
        if self.mine is not None:
            return Step.WRITE if now_s >= self._renew_s else Step.WAIT
        if self.holder is None or self._free:
            return Step.WRITE
        if now_s >= self._expires_s:
            return Step.WRITE if self._confirmed else Step.READ
        return Step.ASK if now_s >= self._ask_s else Step.WAIT

    def due_s(self, now_s: float) -> float:
        """When, after ``now_s``, something may have to be done, or said, without any news."""
        times = (self._not_before_s, self._held_until_s, self._renew_s, self._expires_s, self._ask_s)
        return min((time_s for time_s in times if time_s > now_s), default=math.inf)

    def propose(self, *, given_up: bool = False) -> Record:
        """What to write now: a renewal, or the beginning of a new epoch. Each says more than the last one, if only
        by its beat: others hear it whether it is stored or not."""
        self._beat += 1
        epoch = self._epoch + 1 if self.mine is None else self.mine.epoch
        return msgspec.structs.replace(self._first, epoch=epoch, beat=self._beat, given_up=given_up)

    # -- what came of a write -----------------------------------------------------------------------------------

    def written(self, record: Record, revision: int, sent_s: float) -> None:
        """It is stored."""
        self.revision, self._stored = revision, True
        self._hold(record, sent_s)

    def no_room(self, record: Record, sent_s: float) -> None:
        """It was refused for want of room. What lives must go on, so whoever may hold it does so without a record."""
        self._stored = False
        self._hold(record, sent_s)

    def refused(self, record: Record, sent_s: float, now_s: float) -> None:
        """It was refused for another reason. A holder goes on unless a look shows somebody else."""
        if self.mine is not None:
            self._hold(record, sent_s)
        self._look(now_s + RENEW_S)

    def overtaken(self, now_s: float) -> None:
        """Another write came first."""
        self._look(now_s + PAUSE_S)

    def unanswered(self, now_s: float) -> None:
        """It may be stored or not: what stands there tells."""
        self._look(now_s + PAUSE_S)

    def _hold(self, record: Record, sent_s: float) -> None:
        self.mine, self.holder, self.holder_lives, self._free = record, None, False, False
        self._epoch = max(self._epoch, record.epoch)
        self._held_until_s, self._renew_s = sent_s + HOLD_S, sent_s + RENEW_S
        self._expires_s = self._ask_s = math.inf
        self._unread = False

    def _look(self, at_s: float) -> None:
        self._unread, self._not_before_s = True, at_s

    # -- what was read ------------------------------------------------------------------------------------------

    def found(self, record: Record | None, revision: int, now_s: float) -> None:
        """This stands under the key, None for nothing."""
        self._unread, self.revision = False, revision
        if record is not None:
            self._epoch = max(self._epoch, record.epoch)
        if record is not None and record.process == self._first.process and not record.given_up:
            self._found_own(record, now_s)
        elif self.mine is not None and (record is None or record.epoch < self.mine.epoch):
            self._renew_s = now_s  # what was ours is gone, or was never stored
        else:
            self._found_other(record, now_s)

    def not_read(self, now_s: float) -> None:
        """There was no answer. A holder tries to renew what it knows; others read again."""
        self._not_before_s = now_s + RETRY_S
        if self.mine is not None:
            self._unread, self._renew_s = False, now_s

    def no_bucket(self, asked_s: float, now_s: float) -> None:
        """There is nothing to read from, nor to write to: nobody can take it, so a holder goes on."""
        if self.mine is not None:
            self._hold(self.mine, asked_s)
        else:
            self._look(now_s + RENEW_S)

    def _found_own(self, record: Record, now_s: float) -> None:
        newest = record if self.mine is None else max(record, self.mine, key=lambda each: (each.epoch, each.beat))
        self.mine, self.holder, self.holder_lives = newest, None, False
        self._renew_s = now_s
        self._expires_s = self._ask_s = math.inf

    def _found_other(self, record: Record | None, now_s: float) -> None:
        known, self.mine = self.holder, None
        if known is not None and (record is None or record.epoch < known.epoch):
            self._found_no_claim(record, now_s)
        elif record is None:
            return
        elif known is None or record.outlives(known):
            self._believe(record, now_s, ask_s=now_s)
        else:
            self._confirmed = now_s >= self._expires_s

    def _found_no_claim(self, record: Record | None, now_s: float) -> None:
        """Somebody was heard to take it, and that is not stored, or not yet: what stands may well be alive."""
        if now_s < self._expires_s:
            return
        if record is None:
            self._confirmed = True
        else:
            self.holder = None
            self._believe(record, now_s, ask_s=now_s)

    def _believe(self, record: Record, now_s: float, *, ask_s: float) -> None:
        known = self.holder
        if known is None or (known.process, known.epoch) != (record.process, record.epoch):
            self.holder_lives = False
        self.holder, self._free, self._confirmed = record, record.given_up, False
        self._epoch = max(self._epoch, record.epoch)
        self._expires_s, self._ask_s = now_s + EXPIRY_S, ask_s if record.ask else math.inf
        self._held_until_s = self._renew_s = -math.inf

    # -- what was heard -----------------------------------------------------------------------------------------

    def heard(self, record: Record, now_s: float) -> None:
        """Another process has sent this to be written; whether it was stored is not known."""
        if self.mine is not None:
            self._heard_as_holder(record, now_s)
            return
        known = self.holder
        newer = known is None or record.epoch > known.epoch
        if newer or (known is not None and record.process == known.process and record.outlives(known)):
            self._believe(record, now_s, ask_s=now_s + OVERDUE_S)
            self.holder_lives = not record.given_up
            self._unread = self._unread or record.given_up  # its revision is needed

    def _heard_as_holder(self, record: Record, now_s: float) -> None:
        assert self.mine is not None
        if record.epoch < self.mine.epoch or record.given_up:
            return  # it was frozen, or is leaving
        if self._stored:
            self._unread = True  # the broker knows who was first
        elif (record.epoch, record.process) > (self.mine.epoch, self.mine.process):
            self.mine = None  # nothing can be stored: one of the two must give way
            self._believe(record, now_s, ask_s=now_s + OVERDUE_S)
            self.holder_lives = True

    def heard_nonsense(self) -> None:
        """Something was sent that can't be read: look what stands there."""
        self._unread = True

    # -- what was asked -----------------------------------------------------------------------------------------

    def asking(self, now_s: float) -> Record:
        """The holder that is to be asked; the step is taken with this, until it is due again."""
        assert self.holder is not None
        self._ask_s = now_s + OVERDUE_S
        return self.holder

    def is_gone(self, asked: Record) -> None:
        """Nobody listens on the subject of the holder that was asked: its connection is gone."""
        if self.holder is not None and not self.holder.outlives(asked):
            self._free = self._unread = True
            self.holder_lives = False

    def is_connected(self, asked: Record) -> None:
        """Somebody listens there."""
        if self.holder is not None and self.holder.process == asked.process:
            self.holder_lives = True

    # -- the connection -----------------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """Our connection is gone: others may find us gone, and begin."""
        self._held_until_s = -math.inf

    def returned(self, now_s: float) -> None:
        """Our connection is there again. Nobody could be heard meanwhile: that was no silence."""
        self._not_before_s = -math.inf
        if self.mine is not None:
            self._renew_s = now_s
        else:
            self._unread, self._confirmed = True, False
        if self.holder is not None:
            self._expires_s, self._ask_s = now_s + EXPIRY_S, now_s + OVERDUE_S
