"""What the NATS outbox knows of its rows without asking: which can be claimed, in which lane, and when the next can.

Fed from the bucket (every message's header and time) and from the acks of own writes. It is never the truth: a claim
is a compare-and-set on the revision found here, and loses when the row has moved on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

import msgspec

from notify_consumer.outbox.base import CLOCK_STEP_MS, State, Survey, Waiting
from notify_consumer.outbox.nats_record import Place

_Heap = list[tuple[int, int, str]]
_SLACK = 64


class Entry(msgspec.Struct, gc=False, eq=False):
    """A row that is not done. ``at_ms`` says when it can be claimed; None: not at all.

    ``ready`` while it waits to be claimed, ``taken`` while a claim of this process is under way.
    """

    seq: int
    place: Place
    stored_ms: int
    at_ms: int | None
    ready: bool = False
    taken: bool = False


class _Lane(msgspec.Struct):
    """Ready rows, the first come first; the heap holds former places too, ``ready`` counts what counts."""

    heap: _Heap = msgspec.field(default_factory=list)
    ready: int = 0


class Index:
    """Rows by key. Done ones are kept as sequence and time only: 16 bytes each, in the order of their end."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._lanes: dict[str, _Lane] = {}
        self._later: _Heap = []
        self._waiting = 0
        self._counts = dict.fromkeys(State, 0)
        self._now_ms = 0
        self._last = (0, 0)
        self._followed = 0
        self._done_seqs = array("q")
        self._done_at = array("q")
        self.strangers: set[str] = set()
        """Keys under which there is no row: what can't be read, and markers of what was deleted by hand."""

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    # -- learning -----------------------------------------------------------------------------------------

    def put(self, key: str, seq: int, place: Place, stored_ms: int) -> int:
        """The row stands like this since ``stored_ms``; returns when it does as far as this process is concerned.

        That is what it heard first, the broker's time or its own estimate. What is older than what is known changes
        nothing.
        """
        known = self._entries.get(key)
        if known is not None and known.seq >= seq:
            return known.stored_ms if known.seq == seq else stored_ms
        if known is None and seq <= self._followed:
            return stored_ms  # it was here, and has been done since: an answer that comes late does not bring it back
        self.strangers.discard(key)
        if known is not None:
            self._remove(key, known)
        if place.state is State.DONE:
            return stored_ms
        if place.wait_ms == 0:
            stored_ms = self._in_order(seq, stored_ms)
        at_ms = None if place.wait_ms is None else stored_ms + place.wait_ms
        entry = self._entries[key] = Entry(seq, place, stored_ms, at_ms)
        self._counts[place.state] += 1
        self._place(key, entry)
        return stored_ms

    def follow(self, key: str, seq: int, place: Place, stored_ms: int) -> None:
        """As ``put``, from the bucket itself: called for each message, in their order."""
        self._followed = seq - 1
        self.put(key, seq, place, stored_ms)
        self._followed = seq
        if place.state is State.DONE:
            self._done_seqs.append(seq)
            self._done_at.append(stored_ms)

    def _in_order(self, seq: int, stored_ms: int) -> int:
        """Rows that can be claimed at once stay in the order of the stream, whether their time came from the broker
        or was estimated when an own write was acknowledged."""
        last_seq, last_ms = self._last
        if abs(stored_ms - last_ms) < CLOCK_STEP_MS:
            stored_ms = max(stored_ms, last_ms) if seq > last_seq else min(stored_ms, last_ms)
        self._last = max(self._last, (seq, stored_ms))
        return stored_ms

    def drop(self, key: str, seq: int) -> None:
        """What stands under this key at ``seq`` is no row."""
        known = self._entries.get(key)
        if known is not None and known.seq < seq:
            self._remove(key, known)
        if known is None or known.seq < seq:
            self.strangers.add(key)

    def gone(self, key: str, entry: Entry) -> None:
        """The row that was known as ``entry`` is not there any more; one that came meanwhile stays."""
        if self._entries.get(key) is entry:
            self._remove(key, entry)

    def _remove(self, key: str, entry: Entry) -> None:
        self._unplace(entry)
        self._counts[entry.place.state] -= 1
        del self._entries[key]

    def _place(self, key: str, entry: Entry) -> None:
        if entry.at_ms is None:
            return
        if entry.place.wait_ms == 0 or entry.at_ms <= self._now_ms:
            lane = self._lanes.setdefault(entry.place.lane, _Lane())
            entry.ready = True
            lane.ready += 1
            heappush(lane.heap, (entry.at_ms, entry.seq, key))
            if len(lane.heap) > 2 * lane.ready + _SLACK:
                lane.heap = [item for item in lane.heap if self._is_ready(item)]
                heapify(lane.heap)
        else:
            self._waiting += 1
            heappush(self._later, (entry.at_ms, entry.seq, key))
            if len(self._later) > 2 * self._waiting + _SLACK:
                self._later = [item for item in self._later if self._is_later(item)]
                heapify(self._later)

    def _unplace(self, entry: Entry) -> None:
        if entry.at_ms is None or entry.taken:
            return
        if entry.ready:
            entry.ready = False
            self._lanes[entry.place.lane].ready -= 1
        else:
            self._waiting -= 1

    def _is_ready(self, item: tuple[int, int, str]) -> bool:
        entry = self._entries.get(item[2])
        return entry is not None and entry.ready and (entry.at_ms, entry.seq) == item[:2]

    def _is_later(self, item: tuple[int, int, str]) -> bool:
        entry = self._entries.get(item[2])
        placed = entry is not None and not entry.ready and not entry.taken
        return placed and entry is not None and (entry.at_ms, entry.seq) == item[:2]

    # -- claiming -----------------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """It is ``now_ms`` at the broker: what waited until then can be claimed.

        Where that clock stepped back, what is dated later than now waits anew from now.
        """
        if now_ms < self._now_ms - CLOCK_STEP_MS:
            self._rebase(now_ms)
        self._now_ms = now_ms
        while self._later and self._later[0][0] <= now_ms:
            item = heappop(self._later)
            if self._is_later(item):
                entry = self._entries[item[2]]
                self._waiting -= 1
                self._place(item[2], entry)

    def _rebase(self, now_ms: int) -> None:
        for key, entry in self._entries.items():
            if entry.at_ms is None or entry.ready or entry.taken or entry.stored_ms <= now_ms:
                continue
            entry.at_ms += now_ms - entry.stored_ms
            entry.stored_ms = now_ms
            heappush(self._later, (entry.at_ms, entry.seq, key))

    def survey(self, limit: int, at_most_ms: int) -> Survey:
        """What can be claimed as of the last ``advance``; the next row can when it is later than ``at_most_ms``."""
        lanes = {}
        for name in [name for name, lane in self._lanes.items() if not lane.ready]:
            del self._lanes[name]
        for name, lane in self._lanes.items():
            while not self._is_ready(lane.heap[0]):
                heappop(lane.heap)
            lanes[name] = Waiting(min(lane.ready, limit), lane.heap[0][0])
        while self._later and not self._is_later(self._later[0]):
            heappop(self._later)
        return Survey(lanes, max(1, self._later[0][0] - at_most_ms) if self._later else None)

    def take(self, lane_name: str, wanted: int) -> list[tuple[str, Entry]]:
        """Up to ``wanted`` rows of a lane, the first first, for a claim of this process; ``give_back`` ends it."""
        lane = self._lanes.get(lane_name)
        taken: list[tuple[str, Entry]] = []
        while lane is not None and lane.ready and len(taken) < wanted:
            item = heappop(lane.heap)
            if self._is_ready(item):
                entry = self._entries[item[2]]
                self._unplace(entry)
                entry.taken = True
                taken.append((item[2], entry))
        return taken

    def give_back(self, key: str, entry: Entry) -> None:
        """The claim is over. Where the row has not changed it can be claimed again. Repeating it does nothing."""
        if entry.taken and self._entries.get(key) is entry:
            entry.taken = False
            self._place(key, entry)

    def set_aside(self, key: str, entry: Entry) -> None:
        """The row can't be read: it is no more to be claimed until it changes."""
        if self._entries.get(key) is entry:
            self._unplace(entry)
            entry.at_ms, entry.ready, entry.taken = None, False, False

    # -- looking ------------------------------------------------------------------------------------------

    def counts(self) -> dict[State, int]:
        """How many rows there are in each state; of the done ones nothing is known here."""
        return dict(self._counts)

    def latest(self, state: State | None) -> Iterator[int]:
        """Sequences of rows, the latest change first; one that has changed meanwhile may still be among them."""
        live = [entry.seq for entry in self._entries.values() if state in (None, entry.place.state)]
        done = self._done_seqs if state in (None, State.DONE) else array("q")
        return iter(sorted({*live, *islice(reversed(done), 10_000)}, reverse=True))

    def done_before(self, before_ms: int, limit: int) -> list[int]:
        """The sequences of up to ``limit`` rows that were done before then; they are forgotten here."""
        old, most = 0, min(limit, len(self._done_at))
        while old < most and self._done_at[old] < before_ms:
            old += 1
        found = list(self._done_seqs[:old])
        del self._done_seqs[:old], self._done_at[:old]
        return found
