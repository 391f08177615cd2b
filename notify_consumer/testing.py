"""For the tests of those who write handlers: a complete outbox in memory. Nothing here touches disk or network."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from notify_consumer.errors import LeaseLost
from notify_consumer.outbox.base import FEEDBACK_LANE, Claim, Feedback, NewRow, Row, State, Survey, Waiting
from timer_service.clock import Clock, SystemClock


class _Entry(msgspec.Struct):
    """A row as it stands; changed in place."""

    row: Row
    lane: str
    readable: bool
    token: str | None = None

    def change(self, now_ms: int, **changes: Any) -> None:
        self.row = replace(self.row, updated_at_ms=now_ms, **changes)

    def unlease(self, now_ms: int, **changes: Any) -> None:
        self.token = None
        self.change(now_ms, owner=None, **changes)


class MemoryOutbox:
    """Keeps every promise of ``notify_consumer.outbox.base.Outbox`` but to outlive the process.

    With a ``ManualClock`` leases and backoffs run by hand. Pass one object to several relays to have them compete.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._entries: dict[str, _Entry] = {}

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do; the rows stay."""

    async def insert(self, rows: Sequence[NewRow]) -> set[str]:
        return {row.resume_id for row in rows if self._insert(row)}

    def _insert(self, new: NewRow) -> bool:
        readable = new.unreadable is None
        known = self._entries.get(new.resume_id)
        if known is not None and (known.readable or not readable):
            return False
        now_ms = self._clock.now_ms()
        row = Row(
            resume_id=new.resume_id,
            flow=new.flow,
            state=State.PENDING if readable else State.DEAD,
            attempts=0,
            sends=0,
            body=new.body,
            feedback=None,
            settled=None,
            last_error=new.unreadable,
            owner=None,
            claimable_at_ms=now_ms if readable else None,
            inserted_at_ms=now_ms if known is None else known.row.inserted_at_ms,
            updated_at_ms=now_ms,
        )
        self._entries[new.resume_id] = _Entry(row, new.flow, readable)
        return True

    async def survey(self, limit: int) -> Survey:
        now_ms = self._clock.now_ms()
        ready: dict[str, list[int]] = {}
        upcoming = []
        for entry in self._entries.values():
            at_ms = entry.row.claimable_at_ms
            if at_ms is not None and at_ms > now_ms:
                upcoming.append(at_ms - now_ms)
            elif at_ms is not None:
                ready.setdefault(entry.lane, []).append(at_ms)
        lanes = {lane: Waiting(min(len(since), limit), min(since)) for lane, since in ready.items()}
        return Survey(lanes, min(upcoming, default=None))

    async def claim(self, owner: str, wanted: Mapping[str, int], lease_ms: int) -> list[Claim]:
        token = secrets.token_hex(16)
        chosen = [entry for lane, count in wanted.items() for entry in self._claimable(lane)[:count]]
        return [self._lease(entry, owner, token, lease_ms) for entry in chosen]

    def _claimable(self, lane: str) -> list[_Entry]:
        now_ms = self._clock.now_ms()
        found = [
            (entry.row.claimable_at_ms, entry)
            for entry in self._entries.values()
            if entry.lane == lane and entry.row.claimable_at_ms is not None and entry.row.claimable_at_ms <= now_ms
        ]
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]

    def _lease(self, entry: _Entry, owner: str, token: str, lease_ms: int) -> Claim:
        now_ms = self._clock.now_ms()
        row = entry.row
        answered = row.state is State.ANSWERED
        entry.token = token
        entry.change(
            now_ms,
            state=State.ANSWERED if answered else State.CLAIMED,
            owner=owner,
            attempts=row.attempts + (not answered),
            sends=row.sends + answered,
            claimable_at_ms=now_ms + lease_ms,
        )
        return Claim(
            resume_id=row.resume_id,
            flow=row.flow,
            lane=entry.lane,
            body=row.body,
            attempts=entry.row.attempts,
            sends=entry.row.sends,
            feedback=row.feedback,
            owner=owner,
            token=token,
            expires_at_ms=now_ms + lease_ms,
            waited_ms=now_ms - (row.claimable_at_ms or 0),
        )

    async def renew(self, claims: Sequence[Claim], lease_ms: int) -> set[str]:
        now_ms = self._clock.now_ms()
        lost = set()
        for claim in claims:
            try:
                self._mine(claim).change(now_ms, claimable_at_ms=now_ms + lease_ms)
            except LeaseLost:
                lost.add(claim.resume_id)
        return lost

    async def store_outcome(self, claim: Claim, feedback: Feedback) -> Claim:
        entry = self._mine(claim)
        entry.lane = FEEDBACK_LANE
        entry.change(self._clock.now_ms(), state=State.ANSWERED, feedback=feedback, sends=1, last_error=None)
        return replace(claim, lane=FEEDBACK_LANE, feedback=feedback, sends=1)

    async def finish(self, claim: Claim, settled: str) -> None:
        self._mine(claim).unlease(
            self._clock.now_ms(),
            state=State.DONE,
            settled=settled,
            body=b"",
            last_error=None,
            claimable_at_ms=None,
        )

    async def back_off(self, claim: Claim, delay_ms: int, error: str) -> None:
        entry, now_ms = self._mine(claim), self._clock.now_ms()
        entry.unlease(now_ms, state=_handed_back(entry), last_error=error, claimable_at_ms=now_ms + delay_ms)

    async def kill(self, claim: Claim, reason: str) -> None:
        now_ms = self._clock.now_ms()
        self._mine(claim).unlease(now_ms, state=State.DEAD, last_error=reason, claimable_at_ms=None)

    async def release(self, claim: Claim) -> None:
        entry, now_ms = self._mine(claim), self._clock.now_ms()
        answered = entry.row.state is State.ANSWERED
        entry.unlease(
            now_ms,
            state=_handed_back(entry),
            attempts=entry.row.attempts - (not answered),
            sends=entry.row.sends - answered,
            claimable_at_ms=now_ms,
        )

    async def requeue_feedback(self, resume_ids: Sequence[str]) -> set[str]:
        now_ms = self._clock.now_ms()
        done = {each for each in resume_ids if self._stands(each, State.DONE)}
        for resume_id in done:
            entry = self._entries[resume_id]
            entry.change(now_ms, state=State.ANSWERED, sends=0, claimable_at_ms=now_ms)
        return done

    async def revive(self, resume_id: str) -> bool:
        if not self._stands(resume_id, State.DEAD) or not self._entries[resume_id].readable:
            return False
        entry, now_ms = self._entries[resume_id], self._clock.now_ms()
        entry.lane = entry.row.flow
        entry.change(now_ms, state=State.PENDING, attempts=0, sends=0, feedback=None, claimable_at_ms=now_ms)
        return True

    async def prune_done(self, older_than_ms: int) -> int:
        before_ms = self._clock.now_ms() - older_than_ms
        old = [
            entry.row.resume_id
            for entry in self._entries.values()
            if entry.row.state is State.DONE and entry.row.updated_at_ms < before_ms
        ]
        for resume_id in old:
            del self._entries[resume_id]
        return len(old)

    async def get(self, resume_id: str) -> Row | None:
        entry = self._entries.get(resume_id)
        return None if entry is None else entry.row

    async def browse(self, state: State | None, limit: int) -> list[Row]:
        rows = [e.row for e in reversed(self._entries.values()) if state in (None, e.row.state)]
        return sorted(rows, key=lambda row: row.updated_at_ms, reverse=True)[:limit]

    async def counts(self) -> dict[State, int]:
        states = [entry.row.state for entry in self._entries.values()]
        return {state: states.count(state) for state in State}

    def _mine(self, claim: Claim) -> _Entry:
        entry = self._entries.get(claim.resume_id)
        if entry is None or entry.token != claim.token:
            raise LeaseLost(claim.resume_id)
        return entry

    def _stands(self, resume_id: str, state: State) -> bool:
        entry = self._entries.get(resume_id)
        return entry is not None and entry.row.state is state


def _handed_back(entry: _Entry) -> State:
    return State.PENDING if entry.row.state is State.CLAIMED else entry.row.state
